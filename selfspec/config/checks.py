"""Every check of a config that needs only the config; what needs the model waits for it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from selfspec.config.files import allowed, conf_names
from selfspec.config.schema import CompareConfig, GenerateConfig, TargetConfig, WatchConfig
from selfspec.errors import UserError

TARGET_KINDS = ("smollm2", "hf", "gguf", "random")
DTYPES = ("auto", "fastest", "float32", "bfloat16", "float16", "float64")
CACHES = ("contiguous", "paged")
ACCEPTANCES = ("auto", "rejection", "coupled", "block", "typical")
RESERVED_LABELS = ("ar", "ar_again", "hf_generate")  # the baselines that every run measures


def validate(config: GenerateConfig) -> None:
    """Every check that needs only the config; what needs the model (exit layer, positions) waits for it."""
    _check_target(config.target)
    _one_of("runtime.dtype", config.runtime.dtype, DTYPES)
    _one_of("runtime.cache", config.runtime.cache, CACHES)
    _one_of("acceptance", config.acceptance, ACCEPTANCES)
    device = config.runtime.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UserError(f"runtime.device={device!r} is not a device. Allowed: auto, cpu, cuda, cuda:<number>.")
    if config.runtime.dtype == "float16" and device == "cpu":
        raise UserError(
            "runtime.dtype=float16 on a CPU is slow and overflows. Allowed on cpu: float32, bfloat16, float64."
        )
    at_least("runtime.num_threads", config.runtime.num_threads, 1)
    at_least("runtime.tensor_parallel", config.runtime.tensor_parallel, 1)
    if config.runtime.tensor_parallel > 1 and config.runtime.dtype == "fastest":
        raise UserError("runtime.dtype=fastest is timed by every rank for itself. Give float32 or bfloat16.")
    if config.runtime.tensor_parallel > 1 and ":" in device:
        raise UserError(f"runtime.device={device!r} is one device, and every rank takes its own. Use cuda or auto.")
    at_least("max_new_tokens", config.max_new_tokens, 1)
    _check_lookahead("lookahead", config.lookahead)
    if isinstance(config, WatchConfig) and not config.prompt.strip():
        raise UserError('prompt is empty: there is nothing to continue. Give prompt="...".')
    if isinstance(config, CompareConfig):
        at_least("measure.repeats", config.measure.repeats, 1)
        at_least("measure.warmup_tokens", config.measure.warmup_tokens, 1)
        at_least("measure.max_prompts", config.measure.max_prompts, 1)
        at_least("measure.trace", config.measure.trace, 0)
        for name in ("study", "name"):
            _check_file_name(name, getattr(config, name))
        for label, drafter in config.drafters.items():
            _check_drafter(label, drafter)


def _check_target(target: TargetConfig) -> None:
    _one_of("target.kind", target.kind, TARGET_KINDS)
    if target.kind in ("hf", "gguf") and not target.path:
        what = "a hub id or a local folder" if target.kind == "hf" else "a .gguf file"
        raise UserError(f"target.kind={target.kind} needs target.path: {what}.")
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"):
        at_least(f"target.shape.{name}", getattr(target.shape, name), 1)
    shape = target.shape
    _divides("num_kv_heads", shape.num_kv_heads, "num_heads", shape.num_heads)
    if shape.head_dim is None:
        _divides("num_heads", shape.num_heads, "hidden_size", shape.hidden_size)


def _divides(small: str, divisor: int, large: str, number: int) -> None:
    if number % divisor:
        raise UserError(f"target.shape.{small}={divisor} does not divide target.shape.{large}={number}; it has to.")


def _check_drafter(label: str, drafter: object) -> None:
    _check_file_name("the drafter label", label)
    if label in RESERVED_LABELS:
        raise UserError(
            f"The drafter label {label!r} is taken: every run measures {', '.join(RESERVED_LABELS)} by itself."
        )
    if not isinstance(drafter, dict) or not isinstance(drafter.get("kind"), str):
        kinds = ", ".join(conf_names("drafter"))
        raise UserError(f"drafters.{label} has no kind. Allowed: {kinds}. To leave a drafter out: ~drafters.{label}")
    _check_lookahead(f"drafters.{label}.lookahead", drafter.get("lookahead"))


def _check_lookahead(key: str, given: object) -> None:
    """K < 1; everything else about a policy is checked by `build_lookahead`."""
    num_drafted = given.get("num_drafted") if isinstance(given, dict) else given
    if isinstance(num_drafted, int):
        at_least(f"{key}.num_drafted" if isinstance(given, dict) else key, num_drafted, 1)


def _one_of(key: str, given: str, names: Iterable[str]) -> None:
    if given not in names:
        raise UserError(f"{key}={given!r} is unknown. {allowed(given, names)}")


def at_least(key: str, given: int | None, least: int) -> None:
    """UserError for a number that is too small; None is any."""
    if given is not None and given < least:
        raise UserError(f"{key}={given} is too small. Allowed: {least} or more.")


def _check_file_name(what: str, given: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", given):
        raise UserError(f"{what}={given!r} names files and columns. Allowed: letters, digits, and _ . + - inside.")
