"""What must be true before a number is shown: of every record, and of runs put into one table.

A record that breaks an invariant means a bug in the decoder or the clock, so no table is made from it. Runs are refused
together when comparing them would mislead: different machines, or the same configuration measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.errors import UserError
from selfspec.records import PromptRecord, Run

FINISH_REASONS = ("eos", "stop_string", "length")
DIVERGENCE_CLASSES = ("identical", "near_tie", "mismatch")


def check_record(record: PromptRecord, run: str) -> None:
    """Raises `UserError` naming run, prompt and method when a record contradicts itself."""
    broken = _broken(record)
    if broken is not None:
        raise UserError(
            f"{run}: prompt {record.prompt_id!r}, method {record.method!r}, repeat {record.repeat}: {broken}; "
            "the record contradicts itself, so no table is made from it. Measure it again."
        )


def _broken(record: PromptRecord) -> str | None:
    for name in ("prefill_s", "ttft_s", "decode_s", "total_s"):
        value = getattr(record, name)
        if not (math.isfinite(value) and value >= 0):
            return f"{name} is {value}"
    if record.total_s <= 0:
        return "total_s is 0"
    if not math.isclose(record.total_s, record.prefill_s + record.decode_s, rel_tol=1e-3, abs_tol=1e-4):
        return f"total_s {record.total_s} is not prefill_s {record.prefill_s} + decode_s {record.decode_s}"
    if record.ttft_s > record.total_s * (1 + 1e-3) + 1e-4:
        return f"ttft_s {record.ttft_s} is longer than total_s {record.total_s}"
    if not record.token_ids:
        return "no token was emitted"
    if record.finish_reason not in FINISH_REASONS:
        return f"finish_reason is {record.finish_reason!r}, not one of {FINISH_REASONS}"
    if record.divergence_class not in (None, *DIVERGENCE_CLASSES):
        return f"divergence_class is {record.divergence_class!r}, not one of {DIVERGENCE_CLASSES}"
    compared = record.equals_ar is not None and record.divergence_class is not None
    if compared and record.equals_ar != (record.divergence_class == "identical"):
        return f"equals_ar is {record.equals_ar} but divergence_class is {record.divergence_class!r}"
    return _broken_alpha(record) or _broken_rounds(record)


def _broken_alpha(record: PromptRecord) -> str | None:
    if record.alpha_sum is None:
        return None
    if not (math.isfinite(record.alpha_sum) and 0 <= record.alpha_sum <= record.alpha_count * (1 + 1e-6)):
        return f"alpha_sum {record.alpha_sum} does not lie between 0 and alpha_count {record.alpha_count}"
    return None


def _broken_rounds(record: PromptRecord) -> str | None:
    """1 <= emitted <= accepted + 1 <= K + 1 per round, equality in all but the last, and the sum is what came out."""
    last = len(record.rounds) - 1
    for index, entry in enumerate(record.rounds):
        if not 0 <= entry.num_accepted <= entry.num_drafted:
            return f"round {index} accepted {entry.num_accepted} of {entry.num_drafted} drafted tokens"
        if not 1 <= entry.num_emitted <= entry.num_accepted + 1:
            return f"round {index} accepted {entry.num_accepted} drafts but emitted {entry.num_emitted} tokens"
        if index < last and entry.num_emitted != entry.num_accepted + 1:
            return f"round {index} of {last + 1} was cut short before the last round"
        if not all(math.isfinite(value) and value >= 0 for value in (entry.draft_s, entry.verify_s, entry.other_s)):
            return f"round {index} has a time that is negative or not finite"
    num_emitted = sum(entry.num_emitted for entry in record.rounds)
    if record.rounds and num_emitted != len(record.token_ids):
        return f"the rounds emitted {num_emitted} tokens but the record holds {len(record.token_ids)}"
    return None


def check_equality(records: Sequence[PromptRecord], baseline: str, run: str) -> None:
    """`equals_ar` is checked against the tokens themselves, where the baseline decoded the same prompt and repeat."""
    tokens_of = {(record.prompt_id, record.repeat): record.token_ids for record in records if record.method == baseline}
    for record in records:
        expected = tokens_of.get((record.prompt_id, record.repeat))
        if record.equals_ar is None or expected is None or record.equals_ar == (record.token_ids == expected):
            continue
        raise UserError(
            f"{run}: prompt {record.prompt_id!r}, method {record.method!r}, repeat {record.repeat}: equals_ar is "
            f"{record.equals_ar}, but its tokens say otherwise; measure it again."
        )


def machine(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the machine a run was measured on, as far as it was recorded."""
    found = provenance.get("machine")
    return dict(found) if isinstance(found, Mapping) else {}


def check_together(runs: Sequence[Run], allow_mixed: bool = False) -> None:
    """Raises `UserError` for an empty set, and, unless `allow_mixed`, for one configuration twice or two machines."""
    if not runs:
        raise UserError(
            "no run directory found; pass runs=outputs/<study>/<name>-<hash8>, a folder of them, or a glob."
        )
    first = runs[0]
    for index, run in enumerate(runs):
        twin = next((other for other in runs[:index] if other.config_hash == run.config_hash), None)
        if twin is not None and not allow_mixed:
            raise UserError(
                f"{twin.path} and {run.path} hold the same configuration ({run.config_hash}); pass one of them, "
                "or allow_mixed=true to show both."
            )
        differences = _differences(machine(first.provenance), machine(run.provenance))
        if differences and not allow_mixed:
            raise UserError(
                f"{first.name} and {run.name} were measured on different machines ({differences}); "
                "pass allow_mixed=true to put them into one table anyway."
            )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return "; ".join(f"{name}: {one.get(name, 'not recorded')} / {other.get(name, 'not recorded')}" for name in names)
