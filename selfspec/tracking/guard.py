"""Keeps a run safe from its tracker: a tracker that raises or hangs costs one warning and a few seconds, never the run.

The guarded tracker runs in one thread of its own. `log_round` and `log` only queue; `log_prompt`, which a run calls
between timed sections, waits until the queue is empty, so that no tracker works while a clock runs. The wait is
bounded: after `patience_s` the tracker is given up for the rest of the run. What it missed is in the run directory,
and `experiments/mirror.py` sends it later. `summary` and `keep` come when nothing is timed any more: they are queued,
and `finish` waits for them.
Cost: about 2 microseconds per queued call, and at each `log_prompt` the time that the tracker itself takes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.provenance import redact_text
from selfspec.records import PromptRecord, RoundRecord
from selfspec.tracking.base import Tracker

logger = logging.getLogger("selfspec.tracking")

PATIENCE_S = 15.0
START_PATIENCE_S = 60.0
FINISH_PATIENCE_S = 150.0


class GuardedTracker:
    """The same calls as the tracker inside, none of which raises or waits longer than its patience."""

    def __init__(
        self,
        inner: Tracker,
        *,
        name: str,
        patience_s: float | None = None,
        start_patience_s: float | None = None,
        finish_patience_s: float | None = None,
    ) -> None:
        self._inner = inner
        self._name = name
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._start_patience_s = START_PATIENCE_S if start_patience_s is None else start_patience_s
        self._finish_patience_s = FINISH_PATIENCE_S if finish_patience_s is None else finish_patience_s
        self._given_up = threading.Event()
        self._warned = threading.Lock()  # taken once, by whoever warns
        self._calls: queue.SimpleQueue[Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def start(
        self, config: Mapping[str, Any], *, run_name: str, group: str, job_type: str, run_dir: Path, config_hash: str
    ) -> None:
        self._worker = threading.Thread(target=self._work, name=f"selfspec-{self._name}", daemon=True)
        self._worker.start()
        self._queue(
            lambda: self._inner.start(
                config, run_name=run_name, group=group, job_type=job_type, run_dir=run_dir, config_hash=config_hash
            )
        )
        self._wait(self._start_patience_s)

    def log_round(self, record: RoundRecord, *, method: str, prompt_id: str, repeat: int) -> None:
        self._queue(lambda: self._inner.log_round(record, method=method, prompt_id=prompt_id, repeat=repeat))

    def log_prompt(self, record: PromptRecord) -> None:
        self._queue(lambda: self._inner.log_prompt(record))
        self._wait(self._patience_s)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        copied = dict(metrics)
        self._queue(lambda: self._inner.log(copied, step=step))

    def summary(self, values: Mapping[str, Any]) -> None:
        copied = dict(values)
        self._queue(lambda: self._inner.summary(copied))

    def keep(self, kind: str, name: str, paths: Sequence[Path]) -> None:
        copied = list(paths)
        self._queue(lambda: self._inner.keep(kind, name, copied))

    def finish(self, exit_code: int = 0) -> None:
        self._queue(lambda: self._inner.finish(exit_code))
        self._wait(self._finish_patience_s)
        self._calls.put(None)
        self._given_up.set()

    def _queue(self, call: Callable[[], None]) -> None:
        if self._worker is not None and not self._given_up.is_set():
            self._calls.put(call)

    def _wait(self, patience_s: float) -> None:
        """Until everything queued so far has been done, or patience ends."""
        if self._worker is None or self._given_up.is_set():
            return
        reached = threading.Event()
        self._calls.put(reached)
        if not reached.wait(patience_s):
            self._give_up(f"did not answer within {patience_s:g} s")

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not self._given_up.is_set():
                try:
                    item()
                except Exception as error:  # whatever a tracker raises: the measurement does not depend on it
                    self._give_up(f"raised {type(error).__name__}: {error}")

    def _give_up(self, problem: str) -> None:
        self._given_up.set()
        if self._warned.acquire(blocking=False):
            message = redact_text(" ".join(problem.split()))[:300]
            logger.warning(
                "Tracking with %s stopped: it %s. The run goes on; its directory has it all.", self._name, message
            )
