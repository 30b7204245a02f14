"""Name -> module of every drafter. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.config import allowed, conf_names, load_conf
from selfspec.drafters.base import Drafter, NoDraft
from selfspec.errors import UserError
from selfspec.target import Target

DRAFTERS = {
    "clasp": "selfspec.drafters.clasp",
    "eagle3": "selfspec.drafters.eagle3",
    "early_exit": "selfspec.drafters.early_exit",
    "exit_adapter": "selfspec.drafters.exit_adapter",
    "hydra": "selfspec.drafters.hydra",
    "hybrid": "selfspec.drafters.hybrid",
    "independent": "selfspec.drafters.independent",
    "layer_skip": "selfspec.drafters.layer_skip",
    "layerskip": "selfspec.drafters.layerskip",
    "medusa": "selfspec.drafters.medusa",
    "mtp": "selfspec.drafters.mtp",
    "ngram": "selfspec.drafters.ngram",
    "synthetic": "selfspec.drafters.synthetic",
}
# kinds whose Options have `checkpoint`: a folder with a draft of that kind
TRAINED: tuple[str, ...] = ("eagle3", "exit_adapter", "hydra", "layerskip", "medusa", "mtp")
NOT_OPTIONS = ("kind", "label", "lookahead")  # read by run.py, not by the drafter


def build_drafter(name: str | Mapping[str, Any], target: Target, **overrides: Any) -> Drafter:
    """A drafter by conf/drafter name (or a mapping with `kind`) and overrides of its options.

    Raises UserError for an unknown name, an unknown or mistyped option, and whatever the drafter itself refuses.
    """
    if isinstance(name, str):
        known = sorted({*conf_names("drafter"), *DRAFTERS, "none"})
        if name not in known:
            raise UserError(f"No drafter named {name!r}. {allowed(name, known)}")
        in_conf = name in conf_names("drafter")
        given: dict[Any, Any] = OmegaConf.to_container(load_conf("drafter", name)) if in_conf else {"kind": name}  # type: ignore[assignment]
    elif isinstance(name, Mapping):
        given = dict(name)
    else:
        raise UserError(f"A drafter is a conf/drafter name or a mapping with `kind` and options; given: {name!r}.")
    given = {**given, **overrides}
    kind = given.get("kind")
    options = {str(key): value for key, value in given.items() if key not in NOT_OPTIONS}
    if kind == "none":
        if options:
            raise UserError(f"The drafter 'none' takes no options; given: {', '.join(options)}.")
        return NoDraft()
    if not isinstance(kind, str) or kind not in DRAFTERS:
        raise UserError(f"No drafter of kind {kind!r}. {allowed(str(kind), ['none', *DRAFTERS])}")
    module = importlib.import_module(DRAFTERS[kind])
    return module.build(target, _typed_options(kind, module.Options, options))


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """A trained draft: a folder made by experiments/train.py (or imported into that form), for the target it was
    trained for.

    Raises UserError: no such folder, no draft in it, a draft of another target, missing or unknown weights.
    """
    folder = Path(path).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{folder} is not a trained draft: {error}. A draft is a folder with config.json and model.safetensors."
        ) from error
    if "model_type" in config and "kind" not in config:  # a plain transformers model
        return build_drafter({"kind": "independent", "model": str(folder)}, target)
    kind = config.get("kind")
    if kind not in TRAINED:
        raise UserError(f"{folder}/config.json is of kind {kind!r}. {allowed(str(kind), TRAINED)}")
    return build_drafter({"kind": kind, "checkpoint": str(folder)}, target)


def _typed_options(kind: str, schema: type, given: dict[str, Any]) -> Any:
    """`given` as an instance of the drafter's Options. A Target, which no config can hold, passes as it is."""
    names = [field.name for field in fields(schema)]
    for key in given:
        if key not in names:
            raise UserError(f"The drafter {kind!r} has no option {key!r}. {allowed(key, names)}")
    objects = {key: value for key, value in given.items() if isinstance(value, Target)}
    required = [f.name for f in fields(schema) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [key for key in required if given.get(key) in (None, "???")]:
        raise UserError(f"The drafter {kind!r} needs {missing[0]}. Its options: {', '.join(names)}.")
    plain = {key: value for key, value in given.items() if key not in objects}
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), plain)
        assert isinstance(typed, DictConfig)
        return schema(**{name: objects[name] if name in objects else typed[name] for name in names})
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise UserError(f"Bad value for drafter option {error.full_key}: {reason}.") from error
