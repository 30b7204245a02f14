"""What a run leaves behind: its records (`schema`) and the directory that keeps them (`rundir`, `writer`). No torch."""

from __future__ import annotations

from selfspec.records.rundir import Run, read_run, read_traces
from selfspec.records.schema import (
    SCHEMA_VERSION,
    Key,
    PromptRecord,
    RoundRecord,
    TraceRecord,
    TraceRound,
    TraceToken,
    by_method,
    to_json,
)
from selfspec.records.writer import RunWriter, write_atomic, write_traces

__all__ = [
    "SCHEMA_VERSION",
    "Key",
    "PromptRecord",
    "RoundRecord",
    "Run",
    "RunWriter",
    "TraceRecord",
    "TraceRound",
    "TraceToken",
    "by_method",
    "read_run",
    "read_traces",
    "to_json",
    "write_atomic",
    "write_traces",
]
