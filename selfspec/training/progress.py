"""Watching a training run: a progress bar on a terminal, one plain line per report anywhere else (files, pipes, CI)."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingDisplay:
    """Call it with the records of `train_draft`. As a context manager, so that the bar is closed on errors, too."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} answer tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=steps, loss=float("nan"), speed=0.0)

    def __enter__(self) -> TrainingDisplay:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        if self.console.is_terminal and "loss" in record:
            speed = record.get("answer_tokens_per_s", 0.0)
            self.bar.update(self.task, completed=record["step"], loss=record["loss"], speed=speed)
            return
        line = f"{time.strftime('%H:%M:%S')}  {'  '.join(f'{name} {text}' for name, text in _facts(record))}"
        self.console.print(line, soft_wrap=True, markup=False)


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, _short(value)) for name, value in record.items() if not isinstance(value, dict)]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "/".join("–" if part is None else f"{part:.3f}" for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
