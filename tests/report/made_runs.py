"""Run directories with known answers, for the tests of the report."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec.records import PromptRecord, RoundRecord, RunWriter

CATEGORIES = ("chat", "code", "math")


def made_record(
    prompt_id: str = "p00", method: str = "ar", emitted: Sequence[int] = (1, 1, 1), num_drafted: int = 0, **changes: Any
) -> PromptRecord:
    """A consistent record: `emitted` tokens per round, one millisecond of drafting and two of verifying each."""
    rounds = [RoundRecord(num_drafted, count - 1, count, 0.001 * (num_drafted > 0), 0.002, 0.0005) for count in emitted]
    values: dict[str, Any] = {
        "prompt_id": prompt_id,
        "category": "chat",
        "method": method,
        "repeat": 0,
        "num_prompt_tokens": 10,
        "token_ids": list(range(sum(emitted))),
        "text": "made",
        "finish_reason": "length",
        "lossy": False,
        "prefill_s": 0.25,
        "ttft_s": 0.3,
        "decode_s": 0.75,
        "rounds": rounds,
    }
    values.update(changes)
    values.setdefault("total_s", values["prefill_s"] + values["decode_s"])
    return PromptRecord(**values)


def timed_record(
    prompt_id: str, method: str, num_tokens: int, num_rounds: int, total_s: float, **changes: Any
) -> PromptRecord:
    """`num_tokens` spread evenly over `num_rounds`, taking `total_s` altogether."""
    emitted = [num_tokens // num_rounds + (i < num_tokens % num_rounds) for i in range(num_rounds)]
    num_drafted = 0 if num_tokens == num_rounds else max(emitted)
    times = {"prefill_s": 0.1 * total_s, "decode_s": 0.9 * total_s, "total_s": total_s, "ttft_s": 0.11 * total_s}
    record = made_record(prompt_id, method, emitted, num_drafted, **{**times, **changes})
    for entry in record.rounds:
        entry.draft_s = 0.3 * record.decode_s / num_rounds if num_drafted else 0.0
        entry.verify_s = 0.6 * record.decode_s / num_rounds
    return record


METHODS: dict[str, tuple[int, float, dict[str, Any]]] = {  # rounds, seconds relative to AR, the rest
    "hf_generate": (60, 1.1, {"rounds": []}),
    "ar": (60, 1.0, {}),
    "early_exit": (25, 0.66, {"alpha_sum": 30.0, "alpha_count": 40}),
    "typical_exit": (20, 0.5, {"lossy": True}),
    "synthetic_80": (30, 0.8, {"synthetic": True}),
}


def made_records(num_prompts: int = 12, repeats: int = 3, seed: int = 0) -> list[PromptRecord]:
    """AR, plain generate, a draft about 1.5 times as fast, a lossy one and a synthetic one, on noisy clocks."""
    rng = random.Random(seed)
    records = []
    for repeat in range(repeats):
        for index in range(num_prompts):
            for method, (num_rounds, factor, more) in METHODS.items():
                total_s = (2.0 + index / 10) * factor * rng.lognormvariate(0.0, 0.02)
                values: dict[str, Any] = {"equals_ar": True, "divergence_class": "identical", **more}
                values |= {
                    "category": CATEGORIES[index % 3],
                    "repeat": repeat,
                    "peak_host_bytes": 1_200_000_000 + index,
                }
                records.append(timed_record(f"p{index:02d}", method, 60, num_rounds, total_s, **values))
    return records


def write_run(
    path: Path,
    records: Sequence[PromptRecord] | None = None,
    finish: bool = True,
    prompt_set: dict[str, tuple[str, str | None]] | None = None,
    score: str | None = None,
    **provenance: Any,
) -> Path:
    """A run directory holding `records`, with a config and a provenance like a real run's. prompt_set: split and
    reference by prompt id.
    """
    path = path if path.name[-9:-8] == "-" else path.with_name(f"{path.name}-0123abcd")
    config = {
        "target": {"kind": "smollm2", "path": None},
        "sampling": {"temperature": 0.0},
        "runtime": {"dtype": "float32", "device": "cpu"},
        "max_new_tokens": 60,
        "prompts": {"score": score},
    }
    machine = {"host_hash": "lab1", "cpu": "Xeon & co_1", "num_cpus": 2, "num_threads": 2, "gpus": []}
    recorded = {"machine": machine, "versions": {"torch": "2.13.0", "transformers": "5.24.0"}, **provenance}
    with RunWriter(path) as writer:
        writer.write_text("config.yaml", json.dumps(config))
        writer.write_text("provenance.json", json.dumps(recorded))
        if prompt_set is not None:
            lines = [
                {"prompt_id": k, "category": "chat", "split": s, "reference": r} for k, (s, r) in prompt_set.items()
            ]
            writer.write_text("prompt_set.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        for record in made_records() if records is None else records:
            writer.append(record)
        if finish:
            writer.finish({})
    return path
