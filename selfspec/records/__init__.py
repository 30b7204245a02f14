"""What a run leaves behind: its records (`schema`) and the directory that keeps them (`rundir`). No torch."""

from __future__ import annotations

from selfspec.records.rundir import Run, RunWriter, read_run, read_traces, write_atomic, write_traces
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
