"""The rows of the table: plain HF `generate`, our loop without a draft, and our loop with each drafter.

All are timed from the prompt's token ids to the last generated token, on clocks that wait for the device. Plain HF
`generate` runs on the same weights, so that our own loop cannot flatter itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.decoding import Decoder
from selfspec.decoding.stopping import StopStrings
from selfspec.drafters import Drafter
from selfspec.lookahead import Lookahead
from selfspec.measure.protocol import HF, Method
from selfspec.measure.tracing import Recorder, Watched
from selfspec.records import RoundRecord
from selfspec.sampling import Sampling, build_rule
from selfspec.target import Target


@dataclass(frozen=True)
class Settings:
    """What all methods of one comparison have in common."""

    sampling: Sampling
    acceptance: str = "auto"
    ignore_eos: bool = False
    cache: str = "contiguous"


@dataclass
class HFResult:
    """Plain HF generate's result in the shape of `decode`'s Output. Its first token comes out of the prefill."""

    token_ids: list[int]
    text: str
    finish_reason: str
    prefill_s: float
    ttft_s: float
    decode_s: float
    lossy: bool = False
    rounds: list[RoundRecord] = field(default_factory=list)
    alpha_sum: float | None = None
    alpha_count: int = 0


def decode_method(
    label: str, target: Target, drafter: Drafter | None, lookahead: Lookahead, settings: Settings, capacity: int
) -> Method:
    """Our loop with `drafter` (None: autoregressive), on one cache of `capacity` tokens for the whole run."""
    decoder = Decoder(target, drafter, capacity=capacity, cache=settings.cache)

    def generate(prompt_ids: list[int], max_new_tokens: int, seed: int):
        (output,) = decoder.decode(
            [prompt_ids],
            max_new_tokens=max_new_tokens,
            lookahead=lookahead,
            sampling=settings.sampling,
            acceptance=settings.acceptance,
            seed=seed,
            ignore_eos=settings.ignore_eos,
        )
        return output

    def trace(prompt_ids: list[int], max_new_tokens: int, seed: int) -> Recorder:
        rule = Watched(build_rule(settings.acceptance, settings.sampling))
        recorder = Recorder(target.tokenizer, rule)
        # what is watched cannot be a graph
        eager = Decoder(target, drafter, capacity=capacity, cache=settings.cache, rounds="eager")
        eager.decode(
            [prompt_ids],
            max_new_tokens=max_new_tokens,
            lookahead=lookahead,
            sampling=settings.sampling,
            acceptance=rule,
            seed=seed,
            ignore_eos=settings.ignore_eos,
            on_round=recorder,
        )
        return recorder

    return Method(label, generate, synthetic=getattr(drafter, "synthetic", False), trace=trace)


def hf_method(target: Target, settings: Settings) -> Method:
    """transformers' own `generate` on the target's model."""
    text_of = StopStrings((), target.tokenizer).text
    eos = () if settings.ignore_eos else target.eos_token_ids

    def generate(prompt_ids: list[int], max_new_tokens: int, seed: int) -> HFResult:
        output = target.hf_generate(prompt_ids, max_new_tokens, settings.sampling, eos, seed)
        token_ids, ttft_s = output.token_ids, output.ttft_s
        reason = "eos" if token_ids[-1] in eos else "length"
        text = text_of(token_ids, stopped=False)
        return HFResult(token_ids, text, reason, prefill_s=ttft_s, ttft_s=ttft_s, decode_s=output.total_s - ttft_s)

    return Method(HF, generate)
