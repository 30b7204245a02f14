"""Checkpoint folders as they lie on disk: read whole and from safetensors only, written whole or not at all.

A pickle (.pt, .bin, ...) runs whatever code it holds when it is read, so none is ever opened here: the error says how
its owner turns it into safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.errors import UserError

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
CONVERT = (
    'python -c "import sys, torch; from safetensors.torch import save_file; old, new = sys.argv[1:]; '
    "save_file({k: v.clone() for k, v in torch.load(old, map_location='cpu', weights_only=True).items()}, new)\""
)


@dataclass(frozen=True)
class Folder:
    """config.json and every tensor of a checkpoint."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_config(given: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder and its config.json. UserError where there is none."""
    path = Path(given).expanduser()
    if not path.is_dir():
        raise UserError(f"No checkpoint folder at {path}. Needed: a folder with config.json and safetensors weights.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path / 'config.json'}: {error}.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path / 'config.json'} holds a {type(config).__name__}, not an object.")
    return path, config


def read_folder(given: str | Path) -> Folder:
    """UserError: no folder, no readable config.json, no safetensors (pickles are named), one tensor in two files."""
    path, config = read_config(given)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        if not pickles:
            raise UserError(f"No weights in {path}. Needed: one or more .safetensors files.")
        new = Path(pickles[0]).with_suffix(".safetensors")
        raise UserError(
            f"{', '.join(pickles)} in {path}: pickles can run code when they are read, so they are not. If you trust "
            f"where it comes from, convert it:  {CONVERT} {pickles[0]} {new}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"Cannot read {file}: {error}.") from error
        if twice := sorted(set(part) & set(tensors)):
            raise UserError(f"{path} holds {twice[0]} in more than one file. Leave only one set of weights there.")
        tensors.update(part)
    return Folder(path, config, tensors)


@contextmanager
def new_folder(given: str | Path) -> Iterator[Path]:
    """A folder that is there only when everything in it is: filled under another name, then renamed.

    UserError: it exists already and is not empty, or cannot be written (disk full, no permission).
    """
    path = Path(given).expanduser()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already. Give a new folder, or remove it first.")
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield partial
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot write {path}: {error}.") from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def write_into(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], readme: str) -> None:
    """config.json, model.safetensors and README.md."""
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    (path / "README.md").write_text(readme.rstrip() + "\n", encoding="utf-8")


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """UserError unless both hold the same names with the same shapes: a missing or unread weight is never silent."""
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(found))]
    problems += [f"{name} {list(found[name].shape)} has no place" for name in sorted(set(found) - set(expected))]
    problems += [
        f"{name} is {list(found[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(set(found) & set(expected))
        if found[name].shape != expected[name].shape
    ]
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise UserError(f"The weights in {path} do not fit its configuration: {'; '.join(problems[:4])}{more}.")
