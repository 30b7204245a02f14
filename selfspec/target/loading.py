"""Where a target comes from: a conf/target name, a local folder, a hub id, a GGUF file, or random weights of a named
shape.

Weights are read from safetensors only, and no code that comes with a model is run unless `trust_remote_code=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from selfspec.config import RandomShape, TargetConfig, allowed, conf_names, load_conf
from selfspec.errors import UserError
from selfspec.target.adapters import merge_adapter
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.target.families import FAMILIES
from selfspec.target.fastest import fastest_dtype
from selfspec.target.fetch import convert_gguf, fetch_smollm2
from selfspec.target.fused import FUSABLE, fuse
from selfspec.target.stack import Target
from selfspec.target.tensor_parallel import join, load_cut

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def wrap_target(hf_model: Any, tokenizer: Any | None = None, name: str | None = None) -> Target:
    """Any loaded HF causal LM as a target; the model itself is left untouched. UserError for what is unsupported."""
    return Target(hf_model, tokenizer, name or getattr(hf_model.config, "_name_or_path", "") or "wrapped")


def load_target(
    name_or_path: str | Path | TargetConfig,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    fused: bool | None = None,
    adapter: str | Path | None = None,
    with_tokenizer: bool = True,
    tensor_parallel: int = 1,
) -> Target:
    """A target by conf/target name ("smollm2-135m"), local folder, .gguf file or hub id.

    adapter: a folder with a LoRA adapter, merged into the weights (`selfspec.target.adapters`). The result is another
    target than its base: what is lossless is so with respect to it.

    dtype "auto": bfloat16 on CUDA, float32 on CPU; "fastest": what decodes faster here
    (`selfspec.target.fastest`). fused None: packed, fused layers where they are to be had (see
    `selfspec.target.fused`); False: transformers' own layers. Raises UserError naming what exists when nothing by
    that name does.

    tensor_parallel: the processes, started by torchrun, that share the target (`selfspec.target.tensor_parallel`).
    Every one of them has to make the same calls.
    """
    if dtype == "fastest" and tensor_parallel > 1:
        raise UserError("dtype='fastest' is timed by every rank for itself. Give 'float32' or 'bfloat16'.")
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    config, name = _as_config(name_or_path, trust_remote_code)
    if adapter is not None:
        config, name = replace(config, adapter=str(adapter)), f"{name}+{Path(adapter).name}"

    def load_model() -> Any:
        # merged in float32 whatever comes after, so that the weights are the same in every dtype
        dtype = torch.promote_types(chosen_dtype, torch.float32) if config.adapter else chosen_dtype
        model = random_model(config) if config.kind == "random" else load_pretrained(config, dtype)
        if config.adapter:
            merge_adapter(model, config.adapter)
        return in_dtype(model, chosen_dtype).to(device=chosen_device)

    if tensor_parallel != 1:
        _check_can_be_cut(config, fused)
        join(tensor_parallel)
        with _quietly_from(_folder(config)) as path:
            model = load_cut(path, chosen_dtype, chosen_device, tensor_parallel, **_options(config))
        return wrap_target(in_dtype(model, chosen_dtype), load_tokenizer(config) if with_tokenizer else None, name)
    target = wrap_target(load_model(), load_tokenizer(config) if with_tokenizer else None, name)
    if fused is not False and not fuse(target, reload=load_model) and fused:
        raise UserError(
            f"fused=True is not possible for {name} ({target.config.model_type}, {target.dtype}, {target.device}). "
            f"Allowed: {', '.join(FUSABLE)} in float32 or bfloat16 on a CPU whose torch has oneDNN. Use fused=None."
        )
    return target


def _check_can_be_cut(config: TargetConfig, fused: bool | None) -> None:
    reason = None
    if config.kind == "random":
        reason = "of random weights: save it (hf_model.save_pretrained) and load the folder"
    if config.adapter:
        reason = "with an adapter: merge it, save the merged model, and load that folder"
    if fused:
        reason = "with fused=True: its layers are transformers' own. Use fused=None"
    if reason:
        raise UserError(f"tensor_parallel is not possible for a target {reason}.")


def choose_device(device: str) -> torch.device:
    """ "auto" is CUDA if there is a GPU. UserError when CUDA is asked for and this build or machine has none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        if torch.version.cuda is None:
            raise UserError(
                f"device={device!r}, but this torch ({torch.__version__}) is built without CUDA. Use device='cpu'."
            )
        if not torch.cuda.is_available():
            raise UserError(
                f"device={device!r}, but torch sees no GPU (driver or CUDA_VISIBLE_DEVICES?). Use device='cpu'."
            )
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device!r} is not a device. Allowed: auto, cpu, cuda, cuda:<number>.") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"device={device!r}, but torch sees {last + 1} GPUs. Allowed: cpu, cuda:0 to cuda:{last}.")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "fastest":
        return fastest_dtype(device).dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is unknown. {allowed(dtype, ['auto', 'fastest', *DTYPES])}")
    if dtype == "float16" and device.type == "cpu":
        raise UserError("dtype='float16' on a CPU is slow and overflows. Allowed on cpu: float32, bfloat16, float64.")
    return DTYPES[dtype]


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The same model with its parameters in `dtype`. Not its buffers: transformers keeps rotary frequencies in float32,
    and in bfloat16 an angle at position 1,000 would be wrong by radians.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _as_config(given: str | Path | TargetConfig, trust_remote_code: bool) -> tuple[TargetConfig, str]:
    """A conf name wins; then an existing path; then a hub id of the form owner/name."""
    if isinstance(given, TargetConfig):
        return given, given.name or given.path or given.kind
    text = str(given)
    if text in conf_names("target"):
        return _typed(load_conf("target", text)), text
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        return TargetConfig(kind="gguf", path=text), path.stem
    if path.is_dir() or (text.count("/") == 1 and not text.startswith((".", "/", "~"))):
        return TargetConfig(kind="hf", path=text, trust_remote_code=trust_remote_code), text
    raise UserError(
        f"No target {text!r}: neither a conf/target name, nor an existing folder, nor a .gguf file, nor a hub id "
        f"(owner/name). {allowed(text, conf_names('target'))}"
    )


def _typed(conf: DictConfig) -> TargetConfig:
    try:
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TargetConfig), conf))
    except OmegaConfBaseException as error:
        raise UserError(f"Bad target config: {str(error).splitlines()[0]}.") from error
    assert isinstance(typed, TargetConfig)
    return typed


def load_pretrained(config: TargetConfig, dtype: torch.dtype) -> Any:
    """The transformers model of a config that names weights."""
    with _quietly_from(_folder(config)) as path:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, **_options(config))


def load_tokenizer(config: TargetConfig) -> Any:
    """The model's tokenizer; bytes for random weights (none if their vocabulary is smaller than 256)."""
    if config.kind == "random":
        return byte_tokenizer() if config.shape.vocab_size >= 256 else None
    with _quietly_from(_folder(config)) as path:
        return AutoTokenizer.from_pretrained(path, **_options(config))


def _folder(config: TargetConfig) -> str:
    if config.kind == "smollm2":
        return str(fetch_smollm2())
    if config.kind == "gguf":
        return str(convert_gguf(str(config.path)))
    path = Path(str(config.path)).expanduser()
    if not path.is_dir() and (path.is_absolute() or str(config.path).startswith(".")):  # no hub id looks like that
        raise UserError(f"No model folder at {path}. Give an existing folder, or a hub id (owner/name).")
    return str(path)


def _options(config: TargetConfig) -> dict[str, Any]:
    revision = {"revision": config.revision} if config.revision else {}
    return {"trust_remote_code": config.trust_remote_code, **revision}


@contextmanager
def _quietly_from(path: str) -> Iterator[str]:
    """No progress bars, and transformers' many kinds of failure as one error that says what is needed."""
    progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield path
    except UserError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"Could not load a model from {path}: {reason} "
            "Needed: a folder or hub id with config.json, safetensors weights and a tokenizer transformers can read."
        ) from error
    finally:
        if progress:
            transformers_logging.enable_progress_bar()


def random_model(config: TargetConfig) -> Any:
    """A model with seeded random weights of the given shape: right for speed and memory, meaningless as text."""
    known = [name for name, family in FAMILIES.items() if family.free_shape]
    if config.family not in known:
        raise UserError(
            f"target.family={config.family!r} is not to be had with random weights. {allowed(config.family, known)}"
        )
    shape: RandomShape = config.shape
    config_class: Any = CONFIG_MAPPING[config.family]
    hf_config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(hf_config)
