"""What each of two ranks runs for test_tensor_parallel.py: `torchrun ... tensor_parallel_worker.py <folder>`.

The folder holds `cases.json`, the models and the drafts; every rank leaves `rank<r>.json`. Then the main job runs,
twice; and at last one rank fails while the other waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

import selfspec
from selfspec.config import RuntimeConfig, conf_dir
from selfspec.errors import UserError
from selfspec.measure.ranks import in_step
from selfspec.run import run_compare, user_errors
from selfspec.target import Target
from selfspec.target.tensor_parallel import told_by_first


def decoded(target: Target, case: dict[str, Any]) -> dict[str, Any]:
    """The tokens of one case, and how many drafts each round made."""
    drafter = None
    if case.get("checkpoint"):
        drafter = selfspec.load_drafter(case["checkpoint"], target)
    elif case.get("drafter"):
        drafter = selfspec.build_drafter(case["drafter"], target, **case.get("options", {}))
    sampling = selfspec.Sampling(temperature=case.get("temperature", 0.0))
    outputs = selfspec.decode(
        target,
        drafter,
        case["prompts"],
        max_new_tokens=case["max_new_tokens"],
        lookahead=case.get("lookahead", 3),
        sampling=sampling,
        acceptance=case.get("acceptance", "auto"),
        seed=3,
        ignore_eos=True,
        max_batch_rows=2,
        cache=case.get("cache", "contiguous"),
    )
    return {
        "token_ids": [output.token_ids for output in outputs],
        "num_drafted": [[one.num_drafted for one in output.rounds] for output in outputs],
        "num_accepted": sum(one.num_accepted for output in outputs for one in output.rounds),
    }


def refusal(action: Any) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def checks(folder: Path, rank: int) -> dict[str, Any]:
    cases = json.loads((folder / "cases.json").read_text())
    found: dict[str, Any] = {"cases": {}, "facts": {}, "refusals": {}}
    for model, its_cases in cases.items():
        target = selfspec.load_target(folder / model, "float32", "cpu", with_tokenizer=False, tensor_parallel=2)
        found["facts"][model] = {
            "fingerprint": target.fingerprint,
            "num_kv_heads": target.layer_shapes[0].num_kv_heads,
            "weight_bytes": target.weight_bytes,
            "head_sum": float(target.head_weight_VM.detach().double().sum()),
        }
        for name, case in its_cases.items():
            found["cases"][f"{model}/{name}"] = decoded(target, case)
    prompt = cases["llama"]["ar"]["prompts"][0]
    target = selfspec.load_target(folder / "llama", "float32", "cpu", with_tokenizer=False, tensor_parallel=2)
    found["hf"] = target.hf_generate(prompt, 12, selfspec.Sampling()).token_ids
    found["hf_hook"] = target.hf_model.generate(
        torch.tensor([prompt]), max_new_tokens=12, custom_generate=selfspec.hf_generate, drafter="ngram"
    )[0].tolist()
    found["told"] = told_by_first(("mine", rank), 2)

    def load(name: str, **options: Any) -> Any:
        return lambda: selfspec.load_target(
            folder / name, "float32", "cpu", with_tokenizer=False, tensor_parallel=2, **options
        )

    decoder = selfspec.Decoder(target)
    found["refusals"] = {
        "three kv heads": refusal(load("odd")),
        "no plan": refusal(load("gpt2")),
        "fused": refusal(load("llama", fused=True)),
        "not finite": refusal(load("broken")),
        "three ranks": refusal(lambda: selfspec.load_target(folder / "llama", device="cpu", tensor_parallel=3)),
        "random": refusal(lambda: selfspec.load_target("random-tiny", device="cpu", tensor_parallel=2)),
        "arrivals": refusal(lambda: decoder.decode([prompt, prompt], arrivals_s=[0.0, 0.1])),
        "graphs": refusal(lambda: selfspec.Decoder(target, rounds="whole")),
    }
    # ranks that are asked for different things are found out, and nothing is returned
    try:
        decoder.decode([prompt], max_new_tokens=12, seed=rank, sampling=selfspec.Sampling(temperature=1.0))
        found["drifted"] = ""
    except RuntimeError as error:
        found["drifted"] = str(error)
    return found


def main_job(folder: Path) -> None:
    overrides = ["experiment=smoke_tiny", "measure.max_prompts=2", "max_new_tokens=3", f"output_dir={folder / 'out'}"]
    overrides += ["runtime.tensor_parallel=2", "target=hf", f"target.path={folder / 'llama'}"]
    overrides += ["drafter=eagle3", f"drafter.checkpoint={folder / 'eagle3'}"]
    for _ in range(2):  # the second time it is measured already
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("compare", overrides)
        run_compare(composed)


def fail() -> None:
    with in_step(RuntimeConfig(tensor_parallel=2)) as first:
        if not first:
            raise UserError("rank 1 cannot go on")
        dist.barrier()  # waits for a rank that will never come


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    found = checks(folder, rank)
    group = dist.group.WORLD
    main_job(folder)
    found["one group"] = dist.is_initialized() and dist.group.WORLD is group
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    user_errors(fail)()
