"""What every family is checked for, in one place for the tests and for `experiments/family_table.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from selfspec import Sampling, build_drafter, decode
from selfspec.target import Target, wrap_target
from tiny_models import WINDOW, prompt_ids, tiny_model

TOLERANCE = 1e-5  # relative to the largest logit, in float32
REJECTED = 4  # drafts run at these positions before, and rejected
NUM_DRAFTED = 4
STARTS = (WINDOW - REJECTED, 3 * WINDOW)  # the pass of K+1 reaches over the window's edge; everything is beyond it
NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 9, 30)
DRAFTERS = ("none", "early_exit", "ngram")


@functools.cache
def target_of(name: str, tied: bool = False) -> Target:
    return wrap_target(tiny_model(name, tied=tied))


@torch.inference_mode()
def full_forward(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own logits `[T, V]`."""
    return model(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def split_forward(
    target: Target, cache: Any, ids: list[int], start: int, split: int, rows: slice = slice(0, 1)
) -> torch.Tensor:
    """Logits `[T, V]` of `ids` at positions `start...`, as layers [0, split) and then [split, L)."""
    pass_ = cache.open(torch.arange(start, start + len(ids))[None], extent=start + len(ids), rows=rows)
    hidden = target.run_layers(target.embed(torch.tensor([ids])), 0, split, pass_)
    return target.head(target.run_layers(hidden, split, target.num_layers, pass_))[0]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def split_errors(target: Target, start: int, split: int) -> tuple[float, float]:
    """Largest relative errors for one query and for K+1, after a prefill of `start` tokens and a rollback."""
    ids = prompt_ids(start + 2 + NUM_DRAFTED)
    expected = full_forward(target.hf_model, ids)
    cache, row = target.make_cache(rows=2, capacity=64), slice(1, 2)
    split_forward(target, cache, ids[:start], 0, split, row)
    split_forward(target, cache, [5, 6, 7, 8][:REJECTED], start, split, row)
    one = split_forward(target, cache, ids[start : start + 1], start, split, row)
    wide = split_forward(target, cache, ids[start + 1 :], start + 1, split, row)
    return relative_error(one, expected[start : start + 1]), relative_error(wide, expected[start + 1 :])


@functools.cache
def generated(name: str, length: int) -> list[int]:
    """What `model.generate` gives for the prompt of this length, greedily."""
    target = target_of(name)
    return target.hf_generate(prompt_ids(length, seed=length), NEW_TOKENS, Sampling(), target.eos_token_ids).token_ids


def decoded(name: str, drafter: str, num_drafted: int, rows: int = 2) -> list[list[int]]:
    """The same prompts, decoded by selfspec in ragged rows."""
    target = target_of(name)
    options = {"exit_layer": target.num_layers // 2} if drafter == "early_exit" else {}
    outputs = decode(
        target,
        build_drafter(drafter, target, **options),
        [prompt_ids(length, seed=length) for length in PROMPT_LENGTHS],
        max_new_tokens=NEW_TOKENS,
        lookahead=num_drafted,
        max_batch_rows=rows,
    )
    return [output.token_ids for output in outputs]
