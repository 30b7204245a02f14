"""What the two training entry points are asked to do: typed, an unknown key or a wrong type is a UserError."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec.config import RuntimeConfig, TargetConfig
from selfspec.errors import UserError
from selfspec.training.data import DataConfig
from selfspec.training.prompt_sources import PromptDatasetConfig, read_dataset, read_prompts
from selfspec.training.trainer import TrainConfig


@dataclass
class MakeDataConfig:
    """experiments/make_data.py. Prompts: of a file, or of a dataset; with neither, the target writes them."""

    target: TargetConfig = field(default_factory=TargetConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    out: str = MISSING
    prompt_file: str | None = None
    prompt_dataset: PromptDatasetConfig = field(default_factory=PromptDatasetConfig)
    draft_vocab: str | None = None
    observe_layers: list[int] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.prompt_file and self.prompt_dataset.path:
            raise UserError("prompt_file and prompt_dataset.path are two sources of prompts. Give one of them.")

    def prompts(self) -> list[str] | None:
        if self.prompt_dataset.path:
            return read_dataset(self.prompt_dataset)
        return read_prompts(self.prompt_file) if self.prompt_file else None


@dataclass
class TrainJobConfig:
    """experiments/train.py. `drafter` is the same group as when decoding; only its kind matters here."""

    target: TargetConfig = field(default_factory=TargetConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    drafter: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)  # the draft's own shape; checked by what builds it
    draft_defaults: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind; `draft` goes before them
    train: TrainConfig = field(default_factory=TrainConfig)
    data: str = MISSING
    out: str = MISSING
    tracking: dict[str, Any] = field(default_factory=dict)

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
    return job
