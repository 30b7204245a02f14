"""Predicted against measured: what each method's draft step and verify pass should cost by bytes, and what they did.

The limits are written down before the first generation, the rest follows from the records:

    c predicted   bytes that one drafted token reads / bytes of one autoregressive step
    c, v          draft seconds per drafted token, verify seconds per round, each / AR's seconds per token
    S simple      AR's seconds per token / ((draft + verify + other seconds) / committed tokens): measured, in parts
    S model       tau / (K c predicted + 1): tau is measured, verification taken as one AR step
    break-even    the constant alpha at which this K, c and v cost what they bring
    share         bytes per step / AR's seconds per token / the bandwidth at which this machine reads memory

Decode time only, prefill apart. Cost: one pass over the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.drafters import Drafter
from selfspec.drafters.base import Sized
from selfspec.measure.cost_model import Stack, break_even_alpha
from selfspec.measure.protocol import AR, HF
from selfspec.records import PromptRecord, RoundRecord, by_method
from selfspec.target import Target

ALL_AT_ONCE = ("medusa", "hydra")  # every head is read once per round, whatever K
CHAINS = ("eagle3", "mtp")  # their own layer and head, once per drafted token


def stack_of(target: Target) -> Stack:
    """The target as what a step reads (on each of its ranks), from its parameters. kv: of one token in one layer,
    averaged over the layers.
    """
    head, layers = target.head_bytes, target.num_layers
    kv = sum(2 * shape.num_kv_heads * shape.head_dim for shape in target.layer_shapes) * target.dtype.itemsize
    return Stack(layers, round((target.step_bytes - head) / layers), head, round(kv / layers))


def draft_step_bytes(drafter: Drafter, target: Target, context: int, num_drafted: float) -> float | None:
    """What one drafted token makes the machine read; None for kinds without a model of it."""
    stack = stack_of(target)
    exit_layer, own = getattr(drafter, "exit_layer", None), 0.0
    if isinstance(drafter, Sized):
        own = float(drafter.draft_bytes(1, context)[0])
    if drafter.name == "ngram":
        return 0.0
    if drafter.name in ("early_exit", "layerskip") and exit_layer is not None:
        return stack.step_bytes(context, exit_layer, 0.0) + (own or stack.head_bytes)
    if drafter.name == "exit_adapter" and exit_layer is not None:
        return stack.step_bytes(context, exit_layer, 0.0) + own
    if drafter.name in ALL_AT_ONCE and num_drafted > 0:
        return own / num_drafted
    if drafter.name in CHAINS:
        return own + context * stack.kv_bytes
    if isinstance(model := getattr(drafter, "model", None), Target):
        return stack_of(model).step_bytes(context)
    return None


def costs(
    records: Sequence[PromptRecord], drafters: Mapping[str, Drafter], target: Target, bytes_per_s: float
) -> dict[str, Any]:
    """The whole comparison, for summary.json: the machine's limit, and one entry per method with rounds."""
    groups = by_method(records)
    reference = groups[AR]
    ar_s = seconds_per_token(reference)
    context = round(sum(r.num_prompt_tokens + len(r.token_ids) / 2 for r in reference) / len(reference))
    step_bytes = stack_of(target).step_bytes(context)
    methods = {
        label: method_costs(groups[label], drafters.get(label), target, context, ar_s)
        for label in groups
        if label != HF and any(record.rounds for record in groups[label])
    }
    return {
        "context": context,
        "step_bytes": step_bytes,
        "ar_s_per_token": ar_s,
        "read_bytes_per_s": bytes_per_s,
        "bandwidth_share": step_bytes / ar_s / bytes_per_s,
        "limit_tokens_per_s": bytes_per_s / step_bytes,
        "methods": methods,
    }


def method_costs(
    records: Sequence[PromptRecord], drafter: Drafter | None, target: Target, context: int, ar_s: float
) -> dict[str, float | None]:
    rounds = [entry for record in records for entry in record.rounds]
    tau = sum(entry.num_emitted for entry in rounds) / len(rounds)
    num_drafted = sum(entry.num_drafted for entry in rounds)
    mean_drafted = num_drafted / len(rounds)
    round_s = sum(map(seconds, rounds)) / len(rounds)
    found: dict[str, float | None] = {
        "num_drafted": mean_drafted,
        "tau": tau,
        "round_s_per_token": round_s / tau,
        "speedup_simple": ar_s / (round_s / tau),
        "v_measured": sum(entry.verify_s for entry in rounds) / len(rounds) / ar_s,
        "c_measured": None,
        "c_predicted": None,
        "speedup_model": None,
        "break_even_alpha": None,
    }
    if drafter is None or num_drafted == 0:
        return found
    c = sum(entry.draft_s for entry in rounds) / num_drafted / ar_s
    found["c_measured"] = c
    found["break_even_alpha"] = break_even_alpha(max(1, round(mean_drafted)), c, float(found["v_measured"] or 1.0))
    read = draft_step_bytes(drafter, target, context, mean_drafted)
    if read is not None:
        predicted = read / stack_of(target).step_bytes(context)
        found |= {"c_predicted": predicted, "speedup_model": tau / (mean_drafted * predicted + 1)}
    return found


def seconds(entry: RoundRecord) -> float:
    return entry.draft_s + entry.verify_s + entry.other_s


def seconds_per_token(records: Sequence[PromptRecord]) -> float:
    """Of the rounds: draft, verify and other time over committed tokens."""
    rounds = [entry for record in records for entry in record.rounds]
    return sum(map(seconds, rounds)) / sum(entry.num_emitted for entry in rounds)
