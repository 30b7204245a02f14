"""What a run is asked to do: typed schemas, every cross-field check, and the hash that names a run directory.

No torch and no Hydra here. Hydra composes conf/ in the entry points; `resolve` turns what it composed into a typed,
checked config, in which an unknown key or a wrong type is a UserError before anything slow starts. Drafter options
and lookahead options are the exception: each drafter and each policy declares its own, and `build_drafter` and
`build_lookahead` check them, so that a new one never has to touch this file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from selfspec.errors import UserError
from selfspec.grid import expand

TARGET_KINDS = ("smollm2", "hf", "gguf", "random")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
CACHES = ("contiguous", "paged")
ACCEPTANCES = ("auto", "rejection", "coupled", "block", "typical")
RESERVED_LABELS = ("ar", "ar_again", "hf_generate")  # the baselines that every run measures
# where things go, not what is measured; and the grid, which is among the drafters by then
NOT_HASHED = ("study", "name", "output_dir", "force", "tracking", "hydra", "grid")


@dataclass
class RandomShape:
    """The shape of a model with random weights: for tests, and for speed work that needs no real text."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None  # null: hidden_size / num_heads
    vocab_size: int = 512
    max_positions: int = 1024
    tie_word_embeddings: bool = False


@dataclass
class TargetConfig:
    """One conf/target file. `path`: a hub id or local folder for `hf`, a file for `gguf`; unused otherwise."""

    kind: str = MISSING
    name: str | None = None  # what tables call it
    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    adapter: str | None = None  # a folder with a LoRA adapter, merged into the weights: another target than its base
    family: str = "llama"  # the next three are for kind=random
    shape: RandomShape = field(default_factory=RandomShape)
    seed: int = 0


@dataclass
class SamplingConfig:
    """The fields of `selfspec.Sampling`, which checks their ranges."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] | None = None
    suppress_tokens: list[int] = field(default_factory=list)


@dataclass
class MeasureConfig:
    """How carefully to measure: see `selfspec.measure.protocol`."""

    repeats: int = 1
    warmup_tokens: int = 8  # generated per warm-up generation
    max_prompts: int | None = None  # null: all; else that many, spread evenly over the set
    near_tie_tolerance: float | None = None  # relative to the largest |logit|; null: by dtype (measure.divergence)
    noise_check: bool = True  # measure AR twice per prompt: was the machine quiet?
    trace: int = 0  # prompts whose rounds are kept token by token, with p and q, for the trace page
    timed: bool = True  # false: only acceptance counts; jobs may share the machine, and tables say "untimed"


@dataclass
class RuntimeConfig:
    """Where and in which precision. `auto`: a CUDA device in bfloat16 if there is one, else CPU in float32."""

    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None  # null: as torch chooses
    cache: str = "contiguous"  # or "paged": blocks, shared by rows with a common prefix; the same tokens
    tensor_parallel: int = 1  # processes that share the target, as many as torchrun starts; compare.py and generate.py


@dataclass
class GenerateConfig:
    """What both entry points share: one target and how it decodes."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: dict[str, Any] | None = None  # one more drafter, under its label or kind: `drafter=early_exit`
    lookahead: dict[str, Any] = field(default_factory=lambda: {"kind": "fixed", "num_drafted": 4})
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    acceptance: str = "auto"
    max_new_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False


@dataclass
class WatchConfig(GenerateConfig):
    """experiments/generate.py: one prompt, watched live."""

    prompt: str = MISSING
    chat: bool = True  # wrap the prompt in the model's chat template, if it has one
    stop_strings: list[str] = field(default_factory=list)


@dataclass
class CompareConfig(GenerateConfig):
    """experiments/compare.py: several drafters on the same prompts in one process."""

    study: str = MISSING
    name: str = MISSING
    drafters: dict[str, Any] = field(default_factory=dict)  # label -> drafter config
    grid: dict[str, Any] = field(default_factory=dict)  # every drafter with every lookahead: selfspec.grid
    prompts: dict[str, Any] = field(default_factory=dict)  # checked by selfspec.prompts
    tuned_on: list[str] = field(default_factory=list)  # prompt sets that settings were chosen on: none may recur here
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    tracking: dict[str, Any] = field(default_factory=dict)  # checked by selfspec.tracking
    output_dir: str = "outputs"
    force: bool = False  # measure again although a finished run with this config exists


Schema = TypeVar("Schema", bound=GenerateConfig)
AnySchema = TypeVar("AnySchema")


def conf_dir() -> Path:
    """conf/ of a clone, or the copy of it inside an installed wheel."""
    candidates = (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf")
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
        merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
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
    _at_least("runtime.num_threads", config.runtime.num_threads, 1)
    _at_least("runtime.tensor_parallel", config.runtime.tensor_parallel, 1)
    if config.runtime.tensor_parallel > 1 and ":" in device:
        raise UserError(f"runtime.device={device!r} is one device, and every rank takes its own. Use cuda or auto.")
    _at_least("max_new_tokens", config.max_new_tokens, 1)
    _check_lookahead("lookahead", config.lookahead)
    if isinstance(config, WatchConfig) and not config.prompt.strip():
        raise UserError('prompt is empty: there is nothing to continue. Give prompt="...".')
    if isinstance(config, CompareConfig):
        _at_least("measure.repeats", config.measure.repeats, 1)
        _at_least("measure.warmup_tokens", config.measure.warmup_tokens, 1)
        _at_least("measure.max_prompts", config.measure.max_prompts, 1)
        _at_least("measure.trace", config.measure.trace, 0)
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
        _at_least(f"target.shape.{name}", getattr(target.shape, name), 1)
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
        _at_least(f"{key}.num_drafted" if isinstance(given, dict) else key, num_drafted, 1)


def _one_of(key: str, given: str, names: Iterable[str]) -> None:
    if given not in names:
        raise UserError(f"{key}={given!r} is unknown. {allowed(given, names)}")


def _at_least(key: str, given: int | None, least: int) -> None:
    if given is not None and given < least:
        raise UserError(f"{key}={given} is too small. Allowed: {least} or more.")


def _check_file_name(what: str, given: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", given):
        raise UserError(f"{what}={given!r} names files and columns. Allowed: letters, digits, and _ . + - inside.")


def canonical(config: CompareConfig) -> dict[str, Any]:
    """What is measured, without where it is written: equal dicts mean the same measurement."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    kept = {str(key): value for key, value in plain.items() if key not in NOT_HASHED}
    kept["runtime"]["device"] = kept["runtime"]["device"].split(":")[0]
    if kept["runtime"]["tensor_parallel"] == 1:  # so that runs from before there was such a thing keep their names
        del kept["runtime"]["tensor_parallel"]
    return kept


def config_hash(config: CompareConfig) -> str:
    """sha256 of `canonical(config)`; its first 8 digits name the run directory."""
    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def run_dir(config: CompareConfig) -> Path:
    """outputs/<study>/<name>-<hash8>: the same config always lands in the same place, which is how a run resumes."""
    return Path(config.output_dir) / config.study / f"{config.name}-{config_hash(config)[:8]}"
