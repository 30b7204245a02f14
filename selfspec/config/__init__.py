"""What a run is asked to do: typed schemas, every cross-field check, and the hash that names a run directory.

No torch and no Hydra here. Hydra composes conf/ in the entry points; `resolve` turns what it composed into a typed,
checked config, in which an unknown key or a wrong type is a UserError before anything slow starts. Drafter options
and lookahead options are the exception: each drafter and each policy declares its own, and `build_drafter` and
`build_lookahead` check them, so that a new one never has to touch this package.
"""

from __future__ import annotations

from selfspec.config.checks import ACCEPTANCES, CACHES, DTYPES, RESERVED_LABELS, TARGET_KINDS, at_least, validate
from selfspec.config.files import allowed, conf_dir, conf_names, load_conf
from selfspec.config.identity import NOT_HASHED, canonical, config_hash, run_dir
from selfspec.config.resolving import resolve, typed
from selfspec.config.schema import (
    CompareConfig,
    GenerateConfig,
    MeasureConfig,
    RandomShape,
    RuntimeConfig,
    SamplingConfig,
    TargetConfig,
    WatchConfig,
)

__all__ = [
    "ACCEPTANCES",
    "CACHES",
    "DTYPES",
    "NOT_HASHED",
    "RESERVED_LABELS",
    "TARGET_KINDS",
    "CompareConfig",
    "GenerateConfig",
    "MeasureConfig",
    "RandomShape",
    "RuntimeConfig",
    "SamplingConfig",
    "TargetConfig",
    "WatchConfig",
    "allowed",
    "at_least",
    "canonical",
    "conf_dir",
    "conf_names",
    "config_hash",
    "load_conf",
    "resolve",
    "run_dir",
    "typed",
    "validate",
]
