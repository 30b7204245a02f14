"""Serving with many rows: every (method, number of rows) *cell* serves the same load, in one process.

Within one number of rows the methods follow each other directly: a machine that is slower this minute slows what is
compared alike; and from repeat to repeat their order is balanced (`selfspec.measure.order`). Each repeat has a load of
its own, the same for all its cells, so that the spread over repeats holds both the machine's noise and the choice of
requests.

A load is served as a *closed loop* (all requests wait from the start; N rows are kept busy until the queue is empty)
or, with `rate_per_s`, as an *open loop* (requests come in as a Poisson process whether or not a row is free).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from selfspec.config import RESERVED_LABELS, GenerateConfig, at_least
from selfspec.decoding import Decoder, Output
from selfspec.decoding.reach import round_width
from selfspec.drafters import Drafter, NoDraft
from selfspec.errors import UserError
from selfspec.lookahead import Lookahead, build_lookahead
from selfspec.measure.bench import draft_fingerprints, drafter_of, lookahead_of, settings_from
from selfspec.measure.load import LoadRequest, build_lengths, make_load
from selfspec.measure.order import balanced
from selfspec.measure.protocol import AR, WARMUP_PASSES
from selfspec.prompts import prompts_from_config, prompts_hash
from selfspec.records.serving import Cell, CellKey, ServedRequest
from selfspec.target import Target, load_target

NOT_HASHED = ("out", "rows", "repeats")
LOAD = "load_sha256"  # of all repeats, and more of them can be added


@dataclass
class ConcurrencyConfig(GenerateConfig):
    """experiments/concurrency.py. `max_new_tokens` is not used: each request has an output length of its own."""

    drafters: dict[str, Any] = field(default_factory=dict)  # label -> drafter config
    prompts: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 32
    rate_per_s: float | None = None  # null: closed loop
    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    repeats: int = 3
    warmup_tokens: int = 3
    interleave_prefill: bool = True
    out: str = "outputs/concurrency"


@dataclass
class Way:
    """One method: what drafts, and how many tokens (a new policy for every cell, as it may learn)."""

    label: str
    drafter: Drafter | None
    options: dict[str, Any]


@dataclass
class Service:
    """Everything one experiment needs, loaded and checked: the ways of decoding and the load of each repeat."""

    config: ConcurrencyConfig
    target: Target
    ways: list[Way]
    loads: list[list[LoadRequest]]
    fingerprints: dict[str, str]
    decoders: dict[tuple[str, int], Decoder] = field(default_factory=dict)

    def decoder(self, way: Way, num_rows: int) -> Decoder:
        """One per cell, kept: its allocation is made, and its shapes are seen, in the warm-up."""
        key = (way.label, num_rows)
        if key not in self.decoders:
            most = max(len(one.prompt_ids) + one.max_new_tokens for load in self.loads for one in load)
            capacity = most + round_width(way.drafter or NoDraft(), self.policy(way))
            self.decoders[key] = Decoder(self.target, way.drafter, num_rows, capacity, self.config.runtime.cache)
        return self.decoders[key]

    def policy(self, way: Way) -> Lookahead:
        return lookahead_of(way.options, self.config) if way.drafter is not None else build_lookahead(1)


def wanted(config: ConcurrencyConfig) -> set[CellKey]:
    """The cells that the config asks for."""
    labels, repeats = [AR, *config.drafters], range(config.repeats)
    return {(label, num_rows, repeat) for label in labels for num_rows in config.rows for repeat in repeats}


def check(config: ConcurrencyConfig) -> None:
    """UserError for what the config alone shows to be wrong."""
    for name in ("num_requests", "repeats", "warmup_tokens"):
        at_least(name, getattr(config, name), 1)
    if not config.rows or min(config.rows) < 1 or len(set(config.rows)) < len(config.rows):
        raise UserError(f"rows={config.rows} is not possible. Give different numbers, each 1 or more: [1,2,4,8,16].")
    if taken := sorted(set(config.drafters) & set(RESERVED_LABELS)):
        raise UserError(f"The drafter label {taken[0]!r} is taken: AR is measured anyway.")
    for label, options in config.drafters.items():
        if not isinstance(options, dict) or not isinstance(options.get("kind"), str):
            raise UserError(f"drafters.{label} has no kind. To leave a drafter out: ~drafters.{label}")


def assemble(config: ConcurrencyConfig) -> Service:
    """Loads and checks everything. Raises UserError before anything is measured."""
    check(config)
    settings_from(config)
    lengths, prompts = build_lengths(config.lengths), prompts_from_config(config.prompts)
    target = load_target(config.target, config.runtime.dtype, config.runtime.device)
    ways = [Way(AR, None, {})]
    ways += [Way(label, drafter_of(options, target), options) for label, options in config.drafters.items()]
    models = [target, *(model for way in ways if isinstance(model := getattr(way.drafter, "model", None), Target))]
    positions = min(model.max_positions for model in models)  # drafts past them are never kept
    loads = [
        make_load(target, prompts, lengths, config.num_requests, config.rate_per_s, (config.seed, repeat), positions)
        for repeat in range(config.repeats)
    ]
    described = [[one.prompt_ids, one.max_new_tokens, one.arrival_s] for load in loads for one in load]
    fingerprints = {"target": target.fingerprint, "prompts_sha256": prompts_hash(prompts)}
    fingerprints |= {LOAD: _sha256(json.dumps(described))}
    for way in ways[1:]:
        assert way.drafter is not None
        fingerprints |= draft_fingerprints(way.label, way.options, way.drafter)
    return Service(config, target, ways, loads, fingerprints)


def warm_up(service: Service, done: AbstractSet[CellKey]) -> Iterator[str]:
    """A few tokens of the longest and of the shortest prompt in every cell that is still to be measured."""
    config = service.config
    by_length = sorted(service.loads[0], key=lambda one: len(one.prompt_ids))
    ends = [LoadRequest(one.prompt_ids, config.warmup_tokens, 0.0, False) for one in (by_length[-1], by_length[0])]
    for num_rows in config.rows:
        for way in service.ways:
            if all((way.label, num_rows, repeat) in done for repeat in range(config.repeats)):
                continue
            for _ in range(WARMUP_PASSES):
                serve(service, way, num_rows, ends)  # shapes depend on the number of rows, not on how many are busy
            yield f"{way.label}, {num_rows} rows"


def cells(service: Service, done: AbstractSet[CellKey]) -> Iterator[Cell]:
    """Every cell that is not in `done`, as it is finished."""
    for repeat, load in enumerate(service.loads):
        for way, num_rows in cell_order(service.ways, service.config.rows, repeat):
            if (way.label, num_rows, repeat) not in done:
                outputs = serve(service, way, num_rows, load)
                yield Cell(
                    method=way.label,
                    num_rows=num_rows,
                    repeat=repeat,
                    open_loop=service.config.rate_per_s is not None,
                    lossy=any(output.lossy for output in outputs),
                    synthetic=bool(getattr(way.drafter, "synthetic", False)),
                    requests=[served(output) for output in outputs],
                )


def cell_order(ways: Sequence[Way], rows: Sequence[int], repeat: int) -> list[tuple[Way, int]]:
    """All cells: the numbers of rows in balanced order, and within each the methods, whose turns begin one later at
    each number of rows, so that a repeat does not have them all in the same order.
    """
    places = balanced(range(len(rows)), repeat)
    return [(way, rows[place]) for place in places for way in balanced(ways, repeat + place)]


def serve(service: Service, way: Way, num_rows: int, load: Sequence[LoadRequest]) -> list[Output]:
    """One method serves one load on `num_rows` rows."""
    config = service.config
    settings = settings_from(config)
    return service.decoder(way, num_rows).decode(
        [one.prompt_ids for one in load],
        max_new_tokens=[one.max_new_tokens for one in load],
        arrivals_s=[one.arrival_s for one in load],
        lookahead=service.policy(way),
        sampling=settings.sampling,
        acceptance=settings.acceptance,
        ignore_eos=settings.ignore_eos,
        seed=config.seed,
        interleave_prefill=config.interleave_prefill,
    )


def served(output: Output) -> ServedRequest:
    """What is kept of one request."""
    return ServedRequest(
        num_prompt_tokens=output.num_prompt_tokens,
        arrival_s=output.arrival_s,
        admitted_s=output.admitted_s,
        num_drafted=sum(record.num_drafted for record in output.rounds),
        num_accepted=sum(record.num_accepted for record in output.rounds),
        tokens_sha=_sha256(json.dumps(output.token_ids))[:12],
        commit_s=output.commit_s,
        num_emitted=[record.num_emitted for record in output.rounds],
    )


def config_hash(config: ConcurrencyConfig) -> str:
    """sha256 of what a cell measures: not of which cells there are, so that more repeats and rows can be added."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return _sha256(
        json.dumps({str(key): value for key, value in plain.items() if key not in NOT_HASHED}, sort_keys=True)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
