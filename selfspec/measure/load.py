"""A load: requests with realistic lengths that arrive over time, the same for every method that serves them.

Prompt and output lengths vary by an order of magnitude in any real queue, and that decides how rows fill, how long
prompts stall others, and how many rows idle at the end. They come from two log-normal distributions,

    length = median · exp(sigma · z),  z ~ N(0, 1),  mean = median · exp(sigma² / 2),

or from a file with one request per line (a trace). Prompts are real text cut to the drawn length: random tokens would
make drafts look worse, and repetition better, than they are.

Cost: the tokenizer over the drawn text, once per repeat.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from selfspec.config import allowed
from selfspec.decoding.requests import encode_prompt
from selfspec.errors import UserError
from selfspec.prompts import Prompt
from selfspec.target import Target

FILE_FORMAT = (
    'Each request is a line {"prompt_tokens": 120, "output_tokens": 64} of a .jsonl file, or a row of a .csv file '
    "whose header has these two names; lengths.prompt_column and lengths.output_column choose others."
)


@dataclass(frozen=True)
class Length:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load: what `Decoder.decode` takes of it."""

    prompt_ids: list[int]
    max_new_tokens: int
    arrival_s: float
    shortened: bool  # it would not have fitted into the model's positions


class Lengths(Protocol):
    def draw(self, num_requests: int, seed: Sequence[int]) -> list[Length]:
        """As many lengths as are asked for, the same for the same seed."""


@dataclass(frozen=True)
class LogNormal:
    """Prompt and output lengths, drawn independently of each other and cut to [min, max]."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    prompt_max: int
    output_max: int
    prompt_min: int = 1
    output_min: int = 1

    def __post_init__(self) -> None:
        for side in ("prompt", "output"):
            median, sigma = getattr(self, f"{side}_median"), getattr(self, f"{side}_sigma")
            least, most = getattr(self, f"{side}_min"), getattr(self, f"{side}_max")
            if not 1 <= median < math.inf:
                raise UserError(f"lengths.{side}_median={median} is not possible: allowed is 1 or more.")
            if not 0 <= sigma <= 5:
                raise UserError(f"lengths.{side}_sigma={sigma} is not possible: allowed is 0 (all equal) to 5.")
            if not 1 <= least <= most:
                raise UserError(
                    f"lengths.{side}_min={least} and {side}_max={most}: allowed is 1 <= {side}_min <= {side}_max."
                )

    def draw(self, num_requests: int, seed: Sequence[int]) -> list[Length]:
        z_N2 = np.random.default_rng([*seed, 0]).standard_normal((num_requests, 2))
        prompts = self.prompt_median * np.exp(self.prompt_sigma * z_N2[:, 0])
        outputs = self.output_median * np.exp(self.output_sigma * z_N2[:, 1])
        prompts = np.clip(np.rint(prompts), self.prompt_min, self.prompt_max)
        outputs = np.clip(np.rint(outputs), self.output_min, self.output_max)
        return [Length(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


@dataclass(frozen=True)
class FromFile:
    """The first lengths of a trace, in its order; the seed changes nothing."""

    path: str
    prompt_column: str = "prompt_tokens"
    output_column: str = "output_tokens"

    def draw(self, num_requests: int, seed: Sequence[int]) -> list[Length]:
        lengths = read_lengths(self.path, self.prompt_column, self.output_column)
        if len(lengths) < num_requests:
            raise UserError(
                f"lengths: {self.path} holds {len(lengths)} requests; num_requests={num_requests}. Ask for fewer."
            )
        return lengths[:num_requests]


KINDS: dict[str, type] = {"lognormal": LogNormal, "file": FromFile}


def build_lengths(options: Mapping[str, Any]) -> Lengths:
    """What a conf/lengths file asks for. UserError for an unknown kind, an unknown option or an impossible value."""
    kind = options.get("kind")
    if kind not in KINDS:
        raise UserError(f"lengths.kind={kind!r} is unknown. {allowed(str(kind), KINDS)}")
    given = {str(name): value for name, value in options.items() if name != "kind"}
    known = {item.name: item for item in fields(KINDS[kind])}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"lengths.{unknown[0]} is unknown for kind={kind}. {allowed(unknown[0], known)}")
    for name, value in given.items():
        wanted = str(known[name].type)
        fits = isinstance(value, str) if wanted == "str" else isinstance(value, int) or wanted == type(value).__name__
        if isinstance(value, bool) or not fits:
            raise UserError(f"lengths.{name}={value!r} is not possible: it should be {wanted}.")
    try:
        return KINDS[kind](**given)
    except TypeError as error:
        raise UserError(f"lengths (kind={kind}) is not complete: {error}.") from error


def read_lengths(path: str | Path, prompt_column: str, output_column: str) -> list[Length]:
    """Lengths from a .jsonl or .csv file. UserError naming the line for whatever is not two whole numbers above 0."""
    file = Path(path).expanduser()
    if file.suffix not in (".jsonl", ".csv"):
        raise UserError(f"lengths: {file} is neither a .jsonl nor a .csv file. {FILE_FORMAT}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"lengths: cannot read {file}: {reason}. {FILE_FORMAT}") from error
    rows = _csv_rows(text) if file.suffix == ".csv" else _json_rows(text, file)
    lengths = []
    for number, row in rows:
        counts = []
        for column in (prompt_column, output_column):
            if column not in row:
                has = ", ".join(map(str, row)) or "nothing"
                raise UserError(f"lengths: {file}, line {number} has no {column!r}; it has: {has}. {FILE_FORMAT}")
            counts.append(_count(row[column], f"{file}, line {number}: {column}"))
        lengths.append(Length(*counts))
    if not lengths:
        raise UserError(f"lengths: {file} holds no request. {FILE_FORMAT}")
    return lengths


def _csv_rows(text: str) -> list[tuple[int, Mapping[str, object]]]:
    reader = csv.DictReader(io.StringIO(text))
    return [(reader.line_num, {key: value for key, value in row.items() if value is not None}) for row in reader]


def _json_rows(text: str, file: Path) -> list[tuple[int, Mapping[str, object]]]:
    rows: list[tuple[int, Mapping[str, object]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"lengths: {file}, line {number} is not JSON ({error.msg}). {FILE_FORMAT}") from error
        if not isinstance(row, dict):
            raise UserError(f"lengths: {file}, line {number} is a {type(row).__name__}, not an object. {FILE_FORMAT}")
        rows.append((number, row))
    return rows


def _count(value: object, where: str) -> int:
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"lengths: {where}={value!r} is not a whole number above 0. {FILE_FORMAT}")
    return count


def arrivals(num_requests: int, rate_per_s: float | None, seed: Sequence[int]) -> list[float]:
    """Seconds at which requests come in: all at 0, or a Poisson process of `rate_per_s` (first gap included)."""
    if rate_per_s is None:
        return [0.0] * num_requests
    if not 0 < rate_per_s < math.inf:
        raise UserError(
            f"rate_per_s={rate_per_s} is not possible: allowed is a number above 0, or null for all at once."
        )
    gaps_s = np.random.default_rng([*seed, 1]).exponential(1.0 / rate_per_s, num_requests)
    return [float(arrival_s) for arrival_s in np.cumsum(gaps_s)]


def make_load(
    target: Target,
    prompts: Sequence[Prompt],
    lengths: Lengths,
    num_requests: int,
    rate_per_s: float | None,
    seed: Sequence[int],
    positions: int,
) -> list[LoadRequest]:
    """`num_requests` requests of at most `positions` tokens each, prompt and output together.

    Where prompt and output do not fit, the output keeps its length as long as it leaves room for one prompt token. A
    prompt may be a few tokens off the drawn length: a chat template has a length of its own.
    """
    text = PromptText(target, prompts)
    first = int(np.random.default_rng([*seed, 2]).integers(len(prompts)))
    load = []
    drawn = lengths.draw(num_requests, seed)
    for index, (length, arrival_s) in enumerate(zip(drawn, arrivals(num_requests, rate_per_s, seed), strict=True)):
        num_output = min(length.output_tokens, positions - 1)
        num_prompt = min(length.prompt_tokens, positions - num_output)
        prompt_ids = text.of_length(first + index, num_prompt)
        num_output = max(1, min(num_output, positions - len(prompt_ids)))
        shortened = num_prompt < length.prompt_tokens or num_output < length.output_tokens
        load.append(LoadRequest(prompt_ids, num_output, arrival_s, shortened))
    return load


class PromptText:
    """Prompts of a wanted length: user turns of a prompt set, joined, cut at the front, and put into the chat template.

    Cut at the front, so that each ends where its last turn ends: with something to answer.
    """

    def __init__(self, target: Target, prompts: Sequence[Prompt]) -> None:
        self.target = target
        self.turns = [turn for prompt in prompts for turn in prompt.turns]
        self.is_chat = bool(getattr(target.tokenizer, "chat_template", None))
        self.num_frame = len(encode_prompt(target, [{"role": "user", "content": ""}])) if self.is_chat else 0

    def of_length(self, last_turn: int, num_tokens: int) -> list[int]:
        """About `num_tokens` token ids (exactly, without a chat template), ending with turn `last_turn`."""
        wanted = max(num_tokens - self.num_frame, 1)
        text = self.turns[last_turn % len(self.turns)]
        while len(ids := encode_prompt(self.target, text)) < wanted:
            last_turn -= 1
            text = f"{self.turns[last_turn % len(self.turns)]}\n\n{text}"
        if not self.is_chat:
            return ids[-wanted:]
        assert self.target.tokenizer is not None
        content = self.target.tokenizer.decode(ids[-wanted:], skip_special_tokens=True)
        return encode_prompt(self.target, [{"role": "user", "content": content}])
