"""The grid that is tuned over: every drafter with every value of its swept options, each with every lookahead.

A variant is a drafter with its options settled (exit layer, d_vocab, ...); a candidate is a variant with a lookahead: a
chain of K, a tree of n nodes, or a policy. Trees of one size differ in depth; each is `best_shape`'s for the draft's
accuracies by rank. Nothing is loaded or run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from omegaconf import OmegaConf

from selfspec.config import allowed, conf_names, load_conf
from selfspec.errors import UserError
from selfspec.lookahead import build_lookahead
from selfspec.lookahead.tree_shape import TreeShape, best_shape

LOOKAHEAD_KEYS = ("num_drafted", "tree_nodes", "policies")
ADAPTIVE = ("adaptive_threshold", "bandit", "confidence", "entropy", "expected_gain", "heuristic")  # over chains
DYNAMIC = "dynamic_tree"  # of `num_nodes` nodes, its shape by the draft's confidence


@dataclass
class Grid:
    """What is tried with every drafter. tree_nodes: sizes, the root included. policies: conf/lookahead names or
    mappings with `kind`, kept within the longest chain of `num_drafted`.
    """

    num_drafted: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    tree_nodes: list[int] = field(default_factory=list)
    policies: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """A drafter with its options settled, and the lookaheads to try with it."""

    label: str
    drafter: str  # the label it was given under
    options: dict[str, Any]
    num_drafted: tuple[int, ...]  # ascending
    tree_nodes: tuple[int, ...] = ()
    policies: tuple[Any, ...] = ()

    @property
    def most_verified(self) -> int:
        """Positions of its widest verify pass."""
        policies: list[Any] = [build_lookahead(one) for one in self.policies if one["kind"] == DYNAMIC]
        return max(self.num_drafted[-1] + 1, *self.tree_nodes, *(one.num_nodes for one in policies), 1)

    def run_as(self, lookahead: Mapping[str, Any]) -> dict[str, Any]:
        """A drafter of a comparison's config."""
        return {**self.options, "lookahead": dict(lookahead)}


@dataclass(frozen=True)
class Candidate:
    """One point of the grid. `most`: the longest chain, or deepest path, that its lookahead can ask for."""

    label: str
    variant: Variant
    lookahead: dict[str, Any]
    most: int
    shape: TreeShape | None = None

    def run_as(self) -> dict[str, Any]:
        return self.variant.run_as(self.lookahead)


def variants_of(label: str, given: Mapping[str, Any], grid: Grid) -> list[Variant]:
    """Every combination of the values in `sweep`, a mapping beside the drafter's options: option -> list of values.
    `num_drafted`, `tree_nodes` and `policies` in it stand for the grid's.

    Raises UserError for a grid without a chain, an empty list, or numbers that are none.
    """
    options = {str(key): value for key, value in given.items() if key != "sweep"}
    sweep = given.get("sweep") or {}
    if not isinstance(sweep, Mapping):
        raise UserError(f"candidates.{label}.sweep={sweep!r}: give a mapping, option -> list of values.")
    if "lookahead" in options:
        raise UserError(
            f"candidates.{label}.lookahead: the lookahead is what is tuned. Give candidates.{label}.sweep.num_drafted, "
            "tree_nodes or policies instead."
        )
    for key, values in sweep.items():
        if not isinstance(values, list) or (not values and key not in ("tree_nodes", "policies")):
            raise UserError(f"candidates.{label}.sweep.{key}={values!r}: give a list with one value or more.")
    own = {key: sweep.get(key, getattr(grid, key)) for key in LOOKAHEAD_KEYS}
    chains = _whole_numbers(f"the grid of {label}: num_drafted", own["num_drafted"], 1)
    if not chains:
        raise UserError(
            f"the grid of {label} is empty: grid.num_drafted needs one K or more; costs are measured there."
        )
    trees = _whole_numbers(f"the grid of {label}: tree_nodes", own["tree_nodes"], 2)
    policies = tuple(_policy(label, policy) for policy in own["policies"])
    swept = {key: values for key, values in sweep.items() if key not in LOOKAHEAD_KEYS}
    found = []
    for values in product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        suffix = "".join(f"-{key}_{_shown(value)}" for key, value in chosen.items())
        found.append(Variant(f"{label}{suffix}", label, {**options, **chosen}, chains, trees, policies))
    return found


def candidates_of(
    variant: Variant, accuracies: Sequence[Sequence[float]] | None = None, max_drafted: int | None = None
) -> list[Candidate]:
    """Every lookahead of a variant. accuracies[depth][rank]: from which trees are made; None: it grows none.
    max_drafted: the longest draft it can make; None: any. Raises UserError if that leaves no chain.
    """
    chains = [k for k in variant.num_drafted if max_drafted is None or k <= max_drafted]
    if not chains:
        raise UserError(
            f"{variant.label} drafts at most {max_drafted} tokens, and its grid has num_drafted="
            f"{list(variant.num_drafted)}: the grid is empty. Give candidates.{variant.drafter}.sweep.num_drafted."
        )
    variant = replace(variant, num_drafted=tuple(chains))
    found = [Candidate(f"{variant.label}.K{k}", variant, {"kind": "fixed", "num_drafted": k}, k) for k in chains]
    for shape in tree_shapes(variant.tree_nodes, accuracies or []):
        lookahead = {"kind": "tree", "paths": [list(path) for path in shape.paths]}
        label = f"{variant.label}.tree{shape.num_nodes}d{shape.depth}"
        found.append(Candidate(label, variant, lookahead, shape.depth, shape))
    for policy in variant.policies:
        if policy["kind"] == DYNAMIC:
            found += _dynamic(variant, policy, accuracies or [])
            continue
        kept = _within(policy, chains[-1])
        found.append(Candidate(f"{variant.label}.{kept['kind']}", variant, kept, build_lookahead(kept).max_drafted))
    return found


def tree_shapes(sizes: Sequence[int], accuracies: Sequence[Sequence[float]]) -> list[TreeShape]:
    """Per size and depth the best tree; chains among them are left to the chains. Accuracies may hold fewer nodes."""
    shapes = {best_shape(accuracies[:depth], n)[0]: None for n in sizes for depth in range(1, len(accuracies) + 1)}
    return [shape for shape in shapes if shape.num_nodes > shape.depth + 1]


def to_measure(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """What is run to know a variant's costs: its shortest and longest chain, and its largest tree, by those names."""
    chains = {one.most: one for one in candidates if one.lookahead["kind"] == "fixed"}
    trees = {one.shape.num_nodes: one for one in candidates if one.shape and one.lookahead["kind"] == "tree"}
    return {
        "shortest": chains[min(chains)],
        "longest": chains[max(chains)],
        **({"tree": trees[max(trees)]} if trees else {}),
    }


def _whole_numbers(what: str, given: Sequence[Any], least: int) -> tuple[int, ...]:
    if any(isinstance(n, bool) or not isinstance(n, int) or n < least for n in given):
        raise UserError(f"{what}={list(given)}: give whole numbers of {least} or more.")
    return tuple(sorted(set(given)))


def _policy(label: str, given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        if given not in conf_names("lookahead"):
            raise UserError(f"No lookahead named {given!r}. {allowed(given, conf_names('lookahead'))}")
        given = OmegaConf.to_container(load_conf("lookahead", given))
    if not isinstance(given, Mapping) or not given.get("kind"):
        raise UserError(f"the grid of {label}: policies={given!r}: give conf/lookahead names or mappings with `kind`.")
    if given["kind"] not in (*ADAPTIVE, DYNAMIC):
        names = allowed(given["kind"], [*ADAPTIVE, DYNAMIC])
        raise UserError(f"the grid of {label}: {given['kind']!r} is no policy that adapts. {names}")
    return {str(key): value for key, value in given.items()}


def _dynamic(variant: Variant, policy: Mapping[str, Any], accuracies: Sequence[Sequence[float]]) -> list[Candidate]:
    """A dynamic tree, no deeper than the draft was seen to go, with the static one of its size and depth as what it is
    predicted by. None for drafters without trees, without a tree in the grid to know costs from, or too shallow for it.
    """
    if not accuracies or not variant.tree_nodes:
        return []
    built: Any = build_lookahead(policy)
    depth = min(built.depth, len(accuracies))
    if replace(built.growth, depth=depth).num_candidates < built.num_nodes - 1:
        return []
    kept = {**policy, "depth": depth}
    shape, _ = best_shape(accuracies[:depth], built.num_nodes)
    return [Candidate(f"{variant.label}.{DYNAMIC}{built.num_nodes}", variant, kept, depth, shape)]


def _within(policy: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The policy, asking for no more than the longest chain that was measured."""
    built = build_lookahead(policy)
    if built.max_drafted <= longest:
        return dict(policy)
    lengths = getattr(built, "num_drafted", None)  # those a bandit chooses from
    if lengths is not None:
        return {**policy, "num_drafted": [k for k in lengths if k <= longest]}
    return {**policy, "max_drafted": longest}


def _shown(value: Any) -> str:
    """In a label, which names files and columns."""
    if isinstance(value, Mapping):
        return str(value.get("kind"))
    text = "all" if value is None else str(value)
    return "".join(char if char.isalnum() or char in "_.+-" else "_" for char in text)
