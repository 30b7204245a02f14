"""Run by the interpreter of another environment: exported folders through the `speculators` package's own loader.

    python speculators_forward.py <folder> ...

Each folder holds out/ (the export) and inputs.safetensors (features_TF, token_ids_T); written beside them are
outputs.safetensors (the logits of every chained step, d2t, t2d) and facts.json (what the loader made of it).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@torch.no_grad()
def run(folder: Path) -> None:
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(str(folder / "out"), dtype=torch.float32).eval()
    given = load_file(folder / "inputs.safetensors")
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0].clone()))
    num_steps = model.config.speculators_config.proposal_methods[0].speculative_tokens
    ids_1T = given["token_ids_T"][None]
    model(given["features_TF"][None], ids_1T, torch.zeros_like(ids_1T), ttt_steps=num_steps)
    assert len(logits) == num_steps
    state = model.state_dict()
    kept = {f"logits_{j}": step for j, step in enumerate(logits)}
    kept |= {name: state[name] for name in ("d2t", "t2d") if name in state}
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "outputs.safetensors")
    facts = {
        "class": type(model).__name__,
        "layers": model.target_layer_ids,
        "nan": [name for name, tensor in state.items() if tensor.is_floating_point() and bool(tensor.isnan().any())],
        **{name: version(name) for name in ("speculators", "transformers", "torch")},
    }
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
