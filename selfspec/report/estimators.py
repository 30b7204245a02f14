"""What one method did, from its records alone: acceptance, time, and equality with the baseline.

Leviathan et al. 2023 define α and the expected tokens per pass; the field's tools then disagree on how to average them,
so each average here has its own name (`selfspec.report.statistics` lists them). Cost: one pass over the rounds each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from selfspec.records import PromptRecord, RoundRecord
from selfspec.report.checks import DIVERGENCE_CLASSES

Records = Sequence[PromptRecord]


# ---- acceptance


def al_pooled(records: Records) -> float | None:
    """Acceptance length τ over all rounds together: long generations weigh more."""
    rounds = [entry for record in records for entry in record.rounds]
    return sum(entry.num_emitted for entry in rounds) / len(rounds) if rounds else None


def al_per_prompt_mean(records: Records) -> float | None:
    """Acceptance length τ, one vote per prompt."""
    lengths = [al_pooled(group) for group in by_prompt(records).values()]
    known = [length for length in lengths if length is not None]
    return fmean(known) if known else None


def alpha(records: Records) -> float | None:
    """Σ_v min(p, q), averaged over tested positions; None where it was not measured."""
    measured = [record for record in records if record.alpha_sum is not None and record.alpha_count > 0]
    count = sum(record.alpha_count for record in measured)
    return sum(record.alpha_sum or 0.0 for record in measured) / count if count else None


def accepted_per_drafted(records: Records) -> float | None:
    rounds = whole_rounds(records)
    num_drafted = sum(entry.num_drafted for entry in rounds)
    return sum(entry.num_accepted for entry in rounds) / num_drafted if num_drafted else None


def joint_acceptance(records: Records) -> list[float]:
    """Entry i: the share of rounds whose first i+1 drafts were all accepted. τ = 1 + its sum, over whole rounds."""
    rounds = whole_rounds(records)
    longest = max((entry.num_drafted for entry in rounds), default=0)
    return [sum(entry.num_accepted > i for entry in rounds) / len(rounds) for i in range(longest)]


def conditional_acceptance(records: Records) -> list[float | None]:
    """Entry i: of the rounds that tested draft i+1 (all before it accepted), the share that accepted it.

    None for a position that was never tested; positions are never skipped, so an index always means the same thing.
    """
    rounds = whole_rounds(records)
    longest = max((entry.num_drafted for entry in rounds), default=0)
    rates: list[float | None] = []
    for i in range(longest):
        tested = [entry for entry in rounds if entry.num_drafted > i and entry.num_accepted >= i]
        rates.append(sum(entry.num_accepted > i for entry in tested) / len(tested) if tested else None)
    return rates


def whole_rounds(records: Records) -> list[RoundRecord]:
    """Rounds not cut short by EOS, a stop string or the length limit: what acceptance rates are computed from."""
    return [entry for record in records for entry in record.rounds if entry.num_emitted == entry.num_accepted + 1]


# ---- time


def by_prompt(records: Records) -> dict[str, list[PromptRecord]]:
    """Records grouped by prompt, in an order that does not depend on how they were written."""
    groups: dict[str, list[PromptRecord]] = {}
    for record in sorted(records, key=lambda record: (record.prompt_id, record.repeat)):
        groups.setdefault(record.prompt_id, []).append(record)
    return groups


def prompt_time(group: Records, clock: str = "total_s") -> tuple[float, float]:
    """(tokens, seconds) of one prompt: its mean length, at the median over repeats of seconds per token."""
    num_tokens = fmean(len(record.token_ids) for record in group)
    return num_tokens, num_tokens * median(getattr(record, clock) / len(record.token_ids) for record in group)


def mean_s_per_token(records: Records, clock: str = "total_s") -> float:
    """Seconds over all prompts / tokens over all prompts, by one of the record's clocks."""
    times = [prompt_time(group, clock) for group in by_prompt(records).values()]
    return sum(seconds for _, seconds in times) / sum(tokens for tokens, _ in times)


def tokens_per_s(records: Records) -> float:
    """Emitted tokens / (prefill + decode) seconds, over all prompts."""
    return 1.0 / mean_s_per_token(records)


def decode_tokens_per_s(records: Records) -> float | None:
    """Emitted tokens / decode seconds. Plain HF `generate` emits its first token in the prefill; our loop does not."""
    seconds = mean_s_per_token(records, "decode_s")
    return 1.0 / seconds if seconds > 0 else None


def phase_s_per_token(records: Records) -> dict[str, float | None]:
    """Where the time of one emitted token goes: prefill + decode, and decode split by `phase_shares`."""
    decode_s = mean_s_per_token(records, "decode_s")
    split = {
        name.replace("_share", "_s_per_token"): None if share is None else share * decode_s
        for name, share in phase_shares(records).items()
    }
    return {"prefill_s_per_token": mean_s_per_token(records, "prefill_s"), "decode_s_per_token": decode_s, **split}


def phase_shares(records: Records) -> dict[str, float | None]:
    """Shares of decode time spent drafting, verifying, and on everything else that the decode clock saw."""
    with_rounds = [record for record in records if record.rounds]
    if not with_rounds:
        return {"draft_share": None, "verify_share": None, "other_share": None}
    draft_s, verify_s, other_s = (
        sum(getattr(entry, phase) for record in with_rounds for entry in record.rounds)
        for phase in ("draft_s", "verify_s", "other_s")
    )
    other_s = max(other_s, sum(record.decode_s for record in with_rounds) - draft_s - verify_s)
    total_s = draft_s + verify_s + other_s
    if total_s <= 0:
        return {"draft_share": None, "verify_share": None, "other_share": None}
    return {"draft_share": draft_s / total_s, "verify_share": verify_s / total_s, "other_share": other_s / total_s}


def ttft_median_s(records: Records) -> float:
    """The median over prompts of the median over repeats."""
    return median(median(record.ttft_s for record in group) for group in by_prompt(records).values())


def round_gaps_s(records: Records) -> dict[str, float | None]:
    """What a reader of the stream waits for the tokens of a round: median and 95th percentile."""
    gaps = [entry.draft_s + entry.verify_s + entry.other_s for record in records for entry in record.rounds]
    if not gaps:
        return {"round_p50_s": None, "round_p95_s": None}
    p50, p95 = np.percentile(np.asarray(gaps), (50, 95))
    return {"round_p50_s": float(p50), "round_p95_s": float(p95)}


# ---- equality


def equality(records: Records) -> dict[str, int] | None:
    """How many prompts gave AR's tokens, differed at a near tie, or differed; a prompt counts by its worst repeat."""
    worst: Counter[str] = Counter()
    for group in by_prompt(records).values():
        compared = [record for record in group if record.equals_ar is not None]
        classes = [record.divergence_class or ("identical" if record.equals_ar else "mismatch") for record in compared]
        if classes:
            worst[max(classes, key=DIVERGENCE_CLASSES.index)] += 1
    return {name: worst[name] for name in DIVERGENCE_CLASSES} if worst else None
