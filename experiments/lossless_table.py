"""The equality table: drafters x transforms x K, each output compared token for token with decoding without a draft.

    python experiments/lossless_table.py [--real] [out=table.md]

Greedy outputs must be `model.generate`'s (where transformers has the setting, else the autoregressive ones of the same
loop); sampled ones, with acceptance="coupled", the autoregressive ones of the same seed. Prompts of unequal length
share a batch. The target is a tiny random model (under a minute), with --real SmolLM2-135M in float32 (some minutes).
Exits with 1 if an output differs. What holds in distribution only is tested by tests/statistical.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfspec
from selfspec.decoding.requests import encode_prompt
from selfspec.drafters import Drafter

ROOT = Path(__file__).resolve().parent.parent
Tokens = list[int]


def avoid_recent(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A caller's own processor: lowers the last three tokens and forbids the one of four tokens ago."""
    scores = scores.clone()
    scores[0, input_ids[0, -3:]] -= 4.0
    if input_ids.shape[1] >= 4:
        scores[0, input_ids[0, -4]] = -math.inf
    return scores


@dataclass(frozen=True)
class Transform:
    """What decode is asked for, and what generate is (None: transformers has no such setting, or it is sampled)."""

    name: str
    settings: dict[str, Any]
    generate: dict[str, Any] | None = None
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()


EVERYTHING = dict(repetition_penalty=1.3, no_repeat_ngram_size=3, suppress_tokens=(11,), logit_bias={6: 2.0})
GREEDY = (
    Transform("greedy", {}, {}),
    Transform("repetition penalty", dict(repetition_penalty=1.5), dict(repetition_penalty=1.5)),
    Transform("no repeated 2-gram", dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    Transform("presence penalty", dict(presence_penalty=3.0)),
    Transform("frequency penalty", dict(frequency_penalty=1.5)),
    Transform(
        "bias, suppressed tokens",
        dict(suppress_tokens=(11, 20), logit_bias={6: 3.0, 4: -math.inf}),
        dict(suppress_tokens=[11, 20], sequence_bias=[[[6], 3.0], [[4], -math.inf]]),
    ),
    Transform("own processor", {}, dict(logits_processor=[avoid_recent]), (avoid_recent,)),
    Transform(
        "all of these",
        EVERYTHING,
        dict(
            repetition_penalty=1.3,
            no_repeat_ngram_size=3,
            suppress_tokens=[11],
            sequence_bias=[[[6], 2.0]],
            logits_processor=[avoid_recent],
        ),
        (avoid_recent,),
    ),
)
SAMPLED = (
    Transform("T=1", dict(temperature=1.0)),
    Transform("T=0.8, top-k 20", dict(temperature=0.8, top_k=20)),
    Transform("T=0.8, top-p 0.9", dict(temperature=0.8, top_p=0.9)),
    Transform("T=0.8, min-p 0.05", dict(temperature=0.8, min_p=0.05)),
    Transform(
        "T=0.8, top-p 0.9, all of the greedy ones",
        dict(temperature=0.8, top_p=0.9, **EVERYTHING),
        None,
        (avoid_recent,),
    ),
)


@dataclass
class Study:
    """A target, prompts and drafters to be compared on."""

    target: selfspec.Target
    prompts: list[Tokens]
    drafters: dict[str, Drafter]
    lookaheads: tuple[int, ...]
    transforms: tuple[Transform, ...]
    num_new: int
    rows: int
    sizes: str
    _references: dict[str, tuple[str, list[Tokens]]] = field(default_factory=dict)

    def decode(self, transform: Transform, drafter: Drafter | None, lookahead: int, rows: int) -> list[Tokens]:
        outputs = selfspec.decode(
            self.target,
            drafter,
            self.prompts,
            max_new_tokens=self.num_new,
            lookahead=lookahead,
            sampling=selfspec.Sampling(**transform.settings),
            acceptance="coupled",  # at temperature 0 that is greedy
            processors=transform.processors,
            seed=1,
            ignore_eos=True,
            max_batch_rows=rows,
        )
        return [output.token_ids for output in outputs]

    def reference(self, transform: Transform) -> tuple[str, list[Tokens]]:
        """What the outputs must be, and where it comes from."""
        if transform.name not in self._references:
            if transform.generate is None:
                found = ("no draft, one row", self.decode(transform, None, 1, rows=1))
            else:
                found = ("generate", [self.generated(prompt, transform.generate) for prompt in self.prompts])
            self._references[transform.name] = found
        return self._references[transform.name]

    def generated(self, prompt: Tokens, settings: dict[str, Any]) -> Tokens:
        model, ids = self.target.hf_model, torch.tensor([prompt])
        fixed = dict(max_new_tokens=self.num_new, do_sample=False, eos_token_id=None, pad_token_id=0)
        given = dict(attention_mask=torch.ones_like(ids), **fixed, **settings)
        return model.generate(ids, **given)[0, len(prompt) :].tolist()


def tiny() -> Study:
    sys.path.append(str(ROOT / "tests"))
    models = importlib.import_module("tiny_models")
    build = functools.partial(models.tiny_llama, vocab_size=48)
    target = selfspec.wrap_target(build(seed=3))
    small = selfspec.wrap_target(build(seed=5, num_layers=2))
    lengths = (9, 1, 70, 2, 17, 33)
    return Study(
        target,
        [models.prompt_ids(length, seed=length, vocab_size=48) for length in lengths],
        {
            "early exit, layer 1 of 4": selfspec.build_drafter("early_exit", target, exit_layer=1),
            "early exit, layer 3 of 4": selfspec.build_drafter("early_exit", target, exit_layer=3),
            "layer 3, 24 of 48 tokens": selfspec.build_drafter("early_exit", target, exit_layer=3, d_vocab=24),
            "independent": selfspec.build_drafter("independent", target, model=small),
            "the target itself": selfspec.build_drafter("independent", target, model=target),
            "n-gram": selfspec.build_drafter("ngram", target),
        },
        lookaheads=(1, 2, 3, 4, 5),
        transforms=GREEDY + SAMPLED,
        num_new=24,
        rows=4,
        sizes=f"a random Llama of 4 layers and 48 tokens; prompts of {', '.join(map(str, lengths))} tokens",
    )


TEXTS = (
    "The three most common elements in the crust of the Earth are",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA:",
)


def real() -> Study:
    target = selfspec.load_target("smollm2-135m", dtype="float32", device="cpu")
    prompts = [encode_prompt(target, text) for text in TEXTS]
    trained = ROOT / "experiments" / "smollm2" / "drafts" / "independent"
    drafters = {
        "early exit, layer 26 of 30": selfspec.build_drafter("early_exit", target, exit_layer=26),
        "n-gram": selfspec.build_drafter("ngram", target),
    }
    if trained.is_dir():
        drafters["independent"] = selfspec.build_drafter("independent", target, model=str(trained))
    return Study(
        target,
        prompts,
        drafters,
        lookaheads=(1, 4),
        transforms=(GREEDY[0], GREEDY[-1], SAMPLED[2], SAMPLED[-1]),
        num_new=32,
        rows=3,
        sizes=f"SmolLM2-135M-Instruct; prompts of {', '.join(str(len(ids)) for ids in prompts)} tokens",
    )


def rows_of(study: Study) -> tuple[list[list[str]], int, int]:
    """Lines of the table, and how many outputs are equal of how many."""
    lines, equal, total = [], 0, 0
    for transform in study.transforms:
        source, expected = study.reference(transform)
        for lookahead in study.lookaheads:
            line = [transform.name, source, str(lookahead)]
            for drafter in (None, *study.drafters.values()):
                if drafter is None and lookahead != study.lookaheads[0]:
                    line.append("")  # nothing is drafted: the same for every K
                    continue
                decoded = study.decode(transform, drafter, lookahead, study.rows)
                same = sum(got == want for got, want in zip(decoded, expected, strict=True))
                equal, total = equal + same, total + len(expected)
                line.append(f"{same}/{len(expected)}" if same == len(expected) else f"**{same}/{len(expected)}**")
            lines.append(line)
            print(" | ".join(line), file=sys.stderr, flush=True)
    return lines, equal, total


def table(study: Study, lines: Sequence[Sequence[str]], equal: int, total: int, command: str) -> str:
    header = ["transform", "must equal", "K", "no draft", *study.drafters]
    caption = (
        f"Outputs equal token for token, of all outputs: {equal} of {total}. Target: {study.sizes}; {study.num_new} "
        f"new tokens each, {study.rows} rows at a time, float32. torch {torch.__version__}, transformers "
        f"{version('transformers')}, selfspec {selfspec.__version__}. Made with `{command}`."
    )
    body = [header, ["---"] * len(header), *lines]
    return "\n".join(["# Exact equality", "", caption, "", *("| " + " | ".join(line) + " |" for line in body), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description="The equality table: drafters x transforms x K.")
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M in float32 instead of a tiny random model")
    parser.add_argument("out", nargs="?", default="", help="out=FILE: write the table there instead of printing it")
    given = parser.parse_args()
    if given.out and not given.out.startswith("out="):
        parser.error(f"{given.out!r} is not understood; write out=FILE")
    torch.set_num_threads(min(2, torch.get_num_threads()) if given.real else 1)
    study = real() if given.real else tiny()
    lines, equal, total = rows_of(study)
    path = given.out.removeprefix("out=")
    command = " ".join(["python experiments/lossless_table.py", *(["--real"] if given.real else []), given.out]).strip()
    text = table(study, lines, equal, total, command)
    if path:
        Path(path).write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
