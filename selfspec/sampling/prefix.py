"""What each row of logits is conditioned on, so that stateful transforms see what they would see without speculation.

Shapes: B rows, T positions in this pass, S slots, N tree nodes. Drafted tokens lie in `tokens_BS` right behind the
committed ones, so a position of a chain sees one contiguous stretch. In a tree it sees the committed stretch and then
its own ancestors, which lie among the N slots behind it. Costs nothing for a chain, one [B, T, S] copy for a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """Logits row (b, t) is conditioned on tokens_BS[b, starts_B[b]:ends_BT[b, t]] (then its ancestors, in a tree).

    prompt_lens_B counts the prompt's tokens from starts_B on; penalties of *generated* tokens start behind them.
    ancestors_BTN marks, for a tree, which of the N slots from ends_BT[b, t] on are ancestors of node t, or t itself.
    A row whose stretch is empty (ends <= starts) is padding: user processors are not called for it.
    """

    tokens_BS: Tensor
    ends_BT: Tensor
    prompt_lens_B: Tensor | None = None
    starts_B: Tensor | None = None
    ancestors_BTN: Tensor | None = None

    def stretches(self) -> Stretches:
        """The same thing with every prefix contiguous."""
        starts_B1 = torch.zeros_like(self.ends_BT[:, :1]) if self.starts_B is None else self.starts_B[:, None]
        generated_B1 = starts_B1 if self.prompt_lens_B is None else starts_B1 + self.prompt_lens_B[:, None]
        if self.ancestors_BTN is None:
            return Stretches(self.tokens_BS[:, None], starts_B1, generated_B1, self.ends_BT)
        B, T, N = self.ancestors_BTN.shape
        S = self.tokens_BS.shape[1]
        # Ancestors have smaller node numbers than their descendants, so slot order is path order.
        order_BTN = torch.argsort((~self.ancestors_BTN).to(torch.int8), dim=-1, stable=True)
        tokens_BTS = torch.nn.functional.pad(self.tokens_BS, (0, N))[:, None].expand(B, T, S + N)
        path_BTN = tokens_BTS.gather(-1, self.ends_BT[..., None] + order_BTN)
        slots_N = torch.arange(N, device=self.ends_BT.device)
        tokens_BTS = tokens_BTS.scatter(-1, self.ends_BT[..., None] + slots_N, path_BTN)
        return Stretches(tokens_BTS, starts_B1, generated_B1, self.ends_BT + self.ancestors_BTN.sum(-1))


@dataclass(frozen=True)
class Stretches:
    """tokens: [B, 1 or T, S]; row (b, t) sees [starts, ends), of which [generated, ends) is not prompt."""

    tokens_BXS: Tensor
    starts_B1: Tensor
    generated_B1: Tensor
    ends_BT: Tensor

    def visible_BTS(self, first_B1: Tensor) -> Tensor:
        slots_S = torch.arange(self.tokens_BXS.shape[-1], device=self.ends_BT.device)
        return (slots_S >= first_B1[..., None]) & (slots_S < self.ends_BT[..., None])

    def ids_BTS(self, first_B1: Tensor, vocab_size: int) -> Tensor:
        """Token ids from `first` on; everything invisible or outside the vocabulary becomes the spare id V."""
        visible_BTS = self.visible_BTS(first_B1)
        tokens = self.tokens_BXS.clamp(max=vocab_size).expand_as(visible_BTS)
        return torch.where(visible_BTS, tokens, vocab_size)
