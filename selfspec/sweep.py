"""What a W&B sweep file asks for, read so that another loop can do the same. No wandb and no Hydra here.

    space = load_space("exit_layer_lookahead")       # conf/sweep/exit_layer_lookahead.yaml, or a path
    space.arguments({"drafter.exit_layer": 20})      # what `wandb agent` would put behind the program

`wandb agent` renders a value as `f"{key}={value}"` and Hydra parses that text, so some values would arrive as others or
not at all: None as the text "None", a mapping as a syntax error. Those are refused here, with what to write instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from selfspec.config import allowed, conf_dir, conf_names
from selfspec.errors import UserError

METHODS = ("grid", "random", "bayes")
PREFIXES = {"${args_no_hyphens}": "", "${args_append_hydra}": "+", "${args_override_hydra}": "++"}
RANGES = ("uniform", "int_uniform", "log_uniform_values")


@dataclass(frozen=True)
class Choice:
    """One of these texts, as Hydra will read them."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; `log`: evenly spread over its logarithm."""

    low: float
    high: float
    integer: bool
    log: bool


@dataclass(frozen=True)
class Space:
    """A sweep file's content."""

    name: str
    program: str
    method: str
    metric: str
    maximize: bool
    parameters: dict[str, Choice | Range]
    fixed: tuple[str, ...]  # the overrides that every trial gets
    prefix: str  # "", "+" or "++" before every swept key
    run_cap: int | None

    def arguments(self, chosen: Mapping[str, Any]) -> list[str]:
        """A trial's command line behind the program, as `wandb agent` makes it."""
        return [*self.fixed, *(f"{self.prefix}{key}={value}" for key, value in chosen.items())]

    def grid(self) -> Iterator[dict[str, str]]:
        """Every combination, the last parameter fastest. Only for choices."""
        choices = [one.values for one in self.parameters.values() if isinstance(one, Choice)]
        assert len(choices) == len(self.parameters), "load_space refuses a grid with a range"
        for values in itertools.product(*choices):
            yield dict(zip(self.parameters, values, strict=True))


def load_space(name: str) -> Space:
    """A conf/sweep name, or a path to a W&B sweep file. UserError for whatever could not run as it is written."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        names = conf_names("sweep")
        if name not in names:
            raise UserError(f"No sweep named {name!r}. {allowed(name, names)} Or give the path of a .yaml file.")
        path = conf_dir() / "sweep" / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"Could not read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no mapping, so it is no sweep file.")
    return space_of(content, path.stem)


def space_of(content: Mapping[str, Any], name: str) -> Space:
    """The same from the file's content."""
    method = content.get("method")
    if method not in METHODS:
        raise UserError(f"sweep {name}: method={method!r} is unknown. {allowed(str(method), METHODS)}")
    metric = content.get("metric") or {}
    if not metric.get("name") or metric.get("goal") not in ("maximize", "minimize"):
        raise UserError(f"sweep {name}: metric needs a name, and goal: maximize or minimize.")
    given = content.get("parameters")
    if not isinstance(given, dict) or not given:
        raise UserError(f"sweep {name}: parameters is empty, so there is nothing to sweep.")
    parameters = {str(key): _parameter(name, str(key), spec) for key, spec in given.items()}
    if method == "grid" and any(isinstance(one, Range) for one in parameters.values()):
        raise UserError(
            f"sweep {name}: a grid needs values for every parameter; a range has no end. Use random or bayes."
        )
    fixed, prefix = _command(name, content.get("command"))
    return Space(
        name=name,
        program=str(content.get("program")),
        method=str(method),
        metric=str(metric["name"]),
        maximize=metric["goal"] == "maximize",
        parameters=parameters,
        fixed=fixed,
        prefix=prefix,
        run_cap=content.get("run_cap"),
    )


def _command(name: str, command: object) -> tuple[tuple[str, ...], str]:
    chunks = [str(chunk) for chunk in command] if isinstance(command, list) else []
    last = chunks[-1] if chunks else None
    if last not in PREFIXES or "${program}" not in chunks:
        raise UserError(
            f"sweep {name}: command has to name ${{program}} and end with one of {', '.join(PREFIXES)}; "
            "W&B's default gives --key=value, which Hydra does not read."
        )
    return tuple(chunks[chunks.index("${program}") + 1 : -1]), PREFIXES[last]


def _parameter(name: str, key: str, spec: object) -> Choice | Range:
    where = f"sweep {name}: {key}"
    if not isinstance(spec, dict):
        raise UserError(f"{where} is not a mapping. Give values: [...], value: ..., or min and max.")
    if "value" in spec or "values" in spec:
        values = spec["values"] if "values" in spec else [spec["value"]]
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: values is no list with something in it.")
        return Choice(tuple(_text(where, value) for value in values))
    if "min" not in spec or "max" not in spec:
        raise UserError(f"{where} has neither values nor min and max. For nested keys write a dotted name.")
    low, high = spec["min"], spec["max"]
    if not all(isinstance(bound, int | float) for bound in (low, high)) or not low < high:
        raise UserError(f"{where}: min={low!r} and max={high!r} are no range. In YAML write 1.0e-4, not 1e-4.")
    whole = isinstance(low, int) and isinstance(high, int)
    distribution = spec.get("distribution", "int_uniform" if whole else "uniform")
    if distribution not in RANGES:
        raise UserError(f"{where}: distribution={distribution!r} is not supported. {allowed(distribution, RANGES)}")
    return Range(float(low), float(high), distribution == "int_uniform", distribution == "log_uniform_values")


def _text(where: str, value: object) -> str:
    """The value as the agent renders it; UserError where Hydra would read something else."""
    inside = value if isinstance(value, list) else [value]
    if any(one is None for one in inside):
        raise UserError(f'{where}: W&B hands null over as the text None. Write "null", in quotes.')
    if any(isinstance(one, dict) for one in inside):
        raise UserError(f'{where}: Hydra cannot read a mapping as W&B writes it. Write it as text: "{{kind: ngram}}".')
    if isinstance(value, str) and not value:
        raise UserError(f"{where}: an empty text would arrive as null. Leave it out.")
    return f"{value}"
