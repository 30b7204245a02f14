"""The multi-token-prediction module of DeepSeek-V3 (2024, section 2.2): one decoder layer of the target's kind, as
weights.

    h' = layer(M [enorm(E(x_{p+1})); hnorm(h_p)]),    logits of token p+2 = head(norm(h'))

h_p is the hidden state that leaves the target's last layer, before the final norm. Chained, its own output takes the
place of h: one module drafts any number of tokens. Embedding and head are the target's; the norm before the head is the
module's. Names are DeepSeek's where it has one.

Only weights are here: decoding runs them packed (`selfspec.drafters.mtp`), training unrolled (`selfspec.training.mtp`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from selfspec.drafters.draft_layer import TrainedNorm


class MtpModule(nn.Module):
    """`layer`, `norm`: a decoder layer and a final norm of the target's kind."""

    def __init__(self, width: int, norm_eps: float, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm = TrainedNorm(width, norm_eps), TrainedNorm(width, norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer: Any = layer
        self.norm: Any = norm
