"""The reduced draft vocabulary: the tokens a draft may propose (FR-Spec, Zhao et al. 2025), chosen by rank.

Lossless, since q merely has smaller support; what it costs is the probability mass outside, what it saves is the share
of a draft step that the LM head takes (21% of SmolLM2's weights). EOS ids are always among them, or no answer's end
could ever be drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from selfspec.errors import UserError
from selfspec.target import Target


def draft_head(target: Target, d_vocab: int | None, draft_vocab: str | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """Final norm and head of a draft from the target's own hidden states, and the bytes it holds of its own.

    d_vocab None: the target's head. UserError: as `draft_token_ids`, and for a file without a size.
    """
    if d_vocab is None:
        if draft_vocab is not None:
            raise UserError("draft_vocab needs d_vocab: how many of its tokens to draft from.")
        return lambda hidden_BTM: target.head(hidden_BTM), 0
    token_ids_N = draft_token_ids(target, d_vocab, draft_vocab)
    unembed = target.reduced_unembed(token_ids_N)
    return lambda hidden_BTM: unembed(target.norm(hidden_BTM)), unembed.nbytes


def draft_token_ids(target: Target, d_vocab: int, path: str | None = None) -> Tensor:
    """int64 `[d_vocab]`: EOS ids, then the likeliest ids of the file (None: the first ids of the tokenizer).

    Raises UserError: a size that is not possible, a file that is missing, damaged, too short or of another vocabulary.
    """
    eos = list(dict.fromkeys(target.eos_token_ids))
    if not max(len(eos), 1) <= d_vocab <= target.vocab_size:
        raise UserError(
            f"d_vocab={d_vocab} is not possible with {target.name}: allowed are {max(len(eos), 1)} (its EOS ids) to "
            f"{target.vocab_size} tokens."
        )
    ranked = torch.arange(target.vocab_size) if path is None else _read(target, Path(path).expanduser())
    others = ranked[~torch.isin(ranked, torch.tensor(eos, dtype=torch.int64))]
    ids = torch.cat([torch.tensor(eos, dtype=torch.int64), others])[:d_vocab]
    if len(ids) < d_vocab:
        raise UserError(f"{path} ranks {len(ids)} tokens, too few for d_vocab={d_vocab}. Ask for that many or fewer.")
    return ids.clone().to(target.device)  # not a view of all of them


def _read(target: Target, path: Path) -> Tensor:
    try:
        ids = load_file(path)["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"draft_vocab={path} cannot be read ({error}). Needed: a safetensors file with `token_ids`, ranked."
        ) from error
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids.unique()) != len(ids):
        raise UserError(f"{path}: `token_ids` must be a list of distinct int64 token ids.")
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size):
        raise UserError(f"{path} names tokens outside the {target.vocab_size} of {target.name}: it is another model's.")
    return ids
