"""The loop: place waiting prompts into idle rows, run a round, hand out what it committed.

Rows are refilled as they finish (continuous batching), so nobody waits for the slowest; and while others decode, a
prompt is run a chunk at a time between their rounds (chunked prefill: Sarathi-Serve, Agrawal et al. 2024), so nobody
waits for the longest. Neither changes a token: a row sees its own slots only. The host reads the device once per round.
"""

from __future__ import annotations

import time
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
from selfspec.lookahead import Lookahead, Observing, Plan, RoundOutcome, Stopping
from selfspec.records import RoundRecord
from selfspec.sampling import raise_for
from selfspec.target.tensor_parallel import told_by_first

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
    """A request in a row. It decodes once all of its prompt but the last token, the first pending one, has been run."""

    request: Request
    output: Output
    num_run: int  # prompt tokens whose keys and values are in the cache
    begin_s: float  # of the call, on the stopwatch's clock
    decode_start_s: float | None = None

    @property
    def decoding(self) -> bool:
        return self.decode_start_s is not None


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
    interleave_prefill: bool = True,
) -> dict[int, Output]:
    """Decode every request, in order of arrival; returns the outputs by request index.

    interleave_prefill: between two rounds each row runs at most one chunk of its prompt; else all of it.
    """
    waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
    running, outputs = dict[int, Running](), dict[int, Output]()
    stopping = lookahead if isinstance(lookahead, Stopping) else None
    if stopping is not None:
        stopping.start(rows.device)
    rounds = choose_rounds(drafter, rows, sampler, mode, stopping)
    stopwatch = Stopwatch(rows.device, wait=rounds.lag == 0)
    in_flight: deque[tuple[Read, Plan, dict[int, Running]]] = deque()
    num_undrafted = 0  # rounds since the last draft
    begin_s = stopwatch.now()
    while waiting or running:
        if not running:
            time.sleep(max(0.0, begin_s + waiting[0].arrival_s - stopwatch.now()))
        for row in range(rows.num_rows):
            if row not in running and waiting and may_come_in(waiting[0], rows, stopwatch.now() - begin_s):
                running[row] = admit(rows, row, waiting.popleft(), sampler, stopwatch, begin_s, reuse)
            if row in running and not running[row].decoding:
                one_chunk = interleave_prefill and any(one.decoding for one in running.values())
                run_prompt(drafter, rows, row, running[row], stopwatch, one_chunk)
        decoding = {row: one for row, one in running.items() if one.decoding}
        if not decoding:
            continue
        stopwatch.start()
        plan = Plan(0) if drafter.max_drafted == 0 else lookahead.choose()
        rows.reserve(plan.width, rounds.lag)
        in_flight.append((rounds(plan.after(num_undrafted, rows.cache.num_slots), stopwatch), plan, decoding))
        num_undrafted = 0 if plan.num_drafted else num_undrafted + 1
        if len(in_flight) <= rounds.lag:
            continue
        read, plan, occupants = in_flight.popleft()
        lines = read()
        stopwatch.mark("other")
        # one that finished in a round that was read meanwhile has no part in this one
        reports = {row: RoundReport.parse(lines[row]) for row, one in occupants.items() if running.get(row) is one}
        if isinstance(lookahead, Observing) and drafter.max_drafted != 0:
            seconds = told_by_first(phase_seconds(stopwatch), rows.target.ranks)
            lookahead.observe(outcome_of(plan, list(reports.values()), seconds))
        for row, report in reports.items():
            if hand_out(rows, row, occupants[row], report, sampler, stop, stopwatch, on_round):
                outputs[occupants[row].request.index] = running.pop(row).output
                rows.release(row)
    return outputs


def outcome_of(plan: Plan, reports: list[RoundReport], seconds: tuple[float, float, float]) -> RoundOutcome:
    """What the policy is told of a round."""
    return RoundOutcome(
        plan,
        [report.num_drafted for report in reports],
        [report.num_accepted for report in reports],
        [report.num_emitted for report in reports],
        *seconds,
    )


def phase_seconds(stopwatch: Stopwatch) -> tuple[float, float, float]:
    """Draft, verify and other time of the last round; one captured whole has no parts: all its time is in `other`."""
    seconds = stopwatch.seconds
    return seconds.get("draft", 0.0), seconds.get("verify", 0.0), seconds["other"]


def may_come_in(request: Request, rows: Rows, now_s: float) -> bool:
    """It has arrived, and the cache has room for all it may become."""
    return request.arrival_s <= now_s and rows.fits(request.prompt_ids, request.max_new_tokens)


def admit(
    rows: Rows, row: int, request: Request, sampler: Sampler, stopwatch: Stopwatch, begin_s: float, reuse: bool
) -> Running:
    """Put a request into an idle row. The row takes no part in rounds until its prompt has been run."""
    output = Output([], "", "", sampler.rule.lossy, num_prompt_tokens=len(request.prompt_ids))
    output.arrival_s, output.admitted_s = request.arrival_s, stopwatch.now() - begin_s
    output.num_reused_tokens = rows.place(row, request.prompt_ids, request.max_new_tokens, request.noise_id, reuse)
    rows.pause(row)
    return Running(request, output, output.num_reused_tokens, begin_s)


def run_prompt(drafter: Drafter, rows: Rows, row: int, running: Running, stopwatch: Stopwatch, one_chunk: bool) -> None:
    """The next chunk of a row's prompt, or all that is left of it; after the last one the row decodes."""
    end = len(running.request.prompt_ids) - 1
    stop = min(running.num_run + rows.chunks.between_rounds, end) if one_chunk else end
    prefill(rows.target, drafter, rows, row, running.num_run, stop)
    running.num_run = stop
    if stop == end:
        rows.resume(row)
        rows.publish(row)
        running.decode_start_s = stopwatch.settled()  # the prompt's time is not the first round's
        running.output.prefill_s = running.decode_start_s - running.begin_s - running.output.admitted_s


def hand_out(
    rows: Rows,
    row: int,
    running: Running,
    report: RoundReport,
    sampler: Sampler,
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
        if sampler.guard is not None:
            sampler.guard.raise_for(request.index, [*request.prompt_ids, *output.token_ids])
        raise_for(report.error, row=request.index, position=len(request.prompt_ids) + num_before)
    if not report.error:
        output.alpha_sum += report.alpha_sum
        output.alpha_count += report.alpha_count
    if cut is not None:
        del output.token_ids[cut:]
        num_emitted = cut - num_before
    record = RoundRecord(report.num_drafted, report.num_accepted, num_emitted, *phase_seconds(stopwatch), report.source)
    output.rounds.append(record)
    assert running.decode_start_s is not None, "only rows that decode take part in rounds"
    now_s = stopwatch.now()
    output.commit_s.append(now_s - running.begin_s)
    elapsed_s = now_s - running.decode_start_s
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
