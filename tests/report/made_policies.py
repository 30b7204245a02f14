"""A run of lookahead policies with known answers: whether a draft stands is written beside the text, times are set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from made_runs import CATEGORIES, write_run

from selfspec.lookahead import build_lookahead
from selfspec.lookahead.plan import RoundOutcome
from selfspec.records import PromptRecord, RoundRecord, RunWriter

NUM_TOKENS = 48
STEP_S = 0.012
LOOKAHEADS: dict[str, Any] = {
    "k1": 1,
    "k2": 2,
    "k3": 3,
    "k5": {"kind": "fixed", "num_drafted": 5},
    "heuristic": {"kind": "heuristic", "initial": 3, "max_drafted": 5},
    "expected_gain": {"kind": "expected_gain", "max_drafted": 5},
}
DRAFTERS: dict[str, tuple[float, Callable[[int], float]]] = {  # share of drafts that stand, cost of a round in AR steps
    "eagle3": (0.45, lambda k: 1.0 + 0.12 * k),
    "early_exit": (0.6, lambda k: 1.0 + 0.35 * k),
    "ngram": (0.3, lambda k: 1.0 + 0.03 * k),
}


def decode(label: str, prompt: int, lookahead: Any, stands: float, cost: Callable[[int], float]) -> PromptRecord:
    """One prompt, decoded by the policy itself on a clock of our own."""
    rng = random.Random(f"{label.split('_k')[0].split('_heu')[0].split('_exp')[0]} {prompt}")  # one text per drafter
    right = [rng.random() < stands for _ in range(NUM_TOKENS + 8)]
    noise = random.Random(f"{label} {prompt}")
    rounds, at = [], 0
    while at < NUM_TOKENS:
        plan = lookahead.choose()
        k = plan.num_drafted
        accepted = next((i for i in range(k) if not right[at + i]), k)
        round_s = STEP_S * cost(k) * noise.lognormvariate(0, 0.01)
        draft_s = round_s - round_s / cost(k)
        if hasattr(lookahead, "observe"):
            lookahead.observe(RoundOutcome(plan, [k], [accepted], [accepted + 1], draft_s, round_s - draft_s, 0.0))
        emitted = min(accepted + 1, NUM_TOKENS - at)
        rounds.append(RoundRecord(k, accepted, emitted, draft_s, round_s - draft_s, 0.0))
        at += emitted
    decode_s, prefill_s = sum(entry.draft_s + entry.verify_s for entry in rounds), 0.05
    return PromptRecord(
        prompt_id=f"p{prompt:02d}",
        category=CATEGORIES[prompt % 3],
        method=label,
        repeat=0,
        num_prompt_tokens=20,
        token_ids=list(range(NUM_TOKENS)),
        text="made",
        finish_reason="length",
        lossy=False,
        prefill_s=prefill_s,
        ttft_s=prefill_s + STEP_S,
        decode_s=decode_s,
        total_s=prefill_s + decode_s,
        equals_ar=True,
        divergence_class="identical",
        rounds=rounds,
    )


def write_policies(
    path: Path, drafters: Mapping[str, Mapping[str, Any]] | None = None, num_prompts: int = 8, lookahead: Any = None
) -> Path:
    """A finished run directory; drafters: options by label, each with a lookahead (None: three kinds with all)."""
    if drafters is None:
        drafters = {
            f"{name}_{policy}": {"kind": name, "lookahead": lookahead}
            for name in DRAFTERS
            for policy, lookahead in LOOKAHEADS.items()
        }
    records = [decode("ar", prompt, build_lookahead(1), 0.0, lambda k: 1.0) for prompt in range(num_prompts)]
    for record in records:
        for entry in record.rounds:
            entry.num_drafted = 0
    costs = {}
    for label, options in drafters.items():
        policy = build_lookahead(options.get("lookahead") or lookahead)
        stands, cost = DRAFTERS[options["kind"]]
        stands *= (options.get("exit_layer") or 20) / 20
        own = [decode(label, prompt, policy, stands, cost) for prompt in range(num_prompts)]
        records += own
        rounds = [entry for record in own for entry in record.rounds]
        tau = sum(entry.num_emitted for entry in rounds) / len(rounds)
        mean = sum(entry.num_drafted for entry in rounds) / len(rounds)
        round_s = sum(entry.draft_s + entry.verify_s for entry in rounds) / len(rounds)
        costs[label] = {
            "num_drafted": mean,
            "tau": tau,
            "c_predicted": 0.1,
            "c_measured": None,
            "v_measured": 1.0,
            "round_s_per_token": round_s / tau,
            "speedup_simple": STEP_S / (round_s / tau),
            "speedup_model": tau / (1 + 0.1 * mean),
            "break_even_alpha": None,
        }
    folder = write_run(path, records, finish=False)
    config = json.loads((folder / "config.yaml").read_text()) | {"drafters": drafters, "lookahead": lookahead}
    with RunWriter(folder) as writer:
        writer.write_text("config.yaml", json.dumps(config))
        limits = {"context": 44, "step_bytes": 2.7e8, "read_bytes_per_s": 3e10, "bandwidth_share": 0.75}
        limits |= {"ar_s_per_token": STEP_S, "limit_tokens_per_s": 111.0}
        writer.finish({"costs": {"methods": costs, **limits}})
    return folder
