"""The public face of the engine: `decode` for one call, `Decoder` to keep one cache over many.

Everything that can be wrong with a call is checked before anything is allocated or run, and an exception leaves model
and cache as they were: rows are released, and what is in the cache stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from selfspec.cache import Storage, make_cache, storage_for
from selfspec.cache.estimate import Estimate
from selfspec.decoding.budget import call_of, estimate_call, refuse_if_too_large
from selfspec.decoding.graphs import check_mode
from selfspec.decoding.loop import RoundEvent, run_requests
from selfspec.decoding.processors import GuardedProcessors
from selfspec.decoding.reach import check_reach, drafts_trees, lookahead_for, round_width
from selfspec.decoding.requests import (
    Output,
    Prompt,
    Request,
    arrival_times,
    check_length,
    check_prompts,
    encode_prompt,
    token_counts,
)
from selfspec.decoding.rows import Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopping import StopStrings
from selfspec.drafters import Drafter, NoDraft
from selfspec.drafters.base import Foretold
from selfspec.errors import UserError
from selfspec.lookahead import Lookahead, build_lookahead
from selfspec.sampling import Rule, Sampling, build_rule, build_transforms
from selfspec.sampling.acceptance.tree_rules import tree_rule_of
from selfspec.target import Target
from selfspec.target.tensor_parallel import check_same


class Decoder:
    """One target, one drafter, one allocation: decodes call after call on the same cache.

    The cache grows (is allocated anew) only when a call needs more slots than any before; give `capacity` (tokens per
    row) to allocate once. cache: "contiguous", "paged" (blocks, shared by rows whose prompts begin alike), or a
    `selfspec.cache.Paged` with its own block size and number of blocks. With `reuse=True` a prompt that continues what
    its row holds (a further turn of a chat) only has its new tokens processed. rounds: on CUDA "auto" (one graph per
    round where that is possible), or "whole", "split" (two graphs) or "eager", see `selfspec.decoding.graphs`.
    memory_limit_bytes: what may be allocated beside the weights (None: what is free on the device); a call that would
    need more is refused, see `selfspec.decoding.budget`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        max_batch_rows: int = 1,
        capacity: int = 0,
        cache: str | Storage = "contiguous",
        rounds: str = "auto",
        memory_limit_bytes: int | None = None,
    ) -> None:
        if isinstance(max_batch_rows, bool) or not isinstance(max_batch_rows, int) or max_batch_rows < 1:
            raise UserError(f"max_batch_rows={max_batch_rows!r} is not possible: allowed is 1 or more.")
        for name, value in (("capacity", capacity), ("memory_limit_bytes", memory_limit_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise UserError(f"{name}={value!r} is not possible: allowed is a whole number, 0 or more.")
        self.target = target
        self.drafter: Drafter = check_drafter(target, drafter)
        self.max_batch_rows = max_batch_rows
        self.storage = storage_for(cache)
        self.mode = mode_for(target, rounds)
        self.memory_limit_bytes = memory_limit_bytes
        # the longest requests seen, in tokens: what the cache is made for
        self._longest = [capacity] * max_batch_rows if capacity else []
        self.rows: Rows | None = None

    def decode(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        lookahead: int | str | dict[str, Any] | Lookahead = 4,
        sampling: Sampling | None = None,
        acceptance: str | Rule = "auto",
        processors: Sequence[Any] | None = None,
        seed: int = 0,
        eos_token_ids: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        on_round: Callable[[RoundEvent], None] | None = None,
        reuse: bool = False,
        arrivals_s: Sequence[float] | None = None,
        interleave_prefill: bool = True,
    ) -> list[Output]:
        """Decode all prompts (text, token ids or chats, mixed); outputs in their order.

        max_new_tokens: one for all, or one per prompt. arrivals_s: when each prompt comes in, in seconds after this
        call (None: all are there). interleave_prefill: long prompts do not stall the rows that decode.
        Raises UserError for anything that cannot be honoured, before the model runs.
        """
        target = self.target
        sampling = sampling if sampling is not None else Sampling()
        if not isinstance(sampling, Sampling):
            raise UserError(f"sampling={sampling!r} is not possible: give selfspec.Sampling(temperature=...) or None.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserError(f"seed={seed!r} is not possible: allowed is a whole number.")
        check_prompts(prompts)
        counts = token_counts(max_new_tokens, len(prompts))
        arrivals = arrival_times(arrivals_s, len(prompts))
        if target.ranks > 1 and any(arrivals):
            raise UserError("arrivals_s needs one clock, and every rank of a tensor-parallel target has its own.")
        policy = lookahead_for(self.target, self.drafter, lookahead)
        rule = build_rule(acceptance, sampling)
        transforms = build_transforms(sampling, processors, target.vocab_size)
        guard = GuardedProcessors(transforms.processors) if transforms.processors else None
        if guard is not None:
            transforms = build_transforms(sampling, [guard], target.vocab_size)
        tree_rule = tree_rule_of(rule, sampling) if drafts_trees(policy) else None
        sampler = Sampler(transforms, rule, seed, guard, tree_rule)
        stop = StopStrings(stop_strings or (), target.tokenizer)
        eos = () if ignore_eos else _eos_ids(target, eos_token_ids)
        requests = []
        for index, (prompt, count, arrival_s) in enumerate(zip(prompts, counts, arrivals, strict=True)):
            prompt_ids = encode_prompt(target, prompt)
            check_length(target, len(prompt_ids), count)
            requests.append(Request(index, prompt_ids, count, noise_id=index, arrival_s=arrival_s))
        if not requests:
            return []
        check_reach(self.drafter, [request.num_tokens for request in requests])
        if isinstance(self.drafter, Foretold):
            self.drafter.check(rule)
            self.drafter.learn(self._autoregressive(requests, sampler, stop, eos))
        rows = self._rows_for(requests, round_width(self.drafter, policy), eos, sampler)
        if not reuse:
            rows.cache.forget()
        try:
            outputs = run_requests(
                self.drafter,
                rows,
                policy,
                sampler,
                stop,
                requests,
                on_round,
                reuse,
                mode=self.mode,
                interleave_prefill=interleave_prefill,
            )
        except BaseException:
            self.rows = None  # a half-written round is not worth keeping
            raise
        check_same("tokens", [outputs[index].token_ids for index in range(len(requests))], target.ranks)
        return [outputs[index] for index in range(len(requests))]

    def estimate(
        self,
        prompts: Sequence[Prompt | int],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        lookahead: int | str | dict[str, Any] | Lookahead = 4,
        sampling: Sampling | None = None,
        acceptance: str | Rule = "auto",
    ) -> Estimate:
        """The memory of decoding these prompts, in bytes, before anything is allocated: weights, keys and values (and
        per token), the draft's own, the rows' and working memory (`selfspec.cache.estimate`). A number stands for a
        prompt of so many tokens.

        Raises UserError as `decode` would, except for what does not fit: ask `allocated_bytes`.
        """
        check_prompts(prompts)
        counts = token_counts(max_new_tokens, len(prompts))
        sampling = sampling if sampling is not None else Sampling()
        sampler = Sampler(build_transforms(sampling, None, self.target.vocab_size), build_rule(acceptance, sampling))
        width = round_width(self.drafter, lookahead_for(self.target, self.drafter, lookahead))
        lengths, longest_prompt = [], 1
        for prompt, count in zip(prompts, counts, strict=True):
            num_tokens = prompt if isinstance(prompt, int) else len(encode_prompt(self.target, prompt))
            if num_tokens < 1:
                raise UserError(f"A prompt of {num_tokens} tokens is not possible: it has 1 or more.")
            check_length(self.target, num_tokens, count)
            lengths.append(num_tokens + count)
            longest_prompt = max(longest_prompt, num_tokens)
        check_reach(self.drafter, lengths)
        needs = self._needs(lengths or [1], width)
        return estimate_call(
            self.target,
            self.drafter,
            call_of(self.target, self.storage, self.max_batch_rows, needs, width, sampler, longest_prompt),
        )

    def _autoregressive(
        self, requests: Sequence[Request], sampler: Sampler, stop: StopStrings, eos: Sequence[int]
    ) -> list[list[int]]:
        """Prompt and plain output of every request, on a cache that is gone afterwards."""
        rows = Decoder(self.target, None, self.max_batch_rows, cache=self.storage)._rows_for(requests, 1, eos, sampler)
        at_once = [replace(request, arrival_s=0.0) for request in requests]
        outputs = run_requests(NoDraft(), rows, build_lookahead(1), sampler, stop, at_once, mode=self.mode)
        return [request.prompt_ids + outputs[request.index].token_ids for request in requests]

    def _needs(self, lengths: Sequence[int], width: int) -> list[int]:
        """What the cache is made for: per row the longest request (prompt and output) so far, and one round."""
        needs = sorted((length + width for length in lengths), reverse=True)
        return [max(pair) for pair in zip_longest(self._longest, needs[: self.max_batch_rows], fillvalue=0)]

    def _rows_for(self, requests: Sequence[Request], width: int, eos: Sequence[int], sampler: Sampler) -> Rows:
        """The rows there are, if their cache has room for these requests; else new ones if there is memory for them."""
        longest = self._needs([request.num_tokens for request in requests], width)
        total_slots = self.storage.total_slots(self.max_batch_rows, longest)  # may refuse
        if self.rows is None or self.rows.capacity < longest[0] or self.rows.cache.total_slots < total_slots:
            # any part of a request may be its prompt: the rows may be used again for one of the same length
            call = call_of(self.target, self.storage, self.max_batch_rows, longest, width, sampler)
            freed = 0 if self.rows is None else self.rows.cache.kv_bytes
            refuse_if_too_large(self.target, self.drafter, call, self.memory_limit_bytes, freed)
            self.rows = None  # free the old allocation first
            target, shape = self.target, (self.max_batch_rows, longest[0])
            cache = make_cache(self.storage, target.layer_shapes, shape[0], longest, target.dtype, target.device)
            rows = Rows(target, *shape, cache)
            self.drafter.start(rows)  # may refuse: nothing is kept then
            self.rows, self._longest = rows, longest
        self.rows.round_width = width
        self.rows.set_eos(eos)
        return self.rows


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    lookahead: int | str | dict[str, Any] | Lookahead = 4,
    sampling: Sampling | None = None,
    acceptance: str | Rule = "auto",
    processors: Sequence[Any] | None = None,
    seed: int = 0,
    eos_token_ids: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    max_batch_rows: int = 1,
    cache: str | Storage = "contiguous",
    on_round: Callable[[RoundEvent], None] | None = None,
) -> list[Output]:
    """Decode `prompts` with `target`, drafting with `drafter` (None: autoregressively, same loop, same clock).

    prompts: texts, token-id lists or chats, mixed, of any lengths. max_new_tokens: one for all, or one per prompt.
    Outputs come in the same order. cache: see `Decoder`. With greedy or lossless acceptance the output is the target's
    own, whatever the drafter. Raises UserError before anything runs.
    """
    check_prompts(prompts)
    rows = min(max_batch_rows, max(len(prompts), 1)) if isinstance(max_batch_rows, int) else max_batch_rows
    return Decoder(target, drafter, rows, cache=cache).decode(
        prompts,
        max_new_tokens=max_new_tokens,
        lookahead=lookahead,
        sampling=sampling,
        acceptance=acceptance,
        processors=processors,
        seed=seed,
        eos_token_ids=eos_token_ids,
        stop_strings=stop_strings,
        ignore_eos=ignore_eos,
        on_round=on_round,
    )


def check_drafter(target: Target, drafter: Drafter | None) -> Drafter:
    """The drafter, NoDraft for None. UserError for a name, and for one whose weights belong to another target."""
    if drafter is None:
        return NoDraft()
    if not callable(getattr(drafter, "propose", None)):
        raise UserError(f"drafter={drafter!r} is not a drafter. Build one: selfspec.build_drafter(name, target, ...).")
    built_for = getattr(drafter, "target", target)
    if built_for is not target:
        raise UserError(
            f"The drafter {drafter.name!r} was built for the target {built_for.name}, not for this one "
            f"({target.name}): its layers and cache would not fit. Build it with "
            "selfspec.build_drafter(name, target, ...)."
        )
    return drafter


def mode_for(target: Target, rounds: str) -> str:
    """How rounds are run. A target on several ranks runs them eagerly: a graph around their all-reduces is untested."""
    mode = check_mode(rounds)
    if target.ranks > 1 and mode in ("whole", "split"):
        raise UserError(f"rounds={mode!r} is not possible for a tensor-parallel target. Use rounds='auto' or 'eager'.")
    return "eager" if target.ranks > 1 else mode


def _eos_ids(target: Target, given: int | Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return target.eos_token_ids
    ids = tuple(given) if isinstance(given, Sequence) else (given,)
    if strange := [token for token in ids if not isinstance(token, int) or not 0 <= token < target.vocab_size]:
        raise UserError(f"eos_token_ids holds {strange[0]!r}; allowed are token ids 0 to {target.vocab_size - 1}.")
    return ids
