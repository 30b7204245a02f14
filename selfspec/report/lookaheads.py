"""Which rows of a run are one drafter with different lookaheads, read off the run's config.

Two methods belong together when their drafters' options are the same but for the lookahead. The group is called by what
its labels share (`eagle3` for eagle3_k1, eagle3_gain; `eagle3` itself may be one of them), a method by the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from selfspec.records import PromptRecord, by_method, to_json
from selfspec.report.runs import Measured
from selfspec.report.tables import method_name


@dataclass(frozen=True)
class Looked:
    """One method: its label in the run, what sets it apart in its group, and its lookahead as a mapping with `kind`."""

    label: str
    policy: str
    lookahead: Mapping[str, Any]
    stats: Mapping[str, Any]
    records: Sequence[PromptRecord]

    @property
    def fixed(self) -> int | None:
        """K, where it is the same in every round and a chain."""
        return int(self.lookahead["num_drafted"]) if self.lookahead["kind"] == "fixed" else None

    @property
    def is_tree(self) -> bool:
        return "tree" in str(self.lookahead["kind"])

    @property
    def longest(self) -> int:
        """The most that was drafted in a round."""
        return max((entry.num_drafted for record in self.records for entry in record.rounds), default=0)


@dataclass(frozen=True)
class Group:
    """One drafter of one run with everything it was measured with."""

    name: str
    run: Measured
    options: Mapping[str, Any]
    methods: list[Looked]

    @property
    def by_k(self) -> dict[int, Looked]:
        """The fixed lookaheads, shortest first."""
        found = {method.fixed: method for method in self.methods if method.fixed is not None}
        return dict(sorted(found.items()))

    @property
    def marks(self) -> str:
        """Those of all its methods (`tables.method_name`); "" for most."""
        found = "".join(method_name("", one.stats) for one in self.methods)
        return "".join(dict.fromkeys(found))

    @property
    def best_fixed(self) -> Looked | None:
        """The fixed lookahead of the highest paired speedup, in hindsight."""
        timed = [one for one in self.by_k.values() if one.stats["speedup_paired_geomean"] is not None]
        return max(timed, key=lambda one: float(one.stats["speedup_paired_geomean"]), default=None)


def groups_of(item: Measured) -> list[Group]:
    """The drafters of a run, in the order of its config; empty for a run whose config names none."""
    config = item.run.config
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for label, drafter in (config.get("drafters") or {}).items():
        if label in item.summary["methods"] and isinstance(drafter, Mapping):
            options = {name: value for name, value in drafter.items() if name not in ("lookahead", "label")}
            found.setdefault(to_json(options), []).append((label, drafter))
    records = by_method(item.run.prompts)
    groups = []
    for members in found.values():
        labels = [label for label, _ in members]
        name = shared_name(labels)
        if len(members) == 1 and isinstance(own := members[0][1].get("lookahead"), Mapping):
            name = name.removesuffix(f"_{own.get('kind')}")
        methods = []
        for label, drafter in members:
            lookahead = as_mapping(drafter.get("lookahead") or config.get("lookahead"))
            policy = label[len(name) :].strip("_") or str(lookahead["kind"])
            if lookahead["kind"] == "fixed":
                policy = f"K = {lookahead['num_drafted']}"
            methods.append(Looked(label, policy, lookahead, item.summary["methods"][label], records[label]))
        groups.append(Group(name, item, members[0][1], methods))
    return groups


def shared_name(labels: Sequence[str]) -> str:
    """The words (between underscores) that all labels begin with; all of the labels where they share none."""
    words = zip(*(label.split("_") for label in labels), strict=False)
    return "_".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, words)) or "/".join(labels)


def as_mapping(lookahead: object) -> Mapping[str, Any]:
    """What a config gives as lookahead: a mapping, a number K, or nothing, which is K = 4."""
    if not isinstance(lookahead, Mapping):
        lookahead = {"num_drafted": int(str(lookahead))} if lookahead else {}
    fixed = lookahead.get("kind", "fixed") == "fixed"
    return {"kind": "fixed", "num_drafted": 4, **lookahead} if fixed else lookahead
