"""A LayerSkip draft as one plain transformers model, for `generate(assistant_early_exit=E)`.

LayerSkip trains the target itself, so what is exported is a whole model: a LoRA adapter merged into its base (summed in
float32, which is what is saved), or the trained model without selfspec's own keys in its config.json.

transformers drafts with the first E layers by lowering `config.num_hidden_layers`. A model whose forward does not look
there would draft with all of its layers, as slow as it is unnoticed: that is tried, and refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.target.adapters import WEIGHTS, merge_adapter
from selfspec.target.identity import fingerprint
from selfspec.training.export.folders import new_folder, read_config

OURS = ("kind", "exit_layer", "exits", "base", "target", "d_vocab", "adapter_sha256")


def export_transformers(draft_path: str | Path, target: Target, out: str | Path) -> None:
    """`target`: the base the draft was trained from, or already the model it became.

    UserError: no LayerSkip draft, another base, weights that are not those trained, a model type whose exits
    transformers would not take.
    """
    folder, config = read_config(draft_path)
    if config.get("kind") != "layerskip" or not {"exit_layer", "base", "target"} <= set(config):
        raise UserError(f"{folder} holds a draft of kind {config.get('kind')!r}; format=transformers is for layerskip.")
    if target.fingerprint not in (config["base"]["fingerprint"], config["target"]["fingerprint"]):
        raise UserError(
            f"{folder} was trained from {config['base']['name']} (fingerprint {config['base']['fingerprint']}), "
            f"{target.name} has {target.fingerprint}. Give its own target=."
        )
    model = _trained(folder, config, target)
    found = fingerprint(model, target.vocab_size, target.num_layers, target.width)
    if found != config["target"]["fingerprint"]:
        raise UserError(
            f"The weights in {folder} have fingerprint {found}, config.json says {config['target']['fingerprint']}: "
            "one of the two was replaced."
        )
    for name in OURS:
        if name in model.config.__dict__:
            delattr(model.config, name)
    exit_layer = int(config["exit_layer"])
    check_exits(model, attrgetter(target.family.layers)(model), exit_layer)
    with new_folder(out) as partial:
        model.save_pretrained(partial)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(_readme(config, exit_layer), encoding="utf-8")


def check_exits(model: Any, layers: Iterable[Any], exit_layer: int) -> None:
    """UserError unless lowering `num_hidden_layers` keeps transformers from running the layers behind it."""
    called: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: called.append(index))
        for index, layer in enumerate(layers)
    ]
    whole = model.config.num_hidden_layers
    try:
        model.config.num_hidden_layers = exit_layer
        with torch.no_grad():
            model(torch.ones(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        model.config.num_hidden_layers = whole
        for handle in handles:
            handle.remove()
    if called != list(range(exit_layer)):
        raise UserError(
            f"transformers does not exit a {model.config.model_type} early: asked for {exit_layer} layers, it ran "
            f"{len(called)}, so assistant_early_exit would draft with the whole model. Decode it with selfspec."
        )


def _trained(folder: Path, config: dict[str, Any], target: Target) -> Any:
    if (folder / WEIGHTS).is_file():
        model = copy.deepcopy(target.hf_model).float()
        if target.fingerprint == config["base"]["fingerprint"]:
            merge_adapter(model, folder)
        return model.eval()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True).eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"Cannot read the model in {folder}: {str(error).splitlines()[0]}") from error


def _readme(config: dict[str, Any], exit_layer: int) -> str:
    return f"""# {config["target"]["name"]}

{config["base"]["name"]} trained on with LayerSkip by selfspec: another model than its base, with an exit after
{exit_layer} of its {config["target"]["num_layers"]} layers that can draft for it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (auto.from_pretrained("<this folder>") for auto in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("Gravity is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, assistant_early_exit={exit_layer})[0]))
```
"""
