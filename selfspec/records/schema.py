"""The records: plain dataclasses, strict JSON, and the errors for a line that is not one of them.

Shape errors are found here (a missing field, a number where a text should be); what a record must say to be believed is
checked in `selfspec.report.checks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from selfspec.errors import UserError

SCHEMA_VERSION = 1

Key = tuple[str, str, int]  # prompt_id, method, repeat


@dataclass(slots=True)
class RoundRecord:
    """One draft phase, verify pass and commit. `num_emitted` counts the bonus or correction token, after trimming."""

    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_s: float
    verify_s: float
    other_s: float
    source: int = 0  # which part made the draft, where a drafter has several (hybrid: 0 learned, 1 copied)


@dataclass(slots=True)
class PromptRecord:
    """One prompt decoded once by one method. Times are in seconds; `total_s` is prefill and decode together."""

    prompt_id: str
    category: str
    method: str
    repeat: int
    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str  # "eos" | "stop_string" | "length"
    lossy: bool  # the acceptance rule does not keep the target's distribution
    prefill_s: float
    ttft_s: float
    decode_s: float
    total_s: float
    alpha_sum: float | None = None  # sum over tested positions of sum_v min(p, q); None: not measured
    alpha_count: int = 0  # number of positions in `alpha_sum`
    equals_ar: bool | None = None  # token for token; None: not compared
    first_divergence: int | None = None  # index of the first generated token that differs
    divergence_class: str | None = None  # "identical" | "near_tie" | "mismatch"
    synthetic: bool = False  # acceptance was scripted, not earned by a drafter
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    rounds: list[RoundRecord] = field(default_factory=list)  # empty for methods without rounds (plain HF generate)

    @property
    def key(self) -> Key:
        return (self.prompt_id, self.method, self.repeat)


@dataclass(slots=True)
class TraceToken:
    """One token of one round, as the trace page colours it. p and q are the probabilities the rule compared."""

    text: str
    token_id: int
    kind: str  # "accepted" | "rejected" | "correction" | "bonus"
    p: float | None = None
    q: float | None = None


@dataclass(slots=True)
class TraceRound:
    tokens: list[TraceToken]
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(slots=True)
class TraceRecord:
    """One generation, round by round: what `selfspec.report.trace` turns into a page."""

    prompt_id: str
    method: str
    prompt_text: str
    rounds: list[TraceRound]
    times_measured: bool = True  # False: the times are of the traced generation itself, slowed down by tracing


# ---- to and from JSON


def by_method(records: Iterable[PromptRecord]) -> dict[str, list[PromptRecord]]:
    """The records of each method, in the order in which they come."""
    groups: dict[str, list[PromptRecord]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    return groups


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity are refused, floats round-trip exactly."""
    return json.dumps(value, allow_nan=False, indent=indent)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number JSON allows")

    try:
        value = json.loads(data, parse_constant=refuse)
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}); restore the file or measure the run again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} should hold a JSON object, found {type(value).__name__}.")
    return value


def to_lines(record: PromptRecord) -> tuple[bytes, bytes]:
    prompt_id, method, repeat = record.key
    rounds = [[getattr(entry, name) for name in _ROUND_FIELDS] for entry in record.rounds]
    rounds_line = to_json({"prompt_id": prompt_id, "method": method, "repeat": repeat, "rounds": rounds})
    values = {name: getattr(record, name) for name in _PROMPT_FIELDS}
    prompt_line = to_json({"schema_version": SCHEMA_VERSION, **values})
    return rounds_line.encode() + b"\n", prompt_line.encode() + b"\n"


def prompt_from_dict(entry: Mapping[str, Any], where: str) -> PromptRecord:
    check_version(entry.get("schema_version"), where)
    found = set(entry) - {"schema_version"}
    if found != set(_PROMPT_FIELDS):
        wrong = sorted(found.symmetric_difference(_PROMPT_FIELDS))
        raise UserError(f"{where}: missing or unknown fields {wrong}; schema {SCHEMA_VERSION} has {_PROMPT_FIELDS}.")
    for name in _PROMPT_FIELDS:
        _check_type(entry[name], _PROMPT_TYPES[name], f"{where}: {name}")
    return PromptRecord(**{name: entry[name] for name in _PROMPT_FIELDS})


def rounds_from_lists(value: object, where: str) -> list[RoundRecord]:
    if not isinstance(value, list):
        raise UserError(f"{where}: rounds should be a list, found {type(value).__name__}.")
    for entry in value:
        if not isinstance(entry, list) or not _ROUND_REQUIRED <= len(entry) <= len(_ROUND_FIELDS):
            raise UserError(f"{where}: a round should be a list {_ROUND_FIELDS}, found {entry!r}.")
        for name, number in zip(_ROUND_FIELDS, entry, strict=False):
            _check_type(number, _ROUND_TYPES[name], f"{where}: {name}")
    return [RoundRecord(*entry) for entry in value]


def trace_to_dict(trace: TraceRecord) -> dict[str, Any]:
    rounds = [
        {
            "tokens": [[getattr(token, field.name) for field in fields(TraceToken)] for token in entry.tokens],
            "draft_s": entry.draft_s,
            "verify_s": entry.verify_s,
            "other_s": entry.other_s,
        }
        for entry in trace.rounds
    ]
    names = ("prompt_id", "method", "prompt_text", "times_measured")
    return {"schema_version": SCHEMA_VERSION, **{name: getattr(trace, name) for name in names}, "rounds": rounds}


def trace_from_dict(entry: Mapping[str, Any], where: str) -> TraceRecord:
    check_version(entry.get("schema_version"), where)
    try:
        rounds = [
            TraceRound(
                [TraceToken(*token) for token in part["tokens"]], part["draft_s"], part["verify_s"], part["other_s"]
            )
            for part in entry["rounds"]
        ]
        measured = entry.get("times_measured", True)
        return TraceRecord(entry["prompt_id"], entry["method"], entry["prompt_text"], rounds, measured)
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} is not a trace of this schema ({error!r}); write it with `write_traces`.") from None


def key_of(entry: Mapping[str, Any], where: str) -> Key:
    key = (entry.get("prompt_id"), entry.get("method"), entry.get("repeat"))
    for name, value in zip(("prompt_id", "method", "repeat"), key, strict=True):
        _check_type(value, _PROMPT_TYPES[name], f"{where}: {name}")
    return key  # type: ignore[return-value]  # just checked


def show_key(key: Key) -> str:
    return f"prompt {key[0]!r}, method {key[1]!r}, repeat {key[2]}"


def _check_type(value: object, allowed: str, where: str) -> None:
    """`allowed` is the field's annotation, e.g. "float | None"; an int is a fine float, a bool is neither."""
    for name in allowed.split(" | "):
        if name == "None" and value is None:
            return
        if name == "list[int]" and isinstance(value, list) and all(type(item) is int for item in value):
            return
        if name in _SCALARS and type(value) in _SCALARS[name]:
            return
    raise UserError(f"{where} should be {allowed}, found {value!r}.")


def check_version(version: object, where: object) -> None:
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{where} has schema version {version}, this selfspec reads version {SCHEMA_VERSION}; "
            "use the version that wrote it, or measure the run again."
        )


_SCALARS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_ROUND_TYPES = {item.name: str(item.type) for item in fields(RoundRecord)}
_ROUND_FIELDS = list(_ROUND_TYPES)
_ROUND_REQUIRED = _ROUND_FIELDS.index("source")  # runs from before hybrid drafts end here
_PROMPT_TYPES = {item.name: str(item.type) for item in fields(PromptRecord) if item.name != "rounds"}
_PROMPT_FIELDS = list(_PROMPT_TYPES)
