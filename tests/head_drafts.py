"""Random Medusa and Hydra heads for a target, some of whose drafts are right, and folders with them as training leaves
them.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.drafters.hydra import HydraHeads
from selfspec.drafters.medusa import MedusaHeads
from selfspec.target import Target
from selfspec.target.blank import blank_layer_and_norm

MODULES = {"medusa": MedusaHeads, "hydra": HydraHeads}


def random_heads(
    kind: str,
    target: Target,
    num_heads: int = 4,
    num_blocks: int = 2,
    own_head: bool = False,
    d_vocab: int | None = None,
    seed: int = 0,
    prefix: bool = False,
) -> tuple[nn.Module, Tensor | None]:
    """Heads whose drafts differ from position to position and from token to token, and their draft vocabulary."""
    num_outputs = (d_vocab or target.vocab_size) if own_head else 0
    more = {"prefix": blank_layer_and_norm(target).to_empty(device="cpu")} if prefix else {}
    heads = MODULES[kind](target.width, num_heads, num_blocks, num_outputs, **more)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    others = torch.randperm(target.vocab_size, generator=generator)
    eos = torch.tensor(target.eos_token_ids)
    token_ids = None if d_vocab is None else torch.cat([eos, others[~torch.isin(others, eos)]])[:d_vocab]
    return heads.requires_grad_(False).eval(), token_ids


@torch.no_grad()
def plain_draft(
    kind: str,
    heads: nn.Module,
    target: Target,
    text: Sequence[int],
    length: int,
    count: int,
    draft_vocab: Tensor | None = None,
) -> list[int]:
    """The likeliest drafts of a round that begins behind `length` tokens of a text, the last of them pending; from
    transformers' hidden states of the whole text, nothing kept.
    """
    embedding = target.hf_model.get_input_embeddings().weight
    hidden_1M = torch.zeros(1, target.width)  # nothing has run before a text's first token
    if length > 1:
        hidden_1M = normed_states(target, heads, tuple(text))[length - 2][None]
    read, drafted = [hidden_1M, embedding[text[length - 1]][None]], list[int]()
    for head in range(count):
        state_1M = heads.states(hidden_1M)[head] if kind == "medusa" else heads.state(head, torch.cat(read, -1))
        if heads.lm_head:
            logits_N = heads.lm_head[head](state_1M)[0]
        else:
            logits_N = target.hf_model.lm_head(state_1M)[0]
            logits_N = logits_N if draft_vocab is None else logits_N[draft_vocab]
        best = int(logits_N.argmax())
        drafted.append(best if draft_vocab is None else int(draft_vocab[best]))
        read.append(embedding[drafted[-1]][None])
    return drafted


@functools.cache
def normed_states(target: Target, heads: nn.Module, token_ids: tuple[int, ...]) -> Tensor:
    """The states `[T, M]` that heads read, from transformers' own model; with a prefix layer one of a layer more."""
    model = target.hf_model.model
    if getattr(heads, "prefix", None) is not None:
        model = copy.deepcopy(model)
        model.config.num_hidden_layers += 1
        model.layers.append(heads.prefix["layer"])
        model.norm = heads.prefix["norm"]
    states_TM: Tensor = model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    return states_TM


@torch.no_grad()
def teach(
    kind: str, heads: nn.Module, target: Target, text: Sequence[Sequence[int]], draft_vocab: Tensor | None
) -> None:
    """Fit each head's own output matrix to some texts by least squares: many of its drafts there are right, not all."""
    place = torch.full((target.vocab_size,), -1)
    place[torch.arange(target.vocab_size) if draft_vocab is None else draft_vocab] = torch.arange(
        target.vocab_size if draft_vocab is None else len(draft_vocab)
    )
    embedding = target.hf_model.get_input_embeddings().weight
    for head, matrix in enumerate(heads.lm_head):
        states, labels = [], []
        for token_ids in text:
            hidden_NM, count = normed_states(target, heads, tuple(token_ids)), len(token_ids) - head - 2
            ids = torch.tensor(token_ids)
            read = [hidden_NM[:count], *(embedding[ids[1 + j : 1 + j + count]] for j in range(head + 1))]
            medusa = kind == "medusa"
            states.append(heads.states(read[0])[head] if medusa else heads.state(head, torch.cat(read, -1)))
            labels.append(place[ids[head + 2 :]])
        label_N, states_NM = torch.cat(labels), torch.cat(states)
        known = label_N >= 0
        wanted = torch.nn.functional.one_hot(label_N[known], len(matrix.weight)).float()
        matrix.weight.copy_(torch.linalg.lstsq(states_NM[known], wanted).solution.T)


def write_heads(
    folder: Path, kind: str, target: Target, heads: nn.Module, token_ids: Tensor | None, changed: dict[str, object]
) -> None:
    """`changed`: keys of config.json that are to say something else."""
    weights = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}
    if token_ids is not None:
        weights["token_ids"] = token_ids
    config = {
        "kind": kind,
        "num_heads": len(heads.blocks),
        "num_blocks": len(heads.blocks[0]),
        "own_head": len(heads.lm_head) > 0,
        "prefix": getattr(heads, "prefix", None) is not None,
        "d_vocab": None if token_ids is None else len(token_ids),
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "vocab_size": target.vocab_size,
            "num_layers": target.num_layers,
            "width": target.width,
        },
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changed))
