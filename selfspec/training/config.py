"""What the two training entry points are asked to do: typed, an unknown key or a wrong type is a UserError."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.config import RuntimeConfig, TargetConfig
from selfspec.errors import UserError
from selfspec.target.fastest import fastest_dtype
from selfspec.target.loading import choose_device
from selfspec.training.data import DataConfig
from selfspec.training.passage_prompts import PassageConfig, passage_prompts
from selfspec.training.processes import Processes
from selfspec.training.prompt_sources import GivenPrompt, PromptDatasetConfig, read_dataset, read_prompts
from selfspec.training.trainer import ALONE, TrainConfig


@dataclass
class MakeDataConfig:
    """experiments/make_data.py. Prompts: of a file, of a dataset, about texts of an earlier folder; with none of them,
    the target writes them.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    out: str = MISSING
    prompt_file: str | None = None
    prompt_dataset: PromptDatasetConfig = field(default_factory=PromptDatasetConfig)
    passages: PassageConfig = field(default_factory=PassageConfig)
    draft_vocab: str | None = None
    draft_vocab_data: list[str] = field(default_factory=list)
    observe_layers: list[int] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        sources = {
            "prompt_file": self.prompt_file,
            "prompt_dataset.path": self.prompt_dataset.path,
            "passages.data": self.passages.data,
        }
        given = [name for name, value in sources.items() if value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are several sources of prompts. Give one of them.")

    def prompts(self, tokenizer: Any) -> list[GivenPrompt] | None:
        if self.passages.data:
            return passage_prompts(self.passages, tokenizer, self.data.seed)
        if self.prompt_dataset.path:
            return [GivenPrompt.of(prompt) for prompt in read_dataset(self.prompt_dataset)]
        return [GivenPrompt.of(prompt) for prompt in read_prompts(self.prompt_file)] if self.prompt_file else None


@dataclass
class TrainJobConfig:
    """experiments/train.py. `drafter` is the same group as when decoding; only its kind matters here."""

    target: TargetConfig = field(default_factory=TargetConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    drafter: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)  # the draft's own shape; checked by what builds it
    draft_defaults: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind; `draft` goes before them
    train: TrainConfig = field(default_factory=TrainConfig)
    data: Any = MISSING  # a data folder, or a list of them
    data_shards: int | None = None  # of each folder, the first so many
    out: str = MISSING
    tracking: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folders = [self.data] if isinstance(self.data, str) else self.data
        if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
            raise UserError(f"data={self.data!r} must be a data folder, or a list of them: 'data=[data/a,data/b]'.")

    def draft_options(self) -> dict[str, Any]:
        return {**self.draft_defaults.get(str(self.drafter.get("kind")), {}), **self.draft}


Job = TypeVar("Job")


def resolve_job(schema: type[Job], composed: DictConfig) -> Job:
    """The composed config as a checked instance of `schema`; UserError names the key that is unknown or mistyped."""
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(plain))
        # The drafter group is written for decoding: the path it wants there is what training makes here.
        missing = sorted(str(key) for key in OmegaConf.missing_keys(typed) if not str(key).startswith("drafter."))
        if missing:
            raise UserError(f"No value for {', '.join(missing)}. Give it on the command line: {missing[0]}=...")
        if isinstance(plain.get("drafter"), dict):
            typed.drafter = {"kind": plain["drafter"].get("kind")}
        job = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        problem = str(error.msg or error).splitlines()[0]
        raise UserError(f"Bad value for {error.full_key or 'the config'}: {problem}.") from error
    assert isinstance(job, schema)
    if getattr(getattr(job, "runtime", None), "tensor_parallel", 1) > 1:
        raise UserError("runtime.tensor_parallel is for compare.py and generate.py. Leave it at 1 here.")
    return job


def settled_dtype(runtime: RuntimeConfig, processes: Processes = ALONE) -> str:
    """The target's dtype; `fastest` is decided by the first process's clock for all of them, and said."""
    if runtime.dtype != "fastest":
        return runtime.dtype
    device = choose_device(runtime.device)
    choice = fastest_dtype(device)
    if processes.first:
        print(f"runtime.dtype=fastest is {choice.reason}", file=sys.stderr)
    return "bfloat16" if processes.decided_by_first(choice.dtype == torch.bfloat16, device) else "float32"
