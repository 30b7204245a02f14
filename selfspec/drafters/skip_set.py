"""Which sublayers a draft skips, as a value and as a file.

A file is the JSON that `experiments/layer_skip.py` writes: the two lists, the target they were chosen for (by its
fingerprint), and what the search predicted. A set that was chosen for other weights would draft, badly, and look like a
bad method: so it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import UserError
from selfspec.target import Target

FILE = "layer_skip.json"
KEYS = {"kind", "target", "skip_attention", "skip_mlp", "search", "predicted"}


@dataclass(frozen=True)
class SkipSet:
    """Layers whose attention, and layers whose MLP, is left out; counted from 0."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attention: Iterable[int], mlp: Iterable[int]) -> SkipSet:
        return cls(frozenset(attention), frozenset(mlp))

    @property
    def size(self) -> int:
        return len(self.attention) + len(self.mlp)

    def first(self, num_layers: int) -> int:
        """The first layer with something left out; all below it are run as the target runs them."""
        return min(self.attention | self.mlp, default=num_layers)

    def __str__(self) -> str:
        return f"attention {sorted(self.attention)}, MLP {sorted(self.mlp)}"


def check_set(skipped: SkipSet, target: Target) -> None:
    """UserError: layers that the target does not have, or nothing left to draft with."""
    num_layers = target.num_layers
    for name, given in (("skip_attention", skipped.attention), ("skip_mlp", skipped.mlp)):
        if outside := sorted(layer for layer in given if not 0 <= layer < num_layers):
            raise UserError(
                f"{name} names layer {outside[0]}; {target.name} has {num_layers}: allowed are 0 to {num_layers - 1}."
            )
    if skipped.size == 2 * num_layers:
        raise UserError(
            f"Every attention and MLP of {target.name}'s {num_layers} layers is skipped: nothing is left to draft "
            "with. Keep at least one."
        )


def write_set(path: Path, skipped: SkipSet, target: Target, search: Mapping[str, Any], predicted: Any) -> None:
    """As `read_set` reads it. search: how it was found; predicted: what it should bring."""
    content = {
        "kind": "layer_skip",
        "target": {"name": target.name, "num_layers": target.num_layers, "fingerprint": target.fingerprint},
        "skip_attention": sorted(skipped.attention),
        "skip_mlp": sorted(skipped.mlp),
        "search": dict(search),
        "predicted": predicted,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(content, indent=1) + "\n")
    whole.replace(path)


def read_set(given: str | Path, target: Target) -> SkipSet:
    """A file, or a folder with `layer_skip.json`. UserError: unreadable, not a skip set, chosen for another target."""
    path = Path(given).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
        assert isinstance(content, dict) and content.get("kind") == "layer_skip"
        attention, mlp, made_for = content["skip_attention"], content["skip_mlp"], content["target"]
        fingerprint, name = made_for["fingerprint"], made_for["name"]
        assert all(type(layer) is int for layer in [*attention, *mlp])
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        why = error if isinstance(error, OSError) else "it is no JSON file with kind layer_skip, target and two lists"
        raise UserError(f"sets={given} cannot be read: {why}. Make one: python experiments/layer_skip.py") from error
    if unknown := sorted(set(content) - KEYS):
        raise UserError(f"{path} has the unknown key {unknown[0]!r}. Known: {', '.join(sorted(KEYS))}.")
    if fingerprint != target.fingerprint:
        raise UserError(
            f"The set in {path} was chosen for {name!r} with fingerprint {fingerprint}; {target.name!r} has "
            f"{target.fingerprint}. Search one for this target: python experiments/layer_skip.py"
        )
    skipped = SkipSet.of(attention, mlp)
    check_set(skipped, target)
    return skipped
