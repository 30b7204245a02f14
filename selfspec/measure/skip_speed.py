"""What a set of skipped sublayers is worth: tokens per second, from how often its drafts are right and what it costs.

The objective of every search, rather than the share of drafts accepted, which is highest where nothing is skipped:

    speedup = tau(alpha, K) * step_s / round_s,     best K taken,     tau = (1 - alpha^(K+1)) / (1 - alpha)
    step_s  = L (attention_s + mlp_s) + head_s                          one autoregressive token
    round_s = K draft_s + a (attention_s + mlp_s) + v(K+1) (step_s - a (attention_s + mlp_s))

draft_s is the step without what is skipped, its head included; a is the first layer with a skip: K drafts and the
last token pass the layers below it one by one, and verification the rest at once. v(T), a pass over T tokens relative
to one, and the costs of the sublayers are measured here; attention grows with the text before it (KnapSpec, arXiv
2602.20217: t_attention = c2 * context + c3, t_mlp constant). That alpha is the same at every draft is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec.drafters.skip_set import SkipSet
from selfspec.measure.cost_model import expected_tau
from selfspec.measure.speed import Timed, interleaved
from selfspec.target import Target

CONTEXTS = (64, 1024)  # tokens before the one that is timed: a line through two points


@dataclass(frozen=True)
class SublayerCosts:
    """Of this target on this machine, at one context. verify: relative cost of a pass over 1, 2, ... tokens."""

    num_layers: int
    attention_s: float
    mlp_s: float
    head_s: float
    verify: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return self.num_layers * (self.attention_s + self.mlp_s) + self.head_s

    def draft_s(self, skipped: SkipSet) -> float:
        saved_s = len(skipped.attention) * self.attention_s + len(skipped.mlp) * self.mlp_s
        return self.step_s - saved_s

    def round_s(self, skipped: SkipSet, num_drafted: int) -> float:
        below_s = skipped.first(self.num_layers) * (self.attention_s + self.mlp_s)
        verify_s = self.verify[num_drafted] * (self.step_s - below_s)
        return num_drafted * self.draft_s(skipped) + below_s + verify_s

    def weights(self, most: int = 5) -> tuple[int, int]:
        """(attention, MLP) as whole numbers up to `most` in about the same ratio: the knapsack's weights."""
        unit = max(self.attention_s, self.mlp_s) / most
        return max(1, round(self.attention_s / unit)), max(1, round(self.mlp_s / unit))


@dataclass(frozen=True)
class Prediction:
    """What a set should bring at its best K."""

    skipped: SkipSet
    alpha: float
    c: float
    num_drafted: int
    tau: float
    speedup: float
    tokens_per_s: float


def predict(skipped: SkipSet, alpha: float, costs: SublayerCosts) -> Prediction:
    """At the K, 1 to what `costs.verify` covers, with the most tokens per second."""

    def speedup(num_drafted: int) -> float:
        return expected_tau([alpha] * num_drafted) * costs.step_s / costs.round_s(skipped, num_drafted)

    best = max(range(1, len(costs.verify)), key=speedup)
    tau, c = expected_tau([alpha] * best), costs.draft_s(skipped) / costs.step_s
    return Prediction(skipped, alpha, c, best, tau, speedup(best), speedup(best) / costs.step_s)


def measure_costs(target: Target, context: int, most_drafted: int, repeats: int) -> SublayerCosts:
    """Time the parts. The least of `repeats` counts: what else runs on the machine only ever adds."""
    contexts = [min(length, target.max_positions - most_drafted - 1) for length in CONTEXTS]
    cache = target.make_cache(1, max(*contexts, context) + most_drafted + 1)
    every = range(target.num_layers)
    halves = {"attention": target.thinned((), every), "mlp": target.thinned(every, ())}
    hidden_1TM = target.embed(torch.zeros(1, most_drafted + 1, dtype=torch.int64, device=target.device))

    def run(num_tokens: int, behind: int, half: str | None) -> Timed:
        def timed() -> None:
            positions_1T = torch.arange(behind, behind + num_tokens, device=target.device)[None]
            pass_ = cache.open(positions_1T, behind + num_tokens)
            layers = None if half is None else halves[half]
            hidden = target.run_layers(hidden_1TM[:, :num_tokens], 0, target.num_layers, pass_, layers)
            if half is None:
                target.head(hidden)

        return timed

    widths = range(1, most_drafted + 2)
    timed: dict[str, Timed] = {f"pass {width}": run(width, context, None) for width in widths}
    timed |= {f"attention {behind}": run(1, behind, "attention") for behind in contexts}
    timed |= {"mlp": run(1, 0, "mlp"), "head": lambda: target.head(hidden_1TM[:, :1])}
    with torch.inference_mode():
        seconds = {name: min(each) for name, each in interleaved(timed, repeats, target.device).items()}
    attention_s = line(contexts, [seconds[f"attention {behind}"] for behind in contexts], context)
    one = seconds["pass 1"]
    return SublayerCosts(
        target.num_layers,
        attention_s / target.num_layers,
        seconds["mlp"] / target.num_layers,
        seconds["head"],
        tuple(max(1.0, seconds[f"pass {width}"] / one) for width in widths),
    )


def line(at: Sequence[int], seconds: Sequence[float], context: int) -> float:
    """Through two measured points; attention never gets cheaper with more text, whatever noise says."""
    if at[0] == at[1]:
        return min(seconds)
    slope = max(0.0, (seconds[1] - seconds[0]) / (at[1] - at[0]))
    return seconds[0] + slope * (context - at[0]) if context >= at[0] else seconds[0]


def as_record(one: Prediction) -> Mapping[str, object]:
    """For a set's file."""
    names = ("alpha", "c", "num_drafted", "tau", "speedup", "tokens_per_s")
    return {name: getattr(one, name) for name in names}
