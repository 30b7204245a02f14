"""Prompts about a text: summaries, questions, translations and the like of what the target has written before.

Asked freely, a chat model writes short questions; people also hand it a page and want something done with it. The page
here is an answer of an earlier data folder, the task a template around it. Nothing comes from outside.

A template is a text with one of {passage} (the answer's whole sentences, up to `max_words`), {sentences} (one to three
of them) or {code} (its first fenced block), and if it likes {question} (the prompt that was answered so) and {choice}
(one of `choices`). Templates are grouped by kind; every kind comes up equally often.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from selfspec.errors import UserError
from selfspec.training.data import Sample, load_dataset
from selfspec.training.prompt_sources import GivenPrompt
from selfspec.training.self_prompts import template_of

FIELDS = ("passage", "sentences", "code", "question", "choice")
FIELD = re.compile(r"\{(\w+)\}")
CODE = re.compile(r"```\w*\n(.+?)```", re.DOTALL)


@dataclass
class PassageConfig:
    """Which texts (`data`: a folder of make_data.py; null: source not used), how many prompts, and the templates."""

    data: str | None = None
    count: int = 4000
    min_words: int = 25
    max_words: int = 180
    templates: dict[str, list[str]] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.count < 1 or not 1 <= self.min_words <= self.max_words:
            raise UserError("passages: count must be at least 1, and 1 <= min_words <= max_words.")
        for kind, templates in self.templates.items():
            if not templates:
                raise UserError(f"passages.templates.{kind} is empty. Give it a template, or leave the kind out.")
            for template in templates:
                names = FIELD.findall(template)
                if set(names) - set(FIELDS) or not set(names) & {"passage", "sentences", "code"}:
                    raise UserError(
                        f"passages.templates.{kind}: {template!r} must hold {{passage}}, {{sentences}} or {{code}}, "
                        f"and no other field than {', '.join(FIELDS)}."
                    )
                if "choice" in names and not self.choices:
                    raise UserError(f"passages.templates.{kind} asks for {{choice}}, but passages.choices is empty.")


def passage_prompts(config: PassageConfig, tokenizer: Any, seed: int) -> list[GivenPrompt]:
    """`count` prompts, fewer where the texts do not carry so many. The texts are gone through in a random order, again
    and again. All prompts of one text share its `origin`, so that none of it is on both sides of the held-out split.

    UserError: no data there, no templates, or no text that fits any.
    """
    assert config.data is not None
    if not config.templates:
        raise UserError("passages.templates is empty: there is nothing to ask about the passages.")
    dataset = load_dataset(Path(config.data))
    samples = [*dataset.train, *dataset.held_out]
    template = template_of(tokenizer)
    kinds = sorted(config.templates)
    prompts: dict[str, GivenPrompt] = {}  # by their text: each is asked once
    for turn in range(max(1, 4 * config.count // len(samples))):
        order = np.random.Generator(np.random.Philox(key=[seed, turn])).permutation(len(samples))
        for number in order.tolist():
            draw = np.random.Generator(np.random.Philox(key=[seed + 1, turn * len(samples) + number]))
            kind = kinds[(turn + number) % len(kinds)]
            asked = str(draw.choice(config.templates[kind]))
            question = _question(samples[number], tokenizer, template.before, template.after)
            filled = fill(asked, _answer(samples[number], tokenizer), question, config, draw)
            if filled is not None:
                prompts.setdefault(filled, GivenPrompt(filled, origin=question))
            if len(prompts) == config.count:
                return list(prompts.values())
    if not prompts:
        raise UserError(f"No answer in {config.data} fits a template: they need {config.min_words} words or more.")
    return list(prompts.values())


def fill(template: str, text: str, question: str, config: PassageConfig, draw: np.random.Generator) -> str | None:
    """The template about `text`, or None where the text does not have what it asks for."""
    values = {"question": question, "choice": str(draw.choice(config.choices)) if config.choices else ""}
    names = FIELD.findall(template)
    if "code" in names:
        block = CODE.search(text)
        if block is None or len(block[1].split()) > config.max_words:
            return None
        values["code"] = block[1].rstrip()
    ends = [end for end in sentence_ends(text) if len(text[:end].split()) <= config.max_words]
    if "passage" in names:
        values["passage"] = text[: ends[-1]].strip() if ends else ""
        if len(values["passage"].split()) < config.min_words:
            return None
    if "sentences" in names:
        sentences = [text[begin:end].strip() for begin, end in pairwise([0, *ends])]
        plain = [sentence for sentence in sentences if sentence.count(" ") >= 4 and "\n" not in sentence]
        if not plain:
            return None
        first = int(draw.integers(len(plain)))
        values["sentences"] = " ".join(plain[first : first + int(draw.integers(1, 4))])
    return FIELD.sub(lambda match: values[match[1]], template)


def sentence_ends(text: str) -> list[int]:
    """Where the text's sentences end; not where a list's number does ("2. ")."""
    return [match.end() for match in re.finditer(r"(?<!\d)[.!?](?=\s|$)", text)]


def _answer(sample: Sample, tokenizer: Any) -> str:
    return str(tokenizer.decode(sample.token_ids[sample.prompt_len :], skip_special_tokens=True))


def _question(sample: Sample, tokenizer: Any, before: str, after: str) -> str:
    text = str(tokenizer.decode(sample.token_ids[: sample.prompt_len]))
    return text.removeprefix(before).removesuffix(after).strip()
