"""Much text from the target at once: every row takes one token per step, and a row that is done gets the next request.

No row waits for another. A new request keeps what it has in common with the row's old text (the chat header, or the
whole prompt when the answer follows in the same row), so prompts that the target has just written are free; what is
left of one, if it is long, runs in chunks of its row alone.

What a request yields depends on (seed, index) alone, not on its row or its neighbours (up to the rounding of sums).

Every row reads its own cache, and as many slots of it as the longest row beside it has (`Spent` says how much of that
was in vain). On a CPU a step therefore takes `BESIDE` rows at once, and every `SORT_EVERY` steps the rows change places
so that those of similar length are beside each other. Then come the linear layers, which multiply 32 rows there about
as fast as 128, the head, the sampling.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from selfspec.errors import UserError
from selfspec.sampling.argmax import first_argmax
from selfspec.target import Target

BLOCK = 256  # tokens
CHUNK = 64  # tokens of a prompt that run at once, always, so that a CPU keeps its kernels
LONG = 24  # tokens left of a prompt from which on a chunk is cheaper than a place in that many steps
BESIDE = 32  # rows that a CPU runs at once
SORT_EVERY = 16  # steps
ROWS_PER_PICK = 32  # the [rows, V] float32 temporaries of sampling stay small enough to be reused by the allocator


@dataclass(frozen=True)
class Request:
    """One text to write. temperature 0 is greedy; min_p drops tokens less likely than min_p times the likeliest."""

    index: int
    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    min_p: float = 0.0
    kind: str = "answer"


@dataclass(frozen=True)
class Finished:
    request: Request
    new_ids: list[int]  # with the EOS, when it stopped there


@dataclass
class Spent:
    """Where the time of a stream went (seconds of the host's clock, meant for a CPU), and what attention read."""

    prompts_s: float = 0.0
    layers_s: float = 0.0
    head_s: float = 0.0
    sampling_s: float = 0.0
    host_s: float = 0.0
    slots_read: int = 0
    slots_held: int = 0

    def lap(self, part: str, since: float) -> float:
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + now - since)
        return now

    def summary(self) -> str:
        parts = {
            name.removesuffix("_s"): getattr(self, name) for name in self.__dataclass_fields__ if name.endswith("_s")
        }
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
        return f"{shares}; attention read {self.slots_read / max(1, self.slots_held):.1f} times the slots in use"


NextRequest = Callable[[Finished | None], Request | None]


@torch.inference_mode()
def generate_stream(
    target: Target,
    next_request: NextRequest,
    *,
    rows: int,
    capacity: int,
    seed: int,
    eos_ids: Iterable[int],
    on_step: Callable[[], None] = lambda: None,
    spent: Spent | None = None,
) -> None:
    """Keep `rows` rows busy until `next_request` has no more. It is called with each finished text, at first with None.

    `capacity` bounds prompt + new tokens; a longer request is a UserError. `spent` is added to.
    """
    spent = spent or Spent()
    cache = target.make_cache(rows, capacity)
    tokens_BS = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
    uniform_BS = torch.zeros(rows, capacity + 1, dtype=torch.float64, device=target.device)
    temperature_B, min_p_B = torch.zeros(2, rows, device=target.device)
    beside = BESIDE if target.device.type == "cpu" else rows
    blocks = [slice(first, min(first + beside, rows)) for first in range(0, rows, beside)]
    eos = torch.tensor(sorted(set(eos_ids)), device=target.device)
    requests: list[Request | None] = [None] * rows
    texts: list[list[int]] = [[] for _ in range(rows)]  # what each row knows; `fed` of it is in the cache
    fed = np.zeros(rows, dtype=np.int64)

    def assign(row: int, finished: Finished | None) -> None:
        request = next_request(finished)
        requests[row] = request
        if request is None:
            return
        if len(request.token_ids) + request.max_new_tokens > capacity:
            raise UserError(
                f"request {request.index}: {len(request.token_ids)} prompt + {request.max_new_tokens} new tokens "
                f"exceed the capacity of {capacity}. Shorten the prompt or max_new_tokens, or raise the capacity."
            )
        fed[row] = min(common_prefix(texts[row][: fed[row]], request.token_ids), len(request.token_ids) - 1)
        texts[row] = list(request.token_ids)
        tokens_BS[row, : len(request.token_ids)] = torch.tensor(request.token_ids)
        noise = np.random.Generator(np.random.Philox(key=[seed, 2 * request.index + (request.kind == "answer")]))
        start = len(request.token_ids)
        uniform_BS[row, start : start + request.max_new_tokens] = torch.from_numpy(noise.random(request.max_new_tokens))
        temperature_B[row], min_p_B[row] = request.temperature, request.min_p
        read_prompt(row)

    def read_prompt(row: int) -> None:
        """All of a long rest of a prompt but its last few tokens, which the common steps read."""
        while (rest := len(texts[row]) - 1 - int(fed[row])) >= LONG:
            begun, width = time.perf_counter(), min(rest, CHUNK)
            positions_1T = torch.full((1, CHUNK), -1, device=target.device)
            positions_1T[0, :width] = torch.arange(fed[row], fed[row] + width)
            inputs_1T = tokens_BS[row, positions_1T.clamp(min=0)]
            pass_ = cache.open(positions_1T, int(fed[row]) + width, rows=slice(row, row + 1))
            target.run_layers(target.embed(inputs_1T), 0, target.num_layers, pass_)
            fed[row] += width
            spent.lap("prompts_s", begun)

    def sort_rows() -> None:
        """By length, idle ones first."""
        order = np.argsort(np.where([request is not None for request in requests], fed, -1), kind="stable")
        if (order[1:] > order[:-1]).all():
            return
        order_B = torch.from_numpy(order).to(target.device)
        cache.reorder(order_B, int(fed.max()) + 1)
        for of_rows in (tokens_BS, uniform_BS, temperature_B, min_p_B):
            of_rows.copy_(of_rows[order_B])
        requests[:], texts[:] = [requests[row] for row in order], [texts[row] for row in order]
        fed[:] = fed[order]

    def run(block: slice, places: np.ndarray) -> Tensor:
        """The next token after the one at each row's place (−1: idle) `[rows of the block]`."""
        at = time.perf_counter()
        positions_B = torch.from_numpy(places).to(target.device)
        pass_ = cache.open(positions_B[:, None], int(places.max()) + 1, rows=block)
        spent.slots_read += len(places) * pass_.extent
        spent.slots_held += int((places + 1).sum())
        inputs_B1 = tokens_BS[block].gather(1, positions_B.clamp(min=0)[:, None])
        hidden_B1M = target.run_layers(target.embed(inputs_B1), 0, target.num_layers, pass_)
        at = spent.lap("layers_s", at)
        logits_BV = target.head(hidden_B1M)[:, 0]
        at = spent.lap("head_s", at)
        uniform_B = uniform_BS[block].gather(1, positions_B.clamp(min=0)[:, None] + 1)[:, 0]
        picked_B = pick(logits_BV, temperature_B[block], min_p_B[block], uniform_B)
        spent.lap("sampling_s", at)
        return picked_B

    for row in range(rows):
        assign(row, None)
    for step in itertools.count():
        if not any(requests):
            return
        at = time.perf_counter()
        if len(blocks) > 1 and step % SORT_EVERY == 0:
            sort_rows()
        spent.lap("host_s", at)
        places = np.where([request is not None for request in requests], fed, -1)
        idle_B = torch.zeros(beside, dtype=torch.int64, device=target.device)
        picked = [
            run(block, places[block]) if places[block].max() >= 0 else idle_B[: block.stop - block.start]
            for block in blocks
        ]
        at = time.perf_counter()
        picked_B = torch.cat(picked)
        stops, tokens = torch.isin(picked_B, eos).tolist(), picked_B.tolist()
        at, prompts_s = spent.lap("sampling_s", at), spent.prompts_s
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request is None:
                continue
            fed[row] += 1
            if fed[row] < len(texts[row]):  # still reading its prompt: what was picked is ignored
                continue
            texts[row].append(token)
            tokens_BS[row, fed[row]] = token
            new_ids = texts[row][len(request.token_ids) :]
            if stops[row] or len(new_ids) == request.max_new_tokens:
                assign(row, Finished(request, new_ids))
        spent.lap("host_s", at + spent.prompts_s - prompts_s)
        on_step()


def common_prefix(known: list[int], wanted: list[int]) -> int:
    length = 0
    for a, b in zip(known, wanted, strict=False):
        if a != b:
            break
        length += 1
    return length


def pick(logits_BV: Tensor, temperature_B: Tensor, min_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """One token per row by inverting the distribution function at `uniform_B`; the argmax where temperature is 0."""
    picked_B = first_argmax(logits_BV)
    for rows in (temperature_B > 0).nonzero()[:, 0].split(ROWS_PER_PICK):
        picked_B[rows] = draw(logits_BV[rows], temperature_B[rows], min_p_B[rows], uniform_B[rows])
    return picked_B


def draw(logits_BV: Tensor, temperature_B: Tensor, min_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """The block of tokens in which the distribution function reaches `uniform_B`, then the token: a running sum over
    the whole vocabulary would cost more than the head. Never a token without probability, however sums are rounded.
    """
    top_B1 = logits_BV.amax(-1, keepdim=True).float()
    weights_BV = logits_BV.float().sub_(top_B1).div_(temperature_B[:, None]).exp_()  # in place: fresh megabytes cost
    if bool((min_p_B > 0).any()):
        at_least = weights_BV.sub(min_p_B[:, None]).sign_().add_(1).clamp_(max=1)  # a mask would be ten times slower
        weights_BV.mul_(at_least)
    blocks_BXN = functional.pad(weights_BV, (0, -weights_BV.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    reached_BX = blocks_BXN.sum(-1).cumsum_(-1)
    goal_B1 = uniform_B.to(reached_BX.dtype)[:, None] * reached_BX[:, -1:]
    block_B1 = _first_beyond(reached_BX, goal_B1)
    before_B1 = torch.where(block_B1 > 0, reached_BX.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside_BN = blocks_BXN.gather(1, block_B1[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    return (block_B1 * BLOCK + _first_beyond(inside_BN, goal_B1 - before_B1))[:, 0]


def _first_beyond(sums_BN: Tensor, goal_B1: Tensor) -> Tensor:
    """Index of the first running sum above the goal; where rounding left none, of the last that grew."""
    last_B1 = torch.searchsorted(sums_BN, sums_BN[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_BN, goal_B1, right=True), last_B1)
