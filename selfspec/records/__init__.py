"""What a run leaves behind: its records (`schema`) and the directory that keeps them (`rundir`, `writer`, `folder`).

No torch.
"""

from __future__ import annotations

from selfspec.records.folder import take_lock, wait_for_lock, writable
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
    "take_lock",
    "to_json",
    "wait_for_lock",
    "writable",
    "write_atomic",
    "write_traces",
]
