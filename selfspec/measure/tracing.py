"""A generation token by token: what was drafted, what became of it, and the p and q that decided.

Nothing of this is on a clock. A traced prompt is decoded once more, with the same seed, under an acceptance rule that
is watched; the round times on the page are those of the measured generation, as long as its rounds were the same ones.
At temperature 0, where p and q are one-hot, what is kept is the softmax of the logits whose argmax decides. Of a draft
tree the page shows the path that was taken and, behind its end, the likeliest candidates that were not.
Cost: one more generation per traced prompt and method, with a few host reads per round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from selfspec.decoding.loop import RoundEvent
from selfspec.decoding.tree_round import walked
from selfspec.measure.protocol import Item, Method, request_seed
from selfspec.records import Key, PromptRecord, TraceRecord, TraceRound, TraceToken
from selfspec.sampling import NoiseKey, Rule, Verdict
from selfspec.sampling.acceptance.tree import Children, Tree, TreeVerdict
from selfspec.sampling.acceptance.tree_rules import TreeRule


@dataclass
class Watched:
    """A rule that decides as `rule` does, and notes the probabilities of one row's drafts and of what it emits."""

    rule: Rule
    q: list[float | None] = field(default_factory=list)  # of the drafts drawn since the last verdict
    last_q: list[float | None] = field(default_factory=list)
    last_p: list[float | None] = field(default_factory=list)
    last_own_p: float | None = None  # of the correction or bonus token

    def __post_init__(self) -> None:
        self.name, self.lossy, self.needs_q = self.rule.name, self.rule.lossy, self.rule.needs_q

    def draw(self, logits_BV: Tensor, noise: NoiseKey) -> tuple[Tensor, Tensor | None]:
        token_B, q_BV = self.rule.draw(logits_BV, noise)
        shown_V = q_BV[0] if q_BV is not None else torch.softmax(logits_BV[0].float(), -1)
        self.q.append(number(shown_V[token_B[0]]))
        return token_B, q_BV

    def accept(
        self, drafted_BK: Tensor, q_BKV: Tensor | None, num_drafted_B: Tensor, logits_BTV: Tensor, noise: NoiseKey
    ) -> Verdict:
        verdict = self.rule.accept(drafted_BK, q_BKV, num_drafted_B, logits_BTV, noise)
        p_TV = torch.softmax(logits_BTV[0].float(), -1)
        self.last_q, self.q = self.q, []
        self.last_p = [number(p_TV[place, token]) for place, token in enumerate(drafted_BK[0].tolist())]
        self.last_own_p = number(p_TV[int(verdict.num_accepted_B[0]), int(verdict.next_token_B[0])])
        return verdict

    def watch_tree(self, tree_rule: TreeRule) -> TreeRule:
        return WatchedTree(tree_rule, self)


@dataclass
class WatchedTree:
    """The tree form of a watched rule: notes the nodes that `walked` gives as drafted."""

    rule: TreeRule
    notes: Watched

    def __post_init__(self) -> None:
        self.name, self.lossy, self.needs_q = self.rule.name, self.rule.lossy, self.rule.needs_q

    def draw_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, num_nodes: int, level: int, most_children: int
    ) -> Children:
        children = self.rule.draw_children(logits_BnV, num_children, noise, num_nodes, level, most_children)
        return replace(children, log_q_BnC=log_q(logits_BnV, children.tokens_BnC))

    def rank_children(
        self, logits_BnV: Tensor, num_children: int, noise: NoiseKey, level: int
    ) -> tuple[Children, Tensor]:
        children, scores_BnC = self.rule.rank_children(logits_BnV, num_children, noise, level)
        return replace(children, log_q_BnC=log_q(logits_BnV, children.tokens_BnC)), scores_BnC

    def accept(self, tree: Tree, logits_BNV: Tensor, noise: NoiseKey) -> TreeVerdict:
        verdict = self.rule.accept(tree, logits_BNV, noise)
        assert tree.log_q_BN is not None, "its children were drawn by this rule"
        p_NV, tokens, notes = torch.softmax(logits_BNV[0].float(), -1), tree.tokens_BN[0].tolist(), self.notes
        nodes = [node for node in walked(tree, verdict.path_BD)[0].tolist() if node > 0]
        end = [0, *nodes][int(verdict.num_accepted_B[0])]
        notes.last_q = [number(tree.log_q_BN[0, node].exp()) for node in nodes]
        notes.last_p = [number(p_NV[parent, tokens[node]]) for parent, node in zip([0, *nodes], nodes, strict=False)]
        notes.last_own_p = number(p_NV[end, int(verdict.next_token_B[0])])
        return verdict


def log_q(logits_BnV: Tensor, tokens_BnC: Tensor) -> Tensor:
    """Of these tokens under the draft, without the noise that a rule may add to choose them."""
    log_q_BnV = torch.log_softmax(logits_BnV.float(), -1).expand(-1, tokens_BnC.shape[1], -1)
    return log_q_BnV.gather(-1, tokens_BnC)


def number(value: Tensor) -> float | None:
    """A probability as strict JSON can hold it; None for what is none."""
    found = float(value)
    return found if math.isfinite(found) else None


@dataclass
class Recorder:
    """Collects the rounds of one generation as they are committed."""

    tokenizer: Any
    rule: Watched
    token_ids: list[int] = field(default_factory=list)
    rounds: list[TraceRound] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)  # drafted, accepted, emitted

    def __call__(self, event: RoundEvent) -> None:
        record = event.record
        drafted = event.drafted_ids[: record.num_drafted]
        num_kept = min(record.num_accepted, record.num_emitted)  # fewer than accepted where the text ended in between
        tokens = [
            self._token([], token_id, "accepted", *self._chances(place))
            for place, token_id in enumerate(event.emitted_ids[:num_kept])
        ]
        for place in range(record.num_accepted, len(drafted)):
            before = drafted[record.num_accepted : place]
            tokens.append(self._token(before, drafted[place], "rejected", *self._chances(place)))
        kind = "bonus" if record.num_accepted == record.num_drafted else "correction"
        for token_id in event.emitted_ids[num_kept:]:
            tokens.append(self._token([], token_id, kind, self.rule.last_own_p, None))
        self.rounds.append(TraceRound(tokens, record.draft_s, record.verify_s, record.other_s))
        self.shapes.append((record.num_drafted, record.num_accepted, record.num_emitted))

    def _token(self, before: Sequence[int], token_id: int, kind: str, p: float | None, q: float | None) -> TraceToken:
        text = piece(self.tokenizer, [*self.token_ids, *before], token_id)
        if kind != "rejected":
            self.token_ids.append(token_id)
        return TraceToken(text, token_id, kind, p, q)

    def _chances(self, place: int) -> tuple[float | None, float | None]:
        """p and q of the draft at this place; q is None for drafts that were not drawn (prompt lookup)."""
        p, q = self.rule.last_p, self.rule.last_q
        return (p[place] if place < len(p) else None, q[place] if place < len(q) else None)


def piece(tokenizer: Any, before: Sequence[int], token_id: int) -> str:
    """What a token adds to the text of those before it; nothing yet if it is only a part of a character."""
    text = tokenizer.decode(list(before), skip_special_tokens=True)
    longer = tokenizer.decode([*before, token_id], skip_special_tokens=True)
    return "" if longer.endswith("\ufffd") else longer[len(text.rstrip("\ufffd")) :]


def trace(
    methods: Sequence[Method],
    items: Sequence[Item],
    records: Mapping[Key, PromptRecord],
    *,
    max_new_tokens: int,
    seed: int,
    text_of: Callable[[Sequence[int]], str],
) -> list[TraceRecord]:
    """The first turn of each item by every method that can be traced, beside the record of its first repeat."""
    traces = []
    for item in items:
        for method in methods:
            measured = records.get((item.prompt_id, method.label, 0))
            if method.trace is None or measured is None:
                continue
            recorder = method.trace(item.token_ids, max_new_tokens, request_seed(seed, item.prompt_id, 0))
            same = recorder.shapes == [(r.num_drafted, r.num_accepted, r.num_emitted) for r in measured.rounds]
            if same:
                for traced, round_ in zip(recorder.rounds, measured.rounds, strict=True):
                    traced.draft_s, traced.verify_s, traced.other_s = round_.draft_s, round_.verify_s, round_.other_s
            traces.append(TraceRecord(item.prompt_id, method.label, text_of(item.token_ids), recorder.rounds, same))
    return traces
