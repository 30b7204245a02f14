"""Training text on disk: shards of samples, the manifest that vouches for them, and reading them back.

A data folder holds `shard-00000.safetensors`, ... and `manifest.json` (settings, hashes, token counts). A shard is
written whole or not at all (temporary name, fsync, rename), so a killed run loses at most the samples of the shard it
was filling, and the next run goes on with the indices no shard holds. The manifest is rebuilt from the shards.

Only token ids are kept: features and logits are recomputed from the target while training (a forward pass over known
tokens is far cheaper than writing them was).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from selfspec.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
FOLDER_STRIDE = 2**40  # between the indices of the samples of two folders
HOW_MUCH = ("answer_tokens", "rows", "shard_samples")  # settings that may change when a folder is added to


@dataclass
class DataConfig:
    """What text to make. The defaults are for SmolLM2-135M; every field but HOW_MUCH defines the data."""

    answer_tokens: int = 400_000
    rows: int = 128
    shard_samples: int = 128
    seed: int = 0
    max_sequence_tokens: int = 351
    max_prompt_tokens: int = 160
    max_new_tokens: int = 160
    prompt_temperature: float = 1.0
    prompt_min_p: float = 0.02
    bare_share: float = 0.5
    openers: list[str] = field(default_factory=list)
    greedy_share: float = 0.5
    answer_temperatures: list[float] = field(default_factory=lambda: [0.7, 1.0])
    held_out_share: float = 0.04

    def __post_init__(self) -> None:
        for name in ("answer_tokens", "rows", "shard_samples", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("bare_share", "greedy_share", "held_out_share", "prompt_min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is a share: it must lie in [0, 1].")
        if len(self.answer_temperatures) != 2 or not 0 < self.answer_temperatures[0] <= self.answer_temperatures[1]:
            raise UserError(f"answer_temperatures={self.answer_temperatures} must be [low, high] with 0 < low <= high.")
        if self.max_new_tokens >= self.max_sequence_tokens:
            raise UserError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"max_sequence_tokens={self.max_sequence_tokens}."
            )


@dataclass(frozen=True)
class Sample:
    """One chat: prompt (template included) and the target's answer, which ends in EOS unless it was cut by length."""

    index: int
    token_ids: list[int]
    prompt_len: int
    temperature: float
    held_out: bool

    @property
    def answer_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True)
class Shard:
    """A file of samples; their indices are unique in the whole dataset, also when it is made of several folders."""

    path: Path
    sha256: str
    samples: list[Sample]


@dataclass(frozen=True)
class Dataset:
    """What a trainer reads: two lists that share no prompt, the shards they lie in, the folders' manifests, and the
    hash that names it all.
    """

    train: list[Sample]
    held_out: list[Sample]
    shards: list[Shard]
    manifests: dict[Path, dict[str, Any]]  # by folder
    manifest_sha256: str

    def total(self, name: str) -> int:
        """Of a manifest's totals, for example train_answer_tokens."""
        return sum(manifest["totals"][name] for manifest in self.manifests.values())


def write_atomically(path: Path, write: Any) -> None:
    """`write(temporary path)`, fsync, rename: `path` is the old file or the whole new one, also after kill -9."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Nothing half-written was left.") from error
    except SafetensorError as error:
        raise UserError(f"Cannot write {path}: {error}. Nothing half-written was left.") from error
    finally:
        partial.unlink(missing_ok=True)


def write_shard(folder: Path, samples: Sequence[Sample], rejected: dict[int, str]) -> Path:
    """A new shard of `folder`: samples flattened into one id array, and which indices were rejected and why."""
    taken = {path.name for path in shard_paths(folder)}  # one that was damaged and removed leaves a gap
    name = next(name for number in count() if (name := f"shard-{number:05d}.safetensors") not in taken)
    lengths = [len(sample.token_ids) for sample in samples]
    tensors = {
        "token_ids": np.concatenate(
            [np.asarray(s.token_ids, dtype=np.int32) for s in samples] or [np.zeros(0, np.int32)]
        ),
        "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        "prompt_lens": np.asarray([s.prompt_len for s in samples], dtype=np.int32),
        "index": np.asarray([s.index for s in samples], dtype=np.int64),
        "temperature": np.asarray([s.temperature for s in samples], dtype=np.float32),
        "held_out": np.asarray([s.held_out for s in samples], dtype=np.uint8),
        "rejected_index": np.asarray(sorted(rejected), dtype=np.int64),
    }
    reasons = {"rejected": json.dumps(Counter(rejected.values()))}
    path = folder / name
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata=reasons))
    return path


def read_shard(path: Path) -> tuple[list[Sample], list[int], dict[str, int]]:
    """Samples, rejected indices, and how often each reason occurred. UserError when the file is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            reasons = json.loads(file.metadata()["rejected"])
    except (SafetensorError, OSError) as error:
        raise UserError(f"The data shard {path} is damaged ({error}). Remove it and run make_data again.") from error
    offsets = tensors["offsets"]
    samples = [
        Sample(
            index=int(tensors["index"][i]),
            token_ids=tensors["token_ids"][offsets[i] : offsets[i + 1]].tolist(),
            prompt_len=int(tensors["prompt_lens"][i]),
            temperature=float(tensors["temperature"][i]),
            held_out=bool(tensors["held_out"][i]),
        )
        for i in range(len(offsets) - 1)
    ]
    return samples, tensors["rejected_index"].tolist(), reasons


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def write_manifest(
    folder: Path, config: DataConfig, target: dict[str, Any], prompts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Rebuild manifest.json from the shards: what is in the folder, made by which settings from which target, and from
    which prompts (their number and hash; None: its own).
    """
    shards, rejected, all_samples = [], Counter[str](), list[Sample]()
    for path in shard_paths(folder):
        samples, _, reasons = read_shard(path)
        rejected.update(reasons)
        all_samples += samples
        shards.append(
            {
                "file": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "samples": len(samples),
                "prompt_tokens": sum(sample.prompt_len for sample in samples),
                "answer_tokens": sum(sample.answer_len for sample in samples),
            }
        )
    manifest = {
        "format": FORMAT,
        "target": target,
        "prompts": prompts,
        "settings": asdict(config),
        "totals": _totals(all_samples),
        "rejected_prompts": dict(sorted(rejected.items())),
        "shards": shards,
    }
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / MANIFEST, lambda partial: partial.write_text(text))
    return manifest


def _totals(samples: Sequence[Sample]) -> dict[str, int]:
    totals = {f"{split}_{what}": 0 for split in ("train", "held_out") for what in ("samples", "answer_tokens")}
    for sample in samples:
        split = "held_out" if sample.held_out else "train"
        totals[f"{split}_samples"] += 1
        totals[f"{split}_answer_tokens"] += sample.answer_len
    return totals


def read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.exists() else None


def lists_all(manifest: dict[str, Any], folder: Path) -> bool:
    """Whether the manifest lists the shards that there are, and no other."""
    return [shard["file"] for shard in manifest["shards"]] == [path.name for path in shard_paths(folder)]


def check_same_settings(
    folder: Path, config: DataConfig, target: dict[str, Any], prompts: dict[str, Any] | None = None
) -> None:
    """Adding to a folder needs the settings, target and prompts it was begun with. UserError names what differs."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    begun_with = manifest.get("prompts", prompts)  # folders of an older version do not say
    old = {**manifest["settings"], "target": manifest["target"]["fingerprint"], "prompts": begun_with}
    new = {**asdict(config), "target": target["fingerprint"], "prompts": prompts}
    names = [f.name for f in fields(config) if f.name not in HOW_MUCH] + ["target", "prompts"]
    different = [f"{name}: {old.get(name)!r} there, {new[name]!r} now" for name in names if old.get(name) != new[name]]
    if different:
        raise UserError(
            f"{folder} holds data made with other settings ({'; '.join(different)}). Give another out=<folder>, or the "
            "old settings to add to it."
        )


def load_dataset(folders: str | Path | Sequence[str | Path], num_shards: int | None = None) -> Dataset:
    """Every sample that the manifests of one or several folders list, the hashes checked; num_shards: of the first so
    many shards of each folder, to which the manifest's shards and totals then keep.

    Raises UserError: no data there, a folder given twice, a shard missing or changed, no answers to learn from or none
    held out.
    """
    if num_shards is not None and num_shards < 1:
        raise UserError(f"data_shards={num_shards} must be at least 1, or null for all.")
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    paths = [Path(folder).expanduser() for folder in given]
    if not paths or len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"data={[str(path) for path in paths]}: give one or several data folders, each once.")
    shards: list[Shard] = []
    manifests: dict[Path, dict[str, Any]] = {}
    digests: list[str] = []
    for number, folder in enumerate(paths):
        manifest = read_manifest(folder)
        if manifest is None or not manifest["shards"]:
            raise UserError(f"No training data in {folder}. Make some: python experiments/make_data.py out={folder}")
        digests.append(hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())
        there = len(manifest["shards"])
        manifest["shards"] = manifest["shards"][:num_shards]
        read = _shards(folder, manifest, first_index=number * FOLDER_STRIDE)
        if len(read) < there:  # the same beginning has the same name, however much is added behind it
            manifest |= {"of_shards": there, "totals": _totals([sample for shard in read for sample in shard.samples])}
            settings = {name: value for name, value in manifest["settings"].items() if name not in HOW_MUCH}
            made_from = [manifest["target"], settings, manifest.get("prompts"), [shard.sha256 for shard in read]]
            digests[-1] = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        manifests[folder] = manifest
        shards += read
    # The order does not depend on which text was finished first.
    samples = sorted((sample for shard in shards for sample in shard.samples), key=lambda sample: sample.index)
    samples = [s for s in samples if s.answer_len > 0 and s.prompt_len > 0]  # others hold no label
    held_out = [s for s in samples if s.held_out]
    heard = {tuple(s.token_ids[: s.prompt_len]) for s in held_out} if len(paths) > 1 else set()
    train = [s for s in samples if not s.held_out and tuple(s.token_ids[: s.prompt_len]) not in heard]
    remedy = "Make more data, or set held_out_share." if num_shards is None else "Give more data_shards."
    for name, split in (("training", train), ("held-out", held_out)):
        if not split:
            raise UserError(
                f"The {name} split of {', '.join(map(str, paths))} has no answer tokens: there would be nothing to "
                f"learn from or to validate on. {remedy}"
            )
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    return Dataset(train, held_out, shards, manifests, digest)


def _shards(folder: Path, manifest: dict[str, Any], first_index: int) -> list[Shard]:
    shards = []
    for listed in manifest["shards"]:
        path = folder / listed["file"]
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != listed["sha256"]:
            raise UserError(f"{path} is missing or not the file the manifest lists. Remove it and run make_data again.")
        samples = [replace(sample, index=first_index + sample.index) for sample in read_shard(path)[0]]
        shards.append(Shard(path, listed["sha256"], samples))
    return shards


def check_made_by(dataset: Dataset, identity: dict[str, Any]) -> None:
    """UserError when the data was made by another target or under another chat template than `identity` says."""
    for folder, manifest in dataset.manifests.items():
        made_by = manifest["target"]
        for what in ("fingerprint", "template"):
            if made_by[what] != identity[what]:
                raise UserError(
                    f"The data in {folder} was made by target {made_by['name']!r} with {what} {made_by[what]}, but "
                    f"this target ({identity['name']!r}) has {identity[what]}. A draft learns from its own target's "
                    "text: make data with this one, or give the target (and tokenizer) it was made with."
                )
