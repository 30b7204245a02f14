"""Which draft, exit layer E and lookahead K would pay on a machine that is not at hand: predicted, never measured.

Every kind of draft is a cost per round; what it is accepted at is an *assumption* the caller makes. With alpha constant
over positions (it falls in practice) and passes timed by `selfspec.measure.roofline`, over autoregressive steps:

    S(K) = tau(alpha, K) / ((draft_s(K) + verify_s(K)) / step_s)

    early_exit   K passes of the first E layers with a part of the head; verify_s also runs the last draft there
    head         K passes of one layer (EAGLE): its verify pass is the target's whole one
    medusa       K heads at once: M x M + M x d_vocab each
    independent  K passes of another model
    ngram        nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from selfspec.config import allowed
from selfspec.errors import UserError
from selfspec.measure.cost_model import break_even_alpha, expected_tau
from selfspec.measure.roofline import ITEMSIZE, Machine, memory_bytes, one_layer_head, pass_s

if TYPE_CHECKING:
    from selfspec.target.shape import ModelShape

KINDS = ("early_exit", "head", "medusa", "independent", "ngram")


@dataclass
class DraftPlan:
    """One kind of draft and what is assumed of it. `alpha` may be a list of [exit layer / all layers, alpha] pairs."""

    kind: str
    alpha: Any
    d_vocab: int | None = None  # draft vocabulary; None: all
    size: float = 0.1  # of an independent model, in parts of the target's parameters
    shares: list[float] = field(default_factory=lambda: [1 / 8, 1 / 4, 1 / 2, 3 / 4])  # parts of the layers tried


@dataclass(frozen=True)
class Prediction:
    """The best (E, K) of one draft on one machine. c, v: draft step and verify pass in autoregressive steps."""

    label: str
    exit_layer: int | None
    num_drafted: int
    alpha: float
    tau: float
    c: float
    v: float
    speedup: float
    tokens_per_s: float  # of all rows
    break_even: float | None


def predict(
    label: str, draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, most: int = 10
) -> Prediction:
    """The best exit layer and K for this draft. Raises UserError for an unknown kind or an impossible assumption."""
    if draft.kind not in KINDS:
        raise UserError(f"drafts.{label}.kind={draft.kind!r} is unknown. {allowed(str(draft.kind), KINDS)}")
    if draft.d_vocab is not None and not 1 <= draft.d_vocab <= model.vocab_size:
        raise UserError(f"drafts.{label}.d_vocab={draft.d_vocab}: allowed is 1 to {model.vocab_size}.")
    if not 0 < draft.size <= 1:
        raise UserError(f"drafts.{label}.size={draft.size} is not possible: a part of the target, above 0, up to 1.")
    if draft.kind == "early_exit" and not all(0 < share < 1 for share in draft.shares):
        raise UserError(
            f"drafts.{label}.shares={draft.shares}: parts of the layers lie between 0 and 1, for example 0.5."
        )
    exits = exits_of(draft, model) if draft.kind == "early_exit" else [None]
    found = [
        _prediction(label, draft, model, machine, rows, context, exit_layer, num_drafted)
        for exit_layer in exits
        for num_drafted in range(1, most + 1)
    ]
    return max(found, key=lambda one: one.speedup)


def exits_of(draft: DraftPlan, model: ModelShape) -> list[int]:
    """The exit layers tried: at these parts of the depth, or where alpha is given."""
    shares = [share for share, _ in draft.alpha] if isinstance(draft.alpha, Sequence) else draft.shares
    layers = sorted({min(max(1, round(share * model.num_layers)), model.num_layers - 1) for share in shares})
    if not layers:
        raise UserError("an early exit needs a model of two layers or more.")
    return layers


def alpha_at(label: str, alpha: Any, share: float) -> float:
    """The assumed alpha at an exit after this part of the layers, interpolated between given ones."""
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        value = float(alpha)
    elif isinstance(alpha, Sequence) and alpha and all(_is_pair(pair) for pair in alpha):
        value = _interpolated(sorted((float(x), float(y)) for x, y in alpha), share)
    else:
        raise UserError(f"drafts.{label}.alpha={alpha!r}: give a number, or pairs [[part of the layers, alpha], ...].")
    if not 0 <= value <= 1:
        raise UserError(f"drafts.{label}.alpha={value} is not possible: it is a probability, 0 to 1.")
    return value


def _is_pair(given: Any) -> bool:
    """Two numbers."""
    numbers = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    return numbers and all(isinstance(one, int | float) and not isinstance(one, bool) for one in given)


def _interpolated(pairs: Sequence[tuple[float, float]], at: float) -> float:
    if at <= pairs[0][0]:
        return pairs[0][1]
    for (x0, y0), (x1, y1) in pairwise(pairs):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return pairs[-1][1]


def _prediction(
    label: str,
    draft: DraftPlan,
    model: ModelShape,
    machine: Machine,
    rows: int,
    context: int,
    exit_layer: int | None,
    num_drafted: int,
) -> Prediction:
    step = pass_s(model, machine, rows, context)
    draft_s = DRAFT_S[draft.kind](draft, model, machine, rows, context, exit_layer, num_drafted)
    verify_s = pass_s(model, machine, rows, context, num_drafted + 1)
    if exit_layer is not None:  # the layers below E have run on all K+1 tokens, one at a time
        shallow_s = pass_s(model, machine, rows, context, 1, exit_layer, 0.0)
        verify_s += shallow_s - pass_s(model, machine, rows, context, num_drafted + 1, exit_layer, 0.0)
    alpha = alpha_at(label, draft.alpha, (exit_layer or 0) / model.num_layers)
    tau = expected_tau([alpha] * num_drafted)
    c, v = draft_s / num_drafted / step, verify_s / step
    speedup = tau * step / (draft_s + verify_s)
    break_even = break_even_alpha(num_drafted, c, v)
    return Prediction(label, exit_layer, num_drafted, alpha, tau, c, v, speedup, speedup * rows / step, break_even)


def _head_share(draft: DraftPlan, model: ModelShape) -> float:
    return 1.0 if draft.d_vocab is None else draft.d_vocab / model.vocab_size


def _early_exit_s(
    draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, exit_layer: int | None, k: int
) -> float:
    return k * pass_s(model, machine, rows, context, 1, exit_layer, _head_share(draft, model))


def _head_s(
    draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, exit_layer: int | None, k: int
) -> float:
    return k * pass_s(one_layer_head(model), machine, rows, context, 1, None, _head_share(draft, model))


def _medusa_s(
    draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, exit_layer: int | None, k: int
) -> float:
    """K residual blocks and their heads, read in one go."""
    params = k * (model.width**2 + _head_share(draft, model) * model.head_params)
    device, itemsize = machine.hardware, ITEMSIZE[machine.dtype]
    read_s = itemsize * params / (device.bytes_per_s * machine.bandwidth_share)
    compute_s = 2 * rows * params / (device.flops_per_s[machine.dtype] * machine.compute_share)
    return max(read_s, compute_s) / machine.num_devices


def _independent_s(
    draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, exit_layer: int | None, k: int
) -> float:
    """A model of the same form whose every part is `size` of the target's."""
    return k * draft.size * pass_s(model, machine, rows, context, 1, None, _head_share(draft, model))


def _ngram_s(
    draft: DraftPlan, model: ModelShape, machine: Machine, rows: int, context: int, exit_layer: int | None, k: int
) -> float:
    return 0.0


DRAFT_S: Mapping[str, Callable[[DraftPlan, ModelShape, Machine, int, int, int | None, int], float]] = {
    "early_exit": _early_exit_s,
    "head": _head_s,
    "medusa": _medusa_s,
    "independent": _independent_s,
    "ngram": _ngram_s,
}


def fits(model: ModelShape, machine: Machine, rows: int, context: int) -> bool:
    """Whether weights and cache have room; a tenth of the memory is left for everything else."""
    return memory_bytes(model, machine, rows, context) <= 0.9 * machine.hardware.memory_bytes
