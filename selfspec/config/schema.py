"""The keys of a config, their types and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    """Where and in which precision. `auto`: a CUDA device in bfloat16 if there is one, else CPU in float32; dtype
    `fastest`: on a CPU what it decodes faster in.
    """

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
