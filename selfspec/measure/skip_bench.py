"""What a draft without some sublayers is held against: the target's own answers, its keys, states and next tokens.

`alpha` of a set is measured without decoding: at many positions of the answers at once, one pass of the thinned target
over tokens that stand *beside* the text, each in a slot of its own, seeing the target's keys of the text before it and
itself. That is exactly what the first draft of a round sees. (One pass over the text itself, as SWIFT scores sets, has
each position read the keys that the draft wrote for the text before it, which no first draft does.) Later drafts of a
round read keys of earlier drafts, so their chances are somewhat lower; `decoded` counts them, by decoding.

Cost: one pass over B*N tokens per set. Shape letters: B prompts, N positions per prompt, W branches, T text, M width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import Pass
from selfspec.cache.tree_block import TreeBlock
from selfspec.decoding import decode
from selfspec.drafters.layer_skip import LayerSkip
from selfspec.drafters.skip_search import Item, Skipped, best_skips
from selfspec.drafters.skip_set import SkipSet
from selfspec.errors import UserError
from selfspec.measure.skip_speed import SublayerCosts
from selfspec.sampling import Sampling
from selfspec.target import Target

BRANCHES = 16  # states of the dynamic programs that go through a layer at once


@dataclass(frozen=True)
class Texts:
    """Prompts with the target's own answers, and the positions in them that drafts are compared at."""

    target: Target
    token_ids_BT: Tensor  # padded with 0
    lengths_B: Tensor
    positions_BN: Tensor  # those before an answer token, evenly spread; a short answer has some of them twice

    @classmethod
    def written(
        cls, target: Target, prompts: Sequence[list[int]], max_new_tokens: int, num_positions: int, sampling: Sampling
    ) -> Texts:
        outputs = decode(
            target, None, prompts, max_new_tokens=max_new_tokens, sampling=sampling, max_batch_rows=len(prompts)
        )
        texts = [ids + output.token_ids for ids, output in zip(prompts, outputs, strict=True)]
        token_ids_BT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        spread = torch.zeros(len(texts), num_positions, dtype=torch.int64)
        for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            token_ids_BT[row, : len(text)] = torch.tensor(text)
            spread[row] = torch.linspace(len(prompt) - 1, len(text) - 2, num_positions).round()
        lengths_B = torch.tensor([len(text) for text in texts])
        return cls(target, token_ids_BT.to(target.device), lengths_B.to(target.device), spread.to(target.device))

    @property
    def mean_context(self) -> int:
        return int(self.positions_BN.float().mean())


class SkipBench:
    """The target's own run over the texts, kept, and drafts beside it."""

    @torch.inference_mode()
    def __init__(self, texts: Texts, temperature: float, num_tokens: int = 4) -> None:
        """temperature: of p and q in alpha; 0: whether the best token is the same. num_tokens: positions per prompt
        whose states the dynamic programs compare.
        """
        self.texts, self.target, self.temperature = texts, texts.target, temperature
        target, every = self.target, range(self.target.num_layers)
        self._halves = (target.thinned((), every), target.thinned(every, ()))
        num_positions = texts.positions_BN.shape[1]
        chosen = torch.linspace(0, num_positions - 1, num_tokens).round().long().to(target.device)
        self._dp_positions_BN = texts.positions_BN[:, chosen]
        num_rows, length = texts.token_ids_BT.shape
        self._cache = target.make_cache(num_rows, length + max(num_positions, BRANCHES * num_tokens))
        states = self._run_text()
        self._states = [self._at(hidden_BTM, self._dp_positions_BN) for hidden_BTM in states]
        self._logits_BNV = target.head(self._at(states[-1], texts.positions_BN))
        self._beside = self._open_beside(texts.positions_BN)

    @torch.inference_mode()
    def alpha(self, skipped: SkipSet) -> float:
        """Σ_v min(p, q) of a round's first draft, averaged; at temperature 0 the share of drafts that are right."""
        target = self.target
        layers = target.thinned(skipped.attention, skipped.mlp)
        token_ids_BN = self.texts.token_ids_BT.gather(1, self.texts.positions_BN)
        hidden_BNM = target.run_layers(target.embed(token_ids_BN), 0, target.num_layers, self._beside, layers)
        logits_BNV = target.head(hidden_BNM)
        if self.temperature == 0:
            return float((logits_BNV.argmax(-1) == self._logits_BNV.argmax(-1)).double().mean())
        p_BNV, q_BNV = (torch.softmax(x.float() / self.temperature, -1) for x in (self._logits_BNV, logits_BNV))
        return float(torch.minimum(p_BNV, q_BNV).sum(-1).double().mean())

    def decoded(self, skipped: SkipSet, num_drafted: int, prompts: Sequence[list[int]], max_new_tokens: int) -> float:
        """al_pooled: emitted tokens per round when the prompts are decoded with this draft."""
        outputs = decode(
            self.target, LayerSkip(self.target, skipped), prompts, max_new_tokens=max_new_tokens,
            lookahead=num_drafted, sampling=Sampling(temperature=self.temperature), max_batch_rows=len(prompts),
        )  # fmt: skip
        rounds = [record for output in outputs for record in output.rounds]
        return sum(record.num_emitted for record in rounds) / len(rounds)

    def clasp(self, most: int) -> list[SkipSet]:
        """CLaSp's set of each size 1..most: whole layers of equal cost."""
        return self._searched([(layer, None) for layer in self._inner], [1] * len(self._inner), most, -1.0)

    def knapsack(self, costs: SublayerCosts, least: float = 0.5) -> list[SkipSet]:
        """KnapSpec's set for each saving up to half of all layers' cost: sublayers at what they cost here."""
        if self.target.family.parallel_residual(self.target.config):
            raise UserError(
                f"search=knapsack runs attention and MLP of a layer after each other, and {self.target.name!r} "
                f"({self.target.config.model_type}) adds them side by side. Use clasp, which skips whole layers."
            )
        items = [(layer, half) for layer in self._inner for half in (0, 1)]
        pair = costs.weights()
        return self._searched(items, [pair[half] for _, half in items], sum(pair) * self.target.num_layers // 2, least)

    @property
    def _inner(self) -> range:
        """The first and the last layer always run, as in SWIFT and KnapSpec."""
        return range(1, self.target.num_layers - 1)

    @torch.inference_mode()
    def _searched(
        self, items: Sequence[tuple[int, int | None]], weights: Sequence[int], budget: int, least: float
    ) -> list[SkipSet]:
        """items: layer, and which half of it; None: the whole layer."""
        num_rows, num_tokens = self._dp_positions_BN.shape
        pass_ = self._open_beside(self._dp_positions_BN.repeat(1, BRANCHES))

        def run(layer: int, half: int | None) -> Item:
            layers = None if half is None else self._halves[half]

            def some(states_WNM: Tensor) -> Tensor:
                by_row = states_WNM.unflatten(1, (num_rows, num_tokens)).transpose(0, 1).flatten(1, 2)
                ran = self.target.run_layers(by_row, layer, layer + 1, pass_, layers)
                return ran.unflatten(1, (BRANCHES, num_tokens)).transpose(0, 1).flatten(1, 2)

            def item(states_WNM: Tensor) -> Tensor:
                padded = torch.cat([states_WNM, states_WNM[-1:].expand(-len(states_WNM) % BRANCHES, -1, -1)])
                return torch.cat([some(part) for part in padded.split(BRANCHES)])[: len(states_WNM)]

            return item

        def after(layer: int, half: int | None) -> Tensor:
            """The target's state behind it: behind layer 0 is 1, behind its attention half the odd one before."""
            return self._states[2 * layer + (1 if half == 0 else 2)].flatten(0, 1)

        truth = [self._states[2 * self._inner[0]].flatten(0, 1), *(after(*item) for item in items)]
        found = best_skips([run(*item) for item in items], truth, weights, budget, least=least)
        return [self._set_of(items, one) for one in found[1:] if one is not None]

    def _set_of(self, items: Sequence[tuple[int, int | None]], found: Skipped) -> SkipSet:
        chosen = [items[index] for index in found.items]
        return SkipSet.of(*([layer for layer, half in chosen if half in (None, which)] for which in (0, 1)))

    def _run_text(self) -> list[Tensor]:
        """Fills the cache with the target's keys; its states before layer 0 and after every half layer (where the
        halves are side by side, the first of each pair is no state of the target, and is not used).
        """
        target, texts = self.target, self.texts
        steps_T = torch.arange(texts.token_ids_BT.shape[1], device=target.device)
        positions_BT = torch.where(steps_T < texts.lengths_B[:, None], steps_T, -1)
        pass_ = self._cache.open(positions_BT, len(steps_T))
        states = [target.embed(texts.token_ids_BT)]
        for layer in range(target.num_layers):
            whole = target.run_layers(states[-1], layer, layer + 1, pass_)
            states += [target.run_layers(states[-1], layer, layer + 1, pass_, self._halves[0]), whole]
        return states

    def _open_beside(self, positions_BN: Tensor) -> Pass:
        """Tokens at these positions, in slots behind the text; each sees the text before it, and itself."""
        num_rows, num = positions_BN.shape
        length = self.texts.token_ids_BT.shape[1]
        device = positions_BN.device
        slots_S = torch.arange(length + num, device=device)
        slots_BN = slots_S[length:].expand(num_rows, num)
        seen_BNS = (slots_S < positions_BN[..., None]) & (slots_S < length) | (slots_S == slots_BN[..., None])
        of_text_BT = slots_S[:length].expand(num_rows, length)
        first_B = torch.zeros(num_rows, dtype=torch.int64, device=device)  # all slots are the tree's
        block = TreeBlock(slots_BN, first_B, torch.cat([of_text_BT, positions_BN], 1), seen_BNS)
        return self._cache.open(positions_BN, length + num, tree=block)

    @staticmethod
    def _at(hidden_BTM: Tensor, positions_BN: Tensor) -> Tensor:
        return hidden_BTM.gather(1, positions_BN[..., None].expand(-1, -1, hidden_BTM.shape[-1]))
