"""What a served request felt, and what the machine delivered, from the times a cell kept.

The tokens of one round arrive together, so two different things are called "time per token" and both are given:

    TTFT   first commit − when the request was sent: its arrival in an open loop, its admission in a closed one (there a
           client sends its next request when the last is answered)
    queue  admission to a row − arrival
    ITL    the gap between two commits of a request: what a reader of the stream waits; its length does not shrink with
           the number of tokens that a round brings
    TPOT   (last commit − first commit) / tokens that came after the first commit: the pace of a request. A request
           finished in its first round has none. Σ ITL / TPOT = those tokens, so mean ITL / TPOT is tokens per round
    row s  last commit − admission: how long the request held a row
    tokens/s  all tokens of the cell / makespan (first arrival to last commit, the emptying of the rows included)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from selfspec.records.serving import Cell, ServedRequest

PERCENTILES = (50, 95, 99)


def queue_s(request: ServedRequest) -> float:
    return request.admitted_s - request.arrival_s


def ttft_s(request: ServedRequest, open_loop: bool) -> float:
    return request.commit_s[0] - (request.arrival_s if open_loop else request.admitted_s)


def itl_s(request: ServedRequest) -> list[float]:
    return [after - before for before, after in pairwise(request.commit_s)]


def tpot_s(request: ServedRequest) -> float | None:
    num_tokens = sum(request.num_emitted[1:])
    return (request.commit_s[-1] - request.commit_s[0]) / num_tokens if num_tokens else None


def row_s(request: ServedRequest) -> float:
    return request.commit_s[-1] - request.admitted_s


def num_tokens(cell: Cell) -> int:
    return sum(sum(request.num_emitted) for request in cell.requests)


def makespan_s(cell: Cell) -> float:
    first = min(request.arrival_s for request in cell.requests)
    return max(request.commit_s[-1] for request in cell.requests) - first


def busy_rows(cell: Cell) -> float:
    """Rows that held a request, on average over the makespan."""
    return sum(map(row_s, cell.requests)) / makespan_s(cell)


def al_pooled(cells: Iterable[Cell]) -> float:
    """Tokens per verify pass of a row."""
    emitted = [count for cell in cells for request in cell.requests for count in request.num_emitted]
    return sum(emitted) / len(emitted)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and p99 in milliseconds; None of nothing."""
    if not seconds:
        return None
    found = np.percentile(np.asarray(seconds) * 1e3, PERCENTILES)
    return {f"p{which}": float(value) for which, value in zip(PERCENTILES, found, strict=True)}


def latencies_ms(cells: Sequence[Cell]) -> dict[str, dict[str, float] | None]:
    """The percentiles of `queue`, `ttft` and `tpot` over requests and of `itl` over gaps, all cells together."""
    requests = [(request, cell.open_loop) for cell in cells for request in cell.requests]
    paces = [tpot_s(request) for request, _ in requests]
    return {
        "queue": percentiles_ms([queue_s(request) for request, _ in requests]),
        "ttft": percentiles_ms([ttft_s(request, open_loop) for request, open_loop in requests]),
        "tpot": percentiles_ms([pace for pace in paces if pace is not None]),
        "itl": percentiles_ms([gap for request, _ in requests for gap in itl_s(request)]),
    }
