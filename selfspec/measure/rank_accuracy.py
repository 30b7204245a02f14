"""How often the draft's candidate of rank r is the target's token: what a draft tree is built from.

The target's own greedy continuation of every prompt is decoded first. Then it is decoded again, one token per round,
and in every round the drafter drafts a chain of which every token is replaced by the right one: at each depth its
logits are those below a right parent, and what is noted is the rank they give the right token. So

    accuracies[d][r] = share of positions whose right token at depth d+1 has rank r, given that its parent is right

over all positions of the text, whatever a real round would have begun at (Medusa's and EAGLE's static trees are made
from the same shares; `selfspec.lookahead.tree_shape.best_shape`). Products of them assume that ranks at one depth say
nothing about the next; `expected_accepted` counts a tree on the measured paths themselves, without that assumption.

Cost: per token one autoregressive step and one round. Works for every drafter that gives a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.decoding import Decoder
from selfspec.decoding.decoder import check_drafter
from selfspec.decoding.loop import run_requests
from selfspec.decoding.reach import capacity_for, lookahead_for
from selfspec.decoding.requests import Prompt, Request, encode_prompt
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Drawn, Sampler
from selfspec.decoding.stopping import StopStrings
from selfspec.decoding.tree_drafting import GrowsTrees
from selfspec.drafters import Drafter
from selfspec.drafters.base import Draft
from selfspec.errors import UserError
from selfspec.lookahead.tree_shape import TreeShape
from selfspec.sampling import Sampling, Verdict, build_rule, build_transforms, faults
from selfspec.target import Target

NOT_KNOWN = -1


@dataclass(frozen=True)
class RankAccuracy:
    """ranks: int64 `[N, D]` on the host, of the right token at each position and depth; −1 behind the end of the text.
    A token that the draft cannot draft has a rank of the vocabulary's size or more.
    """

    ranks_ND: Tensor
    num_ranks: int

    @property
    def tested(self) -> list[int]:
        """Per depth, the positions whose right token is known."""
        return [int(count) for count in (self.ranks_ND != NOT_KNOWN).sum(0)]

    @property
    def counts(self) -> list[list[int]]:
        """`[depth][rank]`: at how many of them it has that rank."""
        return [[int((ranks_N == rank).sum()) for rank in range(self.num_ranks)] for ranks_N in self.ranks_ND.unbind(1)]

    @property
    def accuracies(self) -> list[list[float]]:
        """`[depth][rank]`, for `best_shape` and `lookahead={"kind": "tree", "accuracies": ...}`."""
        return [
            [count / max(tested, 1) for count in counts]
            for counts, tested in zip(self.counts, self.tested, strict=True)
        ]

    def expected_accepted(self, shape: TreeShape) -> float:
        """Mean accepted drafts of this tree over the positions whose text goes on for its whole depth."""
        paths = set(shape.paths)
        known_ND = self.ranks_ND[(self.ranks_ND[:, : shape.depth] != NOT_KNOWN).all(1), : shape.depth]
        if shape.depth > self.ranks_ND.shape[1] or not len(known_ND):
            raise UserError(
                f"A tree of depth {shape.depth} cannot be counted: ranks were measured at {self.ranks_ND.shape[1]} "
                f"depths, at {len(known_ND)} positions with a text that long. Measure deeper, or on longer outputs."
            )
        accepted = 0
        for ranks in known_ND.tolist():
            depth = 0
            while depth < shape.depth and tuple(ranks[: depth + 1]) in paths:
                depth += 1
            accepted += depth
        return accepted / len(known_ND)


def rank_accuracy(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_depth: int = 5,
    num_ranks: int = 8,
    max_new_tokens: int = 64,
    max_batch_rows: int = 1,
    ignore_eos: bool = False,
) -> RankAccuracy:
    """Ranks of the target's own greedy tokens under the draft, at every position of its answers to `prompts`.

    max_depth: levels of the tree, cut to what the drafter can draft. UserError for a drafter that gives no distribution
    (a copying one), and for no prompts.
    """
    check_drafter(target, drafter)
    if not isinstance(drafter, GrowsTrees):
        raise UserError(f"The drafter {drafter.name!r} ranks no candidates: it gives no distribution over tokens.")
    if not prompts or min(max_depth, num_ranks, max_new_tokens, max_batch_rows) < 1:
        raise UserError("Ranks need a prompt or more; depths, ranks, new tokens and rows are whole numbers from 1 on.")
    depth = max_depth if drafter.max_drafted is None else min(max_depth, drafter.max_drafted)
    rows_at_once = min(max_batch_rows, len(prompts))
    prompt_ids = [encode_prompt(target, prompt) for prompt in prompts]
    answers = Decoder(target, None, rows_at_once).decode(
        prompt_ids, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos
    )
    texts = [ids + answer.token_ids for ids, answer in zip(prompt_ids, answers, strict=True)]
    requests = [
        Request(index, ids, len(text) - len(ids), noise_id=index)
        for index, (ids, text) in enumerate(zip(prompt_ids, texts, strict=True))
    ]
    policy = lookahead_for(target, drafter, depth)
    rows = Rows(target, rows_at_once, capacity_for(drafter, policy, requests))
    rows.round_width = depth + 1
    teacher = teacher_of(target, texts)
    with torch.inference_mode():
        drafter.start(rows)
    run_requests(drafter, rows, policy, teacher, StopStrings((), target.tokenizer), requests, mode="eager")
    return RankAccuracy(torch.cat(teacher.ranks).cpu(), num_ranks)


@dataclass(frozen=True)
class Teacher(Sampler):
    """Draws the text's own next token whatever the draft says, commits one token per round, and notes ranks."""

    texts_RS: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    ends_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    steps: list[Tensor] = field(default_factory=list)  # of this round, [B] each
    ranks: list[Tensor] = field(default_factory=list)  # of the rounds before, [B, D] each, rows that take part

    def draw(self, rows: Rows, step: int, logits_BV: Tensor) -> Drawn:
        token_B, known_B = self._text_at(rows, step)
        token_B1 = token_B[:, None]
        own_B1 = logits_BV.gather(1, token_B1)
        before_V = torch.arange(logits_BV.shape[1], device=rows.device)
        above_B = ((logits_BV > own_B1) | ((logits_BV == own_B1) & (before_V < token_B1))).sum(1)
        rank_B = torch.where(own_B1[:, 0] == -torch.inf, logits_BV.shape[1], above_B)
        self.steps.append(torch.where(known_B & rows.active_B, rank_B, NOT_KNOWN))
        rows.propose(step, token_B1)
        return Drawn(token_B, None, logits_BV, logits_BV.amax(1))

    def accept(self, rows: Rows, draft: Draft, logits_BTV: Tensor) -> Verdict:
        ranks_BD = torch.stack(self.steps, 1)
        self.ranks.append(ranks_BD[ranks_BD[:, 0] != NOT_KNOWN])
        self.steps.clear()
        token_B, _ = self._text_at(rows, 0)
        assert draft.broken_BK is not None, "it was drawn without q"
        broken_B = (draft.broken_BK & (ranks_BD != NOT_KNOWN)).any(1)  # nothing is above NaN: it would have ranked best
        return Verdict(torch.zeros_like(token_B), token_B, torch.where(broken_B, faults.BROKEN_DRAFT, faults.OK))

    def _text_at(self, rows: Rows, step: int) -> tuple[Tensor, Tensor]:
        """The token of each row's text behind its last one and `step` more, and whether there is one."""
        position_B = rows.lengths_B + 1 + step
        text_BS = self.texts_RS[rows.request_B]
        token_B = text_BS.gather(1, position_B.clamp(max=text_BS.shape[1] - 1)[:, None])[:, 0]
        return token_B, position_B < self.ends_R[rows.request_B]


def teacher_of(target: Target, texts: Sequence[list[int]]) -> Teacher:
    longest = max(map(len, texts))
    texts_RS = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=target.device)
    ends_R = torch.tensor([len(text) for text in texts], device=target.device)
    greedy = Sampling()
    rule, transforms = build_rule("auto", greedy), build_transforms(greedy, None, target.vocab_size)
    return Teacher(transforms, rule, texts_RS=texts_RS, ends_R=ends_R)
