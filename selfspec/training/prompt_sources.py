"""Prompts that others wrote: a JSON-lines file, or a dataset from the Hugging Face hub or a folder.

A hub dataset is named with the commit it is read at: the same command then gives the same prompts next year. `datasets`
is imported only when one is asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from selfspec.errors import UserError


class GivenPrompt(NamedTuple):
    """A prompt that is answered as it is. Prompts of one origin fall on the same side of the held-out split."""

    text: str
    origin: str

    @classmethod
    def of(cls, prompt: str | GivenPrompt) -> GivenPrompt:
        return prompt if isinstance(prompt, GivenPrompt) else cls(prompt, prompt)


COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class PromptDatasetConfig:
    """A dataset of prompts. `column` holds a text, a list of texts (turns) or of chat messages: the first user turn is
    used. `split` may be sliced: train[:50000].
    """

    path: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "prompt"


def prompts_digest(prompts: Sequence[GivenPrompt] | None) -> dict[str, Any] | None:
    """What the manifest says of given prompts; None when the target writes them itself."""
    if prompts is None:
        return None
    text = json.dumps([prompt.text for prompt in prompts], ensure_ascii=False)
    return {"count": len(prompts), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a JSON-lines file: each line an object with "prompt" (text) or "turns" (its first one is used)."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"No prompt file at {path}.")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"] if "prompt" in entry else entry["turns"][0]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise UserError(f'{path}, line {number}: expected {{"prompt": "..."}} or {{"turns": ["..."]}}.') from error
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"{path}, line {number}: the prompt is empty or not a text.")
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompts.")
    return prompts


def read_dataset(config: PromptDatasetConfig) -> list[str]:
    """The prompts of a dataset. UserError: `datasets` is not installed, no such dataset, split or column, not reachable
    from here, a hub name without a commit, an entry that is no prompt.
    """
    assert config.path is not None
    local = Path(config.path).expanduser()
    if not local.exists() and not (config.revision and COMMIT.fullmatch(config.revision)):
        raise UserError(
            f"prompt_dataset.revision={config.revision} does not pin {config.path}: give the commit, 40 hex digits "
            "(on the dataset's page under 'Files and versions'). A folder with parquet or JSON-lines files needs none."
        )
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "Prompts from a dataset need the package 'datasets': pip install 'selfspec[data]'. Or give prompt_file="
            "<jsonl with a 'prompt' per line>."
        ) from error
    where = f"{config.path} (split {config.split})"
    try:
        if local.is_file():
            kind = "parquet" if local.suffix == ".parquet" else "json"
            found = datasets.load_dataset(kind, data_files=str(local), split=config.split)
        else:
            name = str(local) if local.exists() else config.path
            found = datasets.load_dataset(name, revision=config.revision, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"Cannot read the dataset {where}: {str(error).splitlines()[0]}. Check its name, revision and split; where "
            "there is no network, give a folder with its parquet files."
        ) from error
    if config.column not in found.column_names:
        raise UserError(
            f"The dataset {where} has no column {config.column!r}. Give prompt_dataset.column, one of: "
            f"{', '.join(found.column_names)}."
        )
    prompts = [first_turn(value) for value in found[config.column]]
    if None in prompts:
        raise UserError(
            f"The dataset {where}, entry {prompts.index(None)}: column {config.column!r} holds no prompt, but "
            f"{found[prompts.index(None)][config.column]!r:.80}. A text, a list of texts or a list of chat messages "
            "is needed."
        )
    texts = [prompt for prompt in prompts if prompt]
    if not texts:
        raise UserError(f"The dataset {where} holds no prompts.")
    return texts


def first_turn(value: Any) -> str | None:
    """The first user turn of an entry; "" for an empty one, None when it is not of a kind that holds prompts."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, list):
        return None
    if not value:
        return ""
    if isinstance(value[0], str):
        return value[0].strip()
    for message in value:
        if isinstance(message, dict) and message.get("role", message.get("from")) in ("user", "human"):
            content = message.get("content", message.get("value"))
            return content.strip() if isinstance(content, str) else None
    return None
