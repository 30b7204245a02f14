"""Reads what wandb wrote offline: its log container here, its records with wandb's own protobuf classes.

The container is LevelDB's log format (blocks of 32 KiB; chunks of checksum, length, type) behind a header of 7 bytes.
wandb ships no reader for it in Python any more; `wandb sync` uses the one in its Go binary.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

BLOCK_BYTES = 32768
CHUNK_HEADER = struct.Struct("<IHB")  # masked checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """An offline run's content: config, history rows in order, summary, and the run's names."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)  # metric or glob -> its step metric
    exit_code: int | None = None
    kinds: set[str] = field(default_factory=set)

    def rows(self, prefix: str) -> list[dict[str, Any]]:
        """History rows under a prefix, their keys without it."""
        rows = [
            {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            for row in self.history
        ]
        return [row for row in rows if row]


def read_offline_run(run_dir: Path) -> OfflineRun:
    """The only offline run under `<run_dir>/wandb`, once wandb's process has written it to the end."""
    wandb.teardown()
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    result = OfflineRun()
    for payload in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        result.kinds.add(kind)
        if kind == "run":
            result.run = record.run
            result.config.update(_values(record.run.config.update))
        elif kind == "config":
            result.config.update(_values(record.config.update))
        elif kind == "history":
            result.history.append(_values(record.history.item))
        elif kind == "summary":
            result.summary.update(_values(record.summary.update))
        elif kind == "metric":
            result.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            result.exit_code = record.exit.exit_code
    return result


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _payloads(data: bytes) -> Iterator[bytes]:
    identifier, _magic, _version = struct.unpack_from("<4sHB", data)
    assert identifier == b":W&B"
    position, parts = 7, []
    while position + CHUNK_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER.size:
            position += left_in_block
            continue
        _checksum, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size
        parts.append(data[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
        else:
            assert kind in (FIRST, MIDDLE)
