"""The loop: place waiting prompts into idle rows, run a round, hand out what it committed.

Rows are refilled as they finish (continuous batching), so nobody waits for the slowest. The host reads the device
once per round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from selfspec.decoding.graphs import Read, choose_rounds
from selfspec.decoding.requests import Output, Request
from selfspec.decoding.round import prefill
from selfspec.decoding.rows import HIT_EOS, HIT_LENGTH, RUNNING, RoundReport, Rows
from selfspec.decoding.sampler import Sampler
from selfspec.decoding.stopping import Stop
from selfspec.decoding.stopwatch import Stopwatch
from selfspec.drafters import Drafter
from selfspec.lookahead import Lookahead
from selfspec.records import RoundRecord
from selfspec.sampling import raise_for

REASONS = {HIT_EOS: "eos", HIT_LENGTH: "length"}


@dataclass(frozen=True)
class RoundEvent:
    """One round of one row, for those who watch: what was drafted, and what came of it."""

    request: Request
    drafted_ids: list[int]
    emitted_ids: list[int]
    record: RoundRecord


@dataclass
class Running:
    """A request in a row."""

    request: Request
    output: Output
    decode_start_s: float = 0.0


@torch.inference_mode()
def run_requests(
    drafter: Drafter,
    rows: Rows,
    lookahead: Lookahead,
    sampler: Sampler,
    stop: Stop,
    requests: Iterable[Request],
    on_round: Callable[[RoundEvent], None] | None = None,
    reuse: bool = False,
    mode: str = "auto",
) -> dict[int, Output]:
    """Decode every request; returns the outputs by request index."""
    waiting, running, outputs = deque(requests), dict[int, Running](), dict[int, Output]()
    rounds = choose_rounds(drafter, rows, sampler, mode)
    stopwatch = Stopwatch(rows.device, wait=rounds.lag == 0)
    in_flight: deque[tuple[Read, dict[int, Running]]] = deque()
    while waiting or running:
        for row in range(rows.num_rows):
            if row not in running and waiting and rows.fits(waiting[0].prompt_ids, waiting[0].max_new_tokens):
                running[row] = admit(drafter, rows, row, waiting.popleft(), sampler, stopwatch, reuse)
        stopwatch.start()
        num_drafted = 0 if drafter.max_drafted == 0 else lookahead.choose()
        rows.reserve(num_drafted + 1, rounds.lag)
        in_flight.append((rounds(num_drafted, stopwatch), dict(running)))
        if len(in_flight) <= rounds.lag:
            continue
        read, occupants = in_flight.popleft()
        report = read()
        stopwatch.mark("other")
        for row, occupant in occupants.items():
            if running.get(row) is not occupant:
                continue  # finished in a round that was read meanwhile
            if hand_out(rows, row, occupant, RoundReport.parse(report[row]), stop, stopwatch, on_round):
                outputs[occupant.request.index] = running.pop(row).output
                rows.release(row)
    return outputs


def admit(
    drafter: Drafter, rows: Rows, row: int, request: Request, sampler: Sampler, stopwatch: Stopwatch, reuse: bool
) -> Running:
    """Prefill a prompt into an idle row, except its last token: that is the first pending one."""
    output = Output([], "", "", sampler.rule.lossy, num_prompt_tokens=len(request.prompt_ids))
    start_s = stopwatch.start()
    kept = rows.place(row, request.prompt_ids, request.max_new_tokens, request.noise_id, reuse)
    prefill(rows.target, drafter, rows, row, kept, len(request.prompt_ids) - 1)
    rows.publish(row)
    output.num_reused_tokens = kept
    decode_start_s = stopwatch.mark("prefill")
    output.prefill_s = decode_start_s - start_s
    return Running(request, output, decode_start_s)


def hand_out(
    rows: Rows,
    row: int,
    running: Running,
    report: RoundReport,
    stop: Stop,
    stopwatch: Stopwatch,
    on_round: Callable[[RoundEvent], None] | None,
) -> bool:
    """Append what a round committed to its request's output; True when the request is finished."""
    request, output = running.request, running.output
    num_before = len(output.token_ids)
    rows.advance(row, report.emitted_ids)
    output.token_ids += report.emitted_ids[: report.num_sound]
    num_emitted = report.num_emitted
    cut = stop.cut(request.index, output.token_ids, num_before)
    if cut is None and report.num_sound < num_emitted:
        raise_for(report.error, row=request.index, position=len(request.prompt_ids) + num_before)
    if not report.error:
        output.alpha_sum += report.alpha_sum
        output.alpha_count += report.alpha_count
    if cut is not None:
        del output.token_ids[cut:]
        num_emitted = cut - num_before
    seconds = stopwatch.seconds
    # a round captured whole has no parts: all its time is in `other`
    times = (seconds.get("draft", 0.0), seconds.get("verify", 0.0), seconds["other"])
    record = RoundRecord(report.num_drafted, report.num_accepted, num_emitted, *times)
    output.rounds.append(record)
    elapsed_s = stopwatch.now() - running.decode_start_s
    if num_before == 0:
        output.ttft_s = output.prefill_s + elapsed_s
    finished = cut is not None or report.state != RUNNING
    if finished:
        output.finish_reason = "stop_string" if cut is not None else REASONS[report.state]
        output.text = stop.text(output.token_ids, stopped=cut is not None)
        output.decode_s = elapsed_s
    if on_round is not None:
        on_round(RoundEvent(request, report.drafted_ids, output.token_ids[num_before:], record))
    return finished
