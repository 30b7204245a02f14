"""The sequences being decoded: their tokens, their lengths, and one shared cache. Committing moves lengths; nothing
is copied.

`tokens_BS` holds each row's committed tokens and, right behind them, the tentative ones a drafter proposed.
`lengths_B` counts the tokens whose keys and values are in the cache for every layer; the token at that index is the
*pending* one: committed, not yet run. Everything lives on the device; one small report per round is all the host
reads.

Shape letters: B rows, T positions in this pass, K drafted, S slots, E end-of-sequence ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache import Cache, Pass
from selfspec.cache.blocks import common_prefix
from selfspec.cache.storage import prompt_chunks
from selfspec.drafters.base import Seen
from selfspec.sampling.faults import fault_offset
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.drafters.base import Draft
    from selfspec.sampling import Verdict

RUNNING, HIT_EOS, HIT_LENGTH = 0, 1, 2


@dataclass(frozen=True)
class RoundReport:
    """What the host reads of one row after a round; the columns of `Rows.commit`."""

    num_drafted: int
    num_accepted: int
    num_emitted: int  # after trimming at EOS and at the length limit
    state: int  # RUNNING, HIT_EOS or HIT_LENGTH
    error: int  # 0, or a code for `selfspec.sampling.raise_for`
    alpha_sum: float  # Σ over tested positions of Σ_v min(p, q)
    alpha_count: int
    source: int
    drafted_ids: list[int]
    emitted_ids: list[int]

    @property
    def num_sound(self) -> int:
        """Emitted tokens in front of a fault. One behind the end is never met without speculation, and is none."""
        return min(self.num_emitted, fault_offset(self.error)) if self.error else self.num_emitted

    @classmethod
    def parse(cls, columns: list[float]) -> RoundReport:
        num_drafted, num_accepted, num_emitted, state, error = (int(x) for x in columns[:5])
        tokens = [int(x) for x in columns[8:]]
        width = (len(tokens) + 1) // 2
        emitted_ids = tokens[width - 1 :][:num_emitted]
        drafted_ids = tokens[:num_drafted]
        counts = (num_drafted, num_accepted, num_emitted, state, error)
        return cls(*counts, columns[5], int(columns[6]), int(columns[7]), drafted_ids, emitted_ids)


class Rows:
    """`num_rows` sequences of at most `capacity` tokens each (prompt, output and one round of drafts)."""

    def __init__(self, target: Target, num_rows: int, capacity: int, cache: Cache | None = None) -> None:
        device = target.device
        self.target = target
        self.num_rows = num_rows
        self.capacity = capacity
        self.cache: Cache = target.make_cache(num_rows, capacity) if cache is None else cache
        self.draft_state: object = None  # what the drafter keeps for these rows, e.g. a cache of its own
        slots = self.cache.num_slots
        self.tokens_BS = torch.zeros(num_rows, slots, dtype=torch.int64, device=device)
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.limits_B = torch.zeros_like(self.lengths_B)  # committed tokens at which a row is done
        self.prompt_lens_B = torch.zeros_like(self.lengths_B)
        self.request_B = torch.zeros_like(self.lengths_B)  # names the request in the noise, wherever it runs
        self.active_B = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.eos_E = torch.zeros(0, dtype=torch.int64, device=device)
        self.eos_token_ids: tuple[int, ...] = ()
        self.rounds: dict[object, object] = {}  # captured rounds, which hold addresses of these very tensors
        self._fixed_extent: int | None = None
        self._steps_S = torch.arange(slots, device=device)
        self._lengths = [0] * num_rows  # host mirror of lengths_B for active rows, 0 for idle ones
        self._kept: list[list[int]] = [[] for _ in range(num_rows)]  # host: each row's committed tokens
        self.round_width = capacity  # the longest round, in tokens: what a row may write behind its last one
        self._ends = [0] * num_rows  # host: no position from here on is written by the row; 0 for idle ones
        self._in_flight = 0  # tokens that rounds not yet read may have added to each row
        self.chunks = prompt_chunks(device.type == "cpu")

    @property
    def device(self) -> torch.device:
        return self.tokens_BS.device

    def set_eos(self, eos_token_ids: Sequence[int]) -> None:
        """Captured rounds hold the tensor, so each set of ids keeps one; see `selfspec.decoding.graphs`."""
        if tuple(eos_token_ids) != self.eos_token_ids:
            self.rounds.clear()
            self.eos_token_ids = tuple(eos_token_ids)
            self.eos_E = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=self.device)

    def fits(self, prompt_ids: Sequence[int], max_new_tokens: int) -> bool:
        """Whether the cache has room for this prompt and its output now."""
        return self.cache.fits(prompt_ids[:-1], self._end(len(prompt_ids), max_new_tokens))

    def place(self, row: int, prompt_ids: Sequence[int], max_new_tokens: int, request: int, reuse: bool = False) -> int:
        """Put a prompt into an idle row. Returns how many of its tokens need not be run: they are in the cache already
        (with `reuse`, or from another row where rows share).
        """
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.tokens_BS[row, : len(prompt)].copy_(prompt, non_blocking=True)
        # fill_ and not `[row] = number`, which on CUDA is a copy that waits for the rounds in flight
        self.lengths_B[row].fill_(len(prompt) - 1)
        self.prompt_lens_B[row].fill_(len(prompt))
        self.limits_B[row].fill_(len(prompt) + max_new_tokens)
        self.request_B[row].fill_(request)
        self.active_B[row].fill_(True)
        usable = self._kept[row][:-1] if reuse else []  # the last token was pending: committed, never run
        reads_prompt = self.draft_state is not None and getattr(self.draft_state, "reads_prompt", True)
        if (reset := getattr(self.draft_state, "reset", None)) is not None:
            reset(row, prompt_ids, request)
            if reads_prompt:  # what a drafter carries from one token to the next is made anew, where that differs, too
                usable = usable[: max(min(len(prompt) - 2, common_prefix(self._kept[row], prompt_ids) - 1), 0)]
        self._ends[row] = self._end(len(prompt), max_new_tokens)
        kept = self.cache.place(row, prompt_ids[:-1], self._ends[row], usable)
        if self.cache.between_rows and reads_prompt:
            kept = 0  # the drafter has not seen what other rows ran, so the whole prompt is run again
        self._lengths[row] = len(prompt) - 1
        self._kept[row] = list(prompt_ids)
        return kept

    def publish(self, row: int) -> None:
        """The row's prompt has run: other rows may share it."""
        self.cache.publish(row, self._kept[row][:-1])

    def reserve(self, width: int, lag: int = 0) -> None:
        """Room for a round that writes `width` tokens of each row, behind what `lag` rounds not yet read may add."""
        self._in_flight = lag * self.round_width
        for row, end in enumerate(self._ends):
            if end:
                first = self._lengths[row]
                self.cache.reserve(row, first, min(first + self._in_flight + width, end))

    def pause(self, row: int) -> None:
        """The row keeps its place but takes no part in rounds, until `resume`: its prompt is still being run.

        What a round writes for it lands in the trash slot, and behind its prompt.
        """
        self.active_B[row].fill_(False)
        self._lengths[row] = 0

    def resume(self, row: int) -> None:
        self.active_B[row].fill_(True)
        self._lengths[row] = len(self._kept[row]) - 1

    def release(self, row: int) -> None:
        """The row is done: it writes to the trash slot from now on. Its keys and values stay until their place is
        needed.
        """
        self.cache.release(row, self._kept[row][:-1])
        self._ends[row] = 0
        self.active_B[row].fill_(False)
        self.lengths_B[row].fill_(0)  # a later call may draft more tokens than there is room for behind an old length
        self._lengths[row] = 0

    def positions(self, first: int, width: int) -> Tensor:
        """Positions `[B, width]` from `first` past the pending token on; −1 for idle rows."""
        steps_BT = self.lengths_B[:, None] + first + self._steps_S[:width]
        return torch.where(self.active_B[:, None], steps_BT, -1)

    def extent(self, first: int, width: int) -> int:
        """Slots that a pass over `positions(first, width)` may read."""
        if self._fixed_extent is not None:
            return self._fixed_extent
        return max(self._lengths) + first + width

    @contextmanager
    def idle(self, extent: int) -> Iterator[None]:
        """All rows idle and every pass `extent` slots wide: running a round then changes nothing that counts."""
        active_B = self.active_B.clone()
        self.active_B.fill_(False)
        try:
            with self.reading(extent):
                yield
        finally:
            self.active_B.copy_(active_B)

    @contextmanager
    def reading(self, extent: int) -> Iterator[None]:
        """Every pass `extent` slots wide: for a round that is launched before the lengths of the last one are read."""
        self._fixed_extent = extent
        try:
            yield
        finally:
            self._fixed_extent = None

    def open(self, first: int, width: int) -> Pass:
        """A pass of the target over `positions(first, width)`."""
        return self.cache.open(self.positions(first, width), self.extent(first, width))

    def window(self, first: int, width: int) -> Tensor:
        """The token ids at `positions(first, width)`, committed or tentative."""
        return self.tokens_BS.gather(1, (self.lengths_B[:, None] + first + self._steps_S[:width]).clamp(min=0))

    def seen(self, positions_BT: Tensor, last_B: Tensor, features_BTF: Tensor) -> Seen:
        """What a round has verified at these positions, asked after its commit: the tokens there, and what follows."""
        last_slot = self.tokens_BS.shape[1] - 1
        token_ids_BT = self.tokens_BS.gather(1, positions_BT.clamp(min=0))
        next_ids_BT = self.tokens_BS.gather(1, (positions_BT + 1).clamp(max=last_slot))
        extent = self.extent(0, positions_BT.shape[1])  # the host's lengths are still those before the commit
        return Seen(slice(None), positions_BT, token_ids_BT, next_ids_BT, last_B, extent, features_BTF)

    def prompt_passes(self, row: int, start: int, end: int) -> Iterator[tuple[Pass, Seen]]:
        """Tokens [start, end) of one row in chunks: a pass over the shared cache, and what it runs.

        The last chunk is padded, to few shapes: what is behind `end` goes to the trash slot.
        """
        rows = slice(row, row + 1)
        for first in range(start, end, self.chunks.most):
            stop = min(first + self.chunks.most, end)
            padded = self.chunks.padded(stop - first)
            positions_1T = (first + self._steps_S[:padded])[None]
            token_ids_1T = self.tokens_BS[rows].gather(1, positions_1T.clamp(max=self.tokens_BS.shape[1] - 1))
            next_ids_1T = self.tokens_BS[rows].gather(1, (positions_1T + 1).clamp(max=self.tokens_BS.shape[1] - 1))
            positions_1T = torch.where(positions_1T < stop, positions_1T, -1)
            last_1 = torch.full_like(self.lengths_B[rows], stop - first - 1)
            seen = Seen(rows, positions_1T, token_ids_1T, next_ids_1T, last_1, stop)
            yield self.cache.open(positions_1T, stop, rows), seen

    def propose(self, step: int, tokens_BN: Tensor) -> None:
        """Write N drafted tokens, the first being that of `step` (0-based), behind the committed ones."""
        steps_N = self._steps_S[step : step + tokens_BN.shape[1]]
        self.tokens_BS.scatter_(1, self.lengths_B[:, None] + 1 + steps_N, tokens_BN)

    def commit(self, draft: Draft, verdict: Verdict, alpha_B2: Tensor) -> Tensor:
        """Accepted drafts, then the correction or bonus token; cut at EOS and at the limit. No host read.

        Returns what the host needs to know, `[B, 8 + K + K+1]` in float64 (exact for token ids): see `RoundReport`.
        """
        accepted_B1 = verdict.num_accepted_B[:, None]
        width = draft.tokens_BK.shape[1] + 1
        steps_T = self._steps_S[:width]
        padded_BT = torch.nn.functional.pad(draft.tokens_BK, (0, 1))
        emitted_BT = torch.where(steps_T == accepted_B1, verdict.next_token_B[:, None], padded_BT)
        room_B1 = (self.limits_B - self.lengths_B)[:, None] - 1
        stop_BT = (emitted_BT[..., None] == self.eos_E).any(-1)
        keep_BT = (steps_T <= accepted_B1) & (steps_T < room_B1) & self.active_B[:, None]
        keep_BT &= (stop_BT.cumsum(1) - stop_BT.long()) == 0  # nothing after the first EOS
        num_emitted_B = keep_BT.sum(1)
        hit_length_B = num_emitted_B >= room_B1[:, 0]
        state_B = torch.where((keep_BT & stop_BT).any(1), HIT_EOS, torch.where(hit_length_B, HIT_LENGTH, RUNNING))
        self.propose(0, emitted_BT)
        self.lengths_B += num_emitted_B
        self.active_B &= state_B == RUNNING  # the host may read this a round late
        counts_B4 = torch.stack([draft.num_drafted_B, verdict.num_accepted_B, num_emitted_B, state_B], 1)
        source_B = torch.zeros_like(state_B) if draft.source_B is None else draft.source_B
        columns = [counts_B4, verdict.error_B[:, None], alpha_B2, source_B[:, None], draft.tokens_BK, emitted_BT]
        return torch.cat(columns, 1)

    def advance(self, row: int, emitted: Sequence[int]) -> None:
        """The host's half of a commit, from the report it read."""
        self._lengths[row] += len(emitted)
        self._kept[row] += emitted
        self.cache.trim(row, self._lengths[row] + self._in_flight)

    def _end(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        return min(num_prompt_tokens + max_new_tokens + self.round_width, self.capacity)
