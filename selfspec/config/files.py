"""conf/: where it is, which names its groups offer, and what is said when a name is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from selfspec.errors import UserError


def conf_dir() -> Path:
    """conf/ of a clone, or the copy of it inside an installed wheel."""
    package = Path(__file__).parent.parent
    candidates = (package / "conf", package.parent / "conf")
    for path in candidates:
        if path.is_dir():
            return path
    raise UserError(f"No conf/ folder at {candidates[0]} or {candidates[1]}: selfspec is not installed completely.")


def conf_names(group: str) -> list[str]:
    """The names a conf group offers: conf_names("target") -> ["random-1b", ..., "smollm2-135m"]."""
    folder = conf_dir() / group
    if not folder.is_dir():
        groups = [path.name for path in conf_dir().iterdir() if path.is_dir()]
        raise UserError(f"No conf group {group!r}. {allowed(group, groups)}")
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_conf(group: str, name: str) -> DictConfig:
    """conf/<group>/<name>.yaml as it stands. UserError with the allowed names if there is none."""
    names = conf_names(group)
    if name not in names:
        raise UserError(f"No {group} named {name!r}. {allowed(name, names)}")
    loaded = OmegaConf.load(conf_dir() / group / f"{name}.yaml")
    if not isinstance(loaded, DictConfig):
        raise UserError(f"conf/{group}/{name}.yaml holds a {type(loaded).__name__}, not a mapping.")
    return loaded


def allowed(given: str, names: Iterable[str]) -> str:
    """The end of an error message: what may be given instead, and the closest one if something is close."""
    choices = sorted(names)
    close = difflib.get_close_matches(given, choices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Allowed: {', '.join(choices) or 'none'}.{hint}"
