"""Is a difference from the autoregressive tokens a tie broken by rounding, or an error?

A pass over K+1 positions and a pass over one sum in another order, so in half precision two nearly equal logits may
swap. That is arithmetic; anything larger is a wrong decoder. At the first token that differs, the target's logits are
computed once more by one full forward over the autoregressive prefix:

    identical   the same tokens
    near_tie    both tokens lie within `tolerance * max |logit|` of the largest logit
    mismatch    anything else, also one output being a part of the other

The tolerance is relative, since rounding grows with the logits (see `TOLERANCE`). The top-2 margin reported beside the
class is in logits. After a near tie the two outputs continue from different texts, so only the first difference counts.
Cost: one forward per output that differs, outside every timed section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.measure.protocol import AR, HF, Item, request_seed
from selfspec.records import Key, PromptRecord
from selfspec.sampling import Prefix, Sampling, build_transforms, gumbel
from selfspec.target import Target

# Relative to the largest |logit| of the position. Measured on the two largest logits of SmolLM2-135M, one full pass
# against token by token: up to 0.019 in bfloat16, 1.3e-6 in float32. float16 keeps 3 bits more than bfloat16.
TOLERANCE = {"float64": 2.0**-40, "float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-5}

NextScores = Callable[[list[int]], Tensor]  # token ids -> [V], whose argmax is the next token


@dataclass(frozen=True)
class Divergence:
    """How one output compares with the reference; `top2_margin` is the target's, in logits, where they first differ."""

    kind: str  # "identical" | "near_tie" | "mismatch"
    first: int | None = None
    top2_margin: float | None = None


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first generated token that differs, or the shorter length if one output is a part of the other."""
    for index, (ours, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def classify(
    tokens: Sequence[int],
    reference: Sequence[int],
    prompt_ids: Sequence[int],
    next_scores: NextScores,
    tolerance: float,
) -> Divergence:
    """Compares generated `tokens` with the autoregressive `reference` that follow the same prompt."""
    first = first_divergence(tokens, reference)
    if first is None:
        return Divergence("identical")
    scores_V = next_scores([*prompt_ids, *reference[:first]]).double()
    top, second = scores_V.topk(2).values.tolist()
    if first == min(len(tokens), len(reference)):
        return Divergence("mismatch", first, top - second)
    lower = scores_V[[tokens[first], reference[first]]].min().item()
    scale = scores_V[scores_V.isfinite()].abs().max().item()
    kind = "near_tie" if top - lower <= tolerance * scale else "mismatch"
    return Divergence(kind, first, top - second)


@dataclass(frozen=True)
class Comparison:
    """Fills the divergence fields of records, where the tokens have to be the autoregressive ones at all.

    That is so at temperature 0 and, between our own methods, with coupled acceptance. Otherwise only the distribution
    is the target's, and a lossy rule does not keep even that: the fields stay None.
    """

    target: Target
    sampling: Sampling
    acceptance: str
    seed: int
    tolerance: float

    def fill_in(self, record: PromptRecord, reference: PromptRecord, item: Item) -> None:
        if record.method == AR or not self._comparable(record):
            return
        divergence = self._classify(record, reference, item)
        record.equals_ar = divergence.kind == "identical"
        record.first_divergence = divergence.first
        record.divergence_class = divergence.kind

    def report(self, records: Sequence[PromptRecord], items: Sequence[Item]) -> dict[str, Any]:
        """Every output that differs, with the target's margin where it does: for summary.json."""
        by_key = {record.key: record for record in records}
        entries = []
        for record in records:
            if record.equals_ar is not False:
                continue
            item, reference = self._find(record, items, by_key)
            margin = self._classify(record, reference, item).top2_margin
            names = ("prompt_id", "method", "repeat", "first_divergence", "divergence_class")
            entries.append({name: getattr(record, name) for name in names} | {"top2_margin": margin})
        return {"near_tie_tolerance": self.tolerance, "differing": entries}

    def _comparable(self, record: PromptRecord) -> bool:
        if record.lossy:
            return False
        return self.sampling.greedy or (self.acceptance == "coupled" and record.method != HF)

    def _classify(self, record: PromptRecord, reference: PromptRecord, item: Item) -> Divergence:
        noise_seed = request_seed(self.seed, item.prompt_id, record.repeat)

        def next_scores(token_ids: list[int]) -> Tensor:
            return self._next_scores(token_ids, len(item.token_ids), noise_seed)

        return classify(record.token_ids, reference.token_ids, item.token_ids, next_scores, self.tolerance)

    @torch.inference_mode()
    def _next_scores(self, token_ids: list[int], num_prompt_tokens: int, noise_seed: int) -> Tensor:
        """What the next token is the argmax of, [V], by one plain forward of the HF model."""
        tokens_1T = torch.tensor([token_ids], device=self.target.device)
        logits_11V = self.target.hf_model(input_ids=tokens_1T, use_cache=False).logits[:, -1:]
        end_11, prompt_1 = (torch.tensor(n, device=tokens_1T.device) for n in ([[len(token_ids)]], [num_prompt_tokens]))
        scores_11V = build_transforms(self.sampling)(logits_11V, Prefix(tokens_1T, end_11, prompt_1))
        if not self.sampling.greedy:
            scores_11V = scores_11V + gumbel(noise_seed, torch.zeros_like(prompt_1), end_11, scores_11V.shape[-1])
        return scores_11V[0, 0]

    @staticmethod
    def _find(
        record: PromptRecord, items: Sequence[Item], by_key: Mapping[Key, PromptRecord]
    ) -> tuple[Item, PromptRecord]:
        """The turn that a record answers, and the autoregressive answer to it."""
        for first in items:
            item: Item | None = first
            while item is not None and record.prompt_id.startswith(first.prompt_id):
                reference = by_key[(item.prompt_id, AR, record.repeat)]
                if item.prompt_id == record.prompt_id:
                    return item, reference
                item = item.follow(reference.text) if item.follow else None
        raise AssertionError(f"no prompt {record.prompt_id!r} in this run")
