"""From what Hydra composed to a typed, checked config."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from selfspec.config.checks import validate
from selfspec.config.files import allowed
from selfspec.config.schema import CompareConfig, GenerateConfig
from selfspec.errors import UserError
from selfspec.grid import expand

Schema = TypeVar("Schema", bound=GenerateConfig)
AnySchema = TypeVar("AnySchema")


def resolve(schema: type[Schema], composed: DictConfig) -> Schema:
    """The composed config as a checked instance of `schema`; UserError names the key that is unknown or mistyped."""
    config = typed(schema, composed)
    if isinstance(config, CompareConfig):
        _add_grid(config)
        _add_single_drafter(config)
    validate(config)
    return config


def typed(schema: type[AnySchema], composed: DictConfig) -> AnySchema:
    """The composed config as an instance of any dataclass. UserError: unknown keys, wrong types, missing values."""
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(plain, dict)
        plain.pop("hydra", None)
        merged = OmegaConf.merge(_without_replaced(schema, plain), plain)
        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"No value for {', '.join(missing)}. Give it on the command line: {missing[0]}=...")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        problem = str(error.msg or error).splitlines()[0]
        if isinstance(error, ConfigKeyError):
            key = str(error.full_key or error.key)
            names = [str(name) for name in error.parent_node] if isinstance(error.parent_node, DictConfig) else []
            raise UserError(f"No key {key!r}. {allowed(key.rpartition('.')[2], names)}") from error
        raise UserError(f"Bad value for {error.full_key or 'the config'}: {problem}.") from error
    assert isinstance(config, schema)
    return config


def _without_replaced(schema: type, plain: dict[Any, Any]) -> DictConfig:
    """The schema's defaults, but none within a free-form dict that the config gives: it is that dict, not a mixture."""
    defaults: DictConfig = OmegaConf.structured(schema)
    for field in fields(schema):
        free = field.default_factory is not MISSING and isinstance(field.default_factory(), dict)
        if free and isinstance(plain.get(field.name), dict):
            defaults[field.name] = {}
    return defaults


def _add_grid(config: CompareConfig) -> None:
    """What the grid makes joins `drafters`, after those that are written out."""
    made = expand(config.grid)
    if both := sorted(made.keys() & config.drafters.keys()):
        raise UserError(f"The grid makes the drafter {both[0]!r}, which is in drafters already; name one of them anew.")
    config.drafters |= made
    config.grid = {}


def _add_single_drafter(config: CompareConfig) -> None:
    """`drafter=early_exit` joins `drafters` under its own name, in place of one that is there already."""
    if config.drafter is not None and config.drafter.get("kind") != "none":
        label = config.drafter.get("label") or config.drafter.get("kind")
        config.drafters[str(label)] = config.drafter
    config.drafter = None
