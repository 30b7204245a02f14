"""Prompt sets: the bundled `selfspec48`, Spec-Bench's own file, or any JSONL of the user's. No torch, no network.

One JSON object per line. What is read from it (other keys are left alone, so Spec-Bench's `reference` may stay):

    prompt_id | question_id | id    text or number, unique in the file; without one: a hash of the turns
    category                        text; without one: "default"
    turns | prompt                  a list of user turns, or one text

Cost: the file is read whole, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import UserError

DATA_DIR = Path(__file__).parent / "prompts_data"
ID_KEYS = ("prompt_id", "question_id", "id")
CONFIG_KEYS = ("name", "path", "categories", "limit")
FORMAT = (
    'Each line is one JSON object: {"prompt_id": ..., "category": ..., "turns": ["..."]}; "question_id" or "id" may '
    'stand for "prompt_id" and "prompt": "..." for one turn.'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `turns` are the user's turns, in order; the model's answers belong between them."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]


def bundled_sets() -> list[str]:
    """The names that `load_prompts` knows without a path."""
    return sorted(path.stem for path in DATA_DIR.glob("*.jsonl"))


def load_prompts(
    name_or_path: str | Path, categories: Sequence[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a bundled set or of a JSONL file, in the file's order.

    `categories` keeps only these. `limit` keeps at most that many, taken evenly: the first of every category, then
    the second of every category, and so on; the same arguments always give the same prompts.
    Raises UserError: unknown set, unreadable line (with its number), duplicate id, unknown category, limit below 1.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"prompts: limit={limit!r} is not allowed. Give 1 or more, or null for all prompts.")
    path = _find(name_or_path)
    prompts = _read(path)
    if categories is not None:
        prompts = _keep_categories(prompts, categories, path)
    return prompts if limit is None else take_evenly(prompts, limit)


def prompts_from_config(config: Mapping[str, Any]) -> list[Prompt]:
    """The prompts a conf/prompts file asks for: `name` (bundled) or `path` (JSONL), `categories`, `limit`."""
    unknown = sorted(set(config) - set(CONFIG_KEYS))
    if unknown:
        raise UserError(f"prompts.{unknown[0]} is unknown. Allowed: {', '.join(CONFIG_KEYS)}.")
    name, path, categories = config.get("name"), config.get("path"), config.get("categories")
    if (name is None) == (path is None):
        raise UserError(
            f"prompts: give either a name ({', '.join(bundled_sets())}) or a path (a .jsonl file), "
            f"not {'both' if name is not None else 'neither'}."
        )
    if categories is not None and (isinstance(categories, str) or not isinstance(categories, Sequence)):
        raise UserError(f"prompts.categories={categories!r} is not a list. Give for example [math,code], or null.")
    if name is not None and name not in bundled_sets():
        raise _unknown_set(str(name))
    return load_prompts(name if name is not None else Path(str(path)), categories, config.get("limit"))


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 of ids, categories and turns, in order: two runs with equal hashes decoded the same prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.category, list(prompt.turns)]).encode() + b"\n")
    return digest.hexdigest()


def take_evenly(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, by rounds over the categories in their order of appearance; file order is kept."""
    rank_in_category: dict[str, int] = {}
    category_order: dict[str, int] = {}
    keys: list[tuple[int, int, int]] = []  # (rank within the category, the category's place, place in the file)
    for index, prompt in enumerate(prompts):
        place = category_order.setdefault(prompt.category, len(category_order))
        rank = rank_in_category.get(prompt.category, 0)
        rank_in_category[prompt.category] = rank + 1
        keys.append((rank, place, index))
    return [prompts[index] for index in sorted(index for _, _, index in sorted(keys)[:limit])]


def _find(name_or_path: str | Path) -> Path:
    if isinstance(name_or_path, str) and name_or_path in bundled_sets():
        return DATA_DIR / f"{name_or_path}.jsonl"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"prompts: {path} is a folder. Give a .jsonl file, or one of: {', '.join(bundled_sets())}.")
    raise _unknown_set(str(name_or_path))


def _unknown_set(given: str) -> UserError:
    return UserError(
        f"prompts: {given!r} is neither a bundled set nor a file. Bundled: {', '.join(bundled_sets())}; "
        "for your own prompts give the path of a .jsonl file."
    )


def _keep_categories(prompts: list[Prompt], categories: Sequence[str], path: Path) -> list[Prompt]:
    present = dict.fromkeys(prompt.category for prompt in prompts)
    for category in categories:
        if category not in present:
            raise UserError(f"prompts: {path.name} has no category {category!r}. It has: {', '.join(present)}.")
    wanted = set(categories)
    if not wanted:
        raise UserError(
            f"prompts: categories=[] leaves no prompt. {path.name} has: {', '.join(present)}; null for all."
        )
    return [prompt for prompt in prompts if prompt.category in wanted]


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: texts may hold U+2028
    except UnicodeDecodeError as error:
        raise UserError(f"prompts: {path} is not UTF-8 text (byte {error.start}). {FORMAT}") from error
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}, line {number}")
        if prompt.prompt_id in line_of_id:
            first = line_of_id[prompt.prompt_id]
            raise UserError(
                f"prompts: {path}, lines {first} and {number} both are {prompt.prompt_id!r}. "
                "Results are kept by id: give every prompt its own."
            )
        line_of_id[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"prompts: {path} holds no prompt. {FORMAT}")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"prompts: {where} is not JSON ({error.msg} at column {error.colno}). {FORMAT}") from error
    if not isinstance(entry, dict):
        raise UserError(f"prompts: {where} is a {type(entry).__name__}, not an object. {FORMAT}")
    turns = _turns(entry, where)
    category = entry.get("category", "default")
    if not isinstance(category, str) or not category.strip():
        raise UserError(f"prompts: {where}: category={category!r} is not a text. {FORMAT}")
    return Prompt(_id(entry, turns, where), category, turns)


def _turns(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    if ("turns" in entry) == ("prompt" in entry):
        problem = 'both "turns" and "prompt"' if "turns" in entry else 'neither "turns" nor "prompt"'
        raise UserError(f"prompts: {where} has {problem} (its keys: {', '.join(entry) or 'none'}). {FORMAT}")
    turns = entry["turns"] if "turns" in entry else [entry["prompt"]]
    if not isinstance(turns, list) or not turns:
        raise UserError(f'prompts: {where}: "turns" is not a list with at least one text. {FORMAT}')
    for place, turn in enumerate(turns, 1):
        if not isinstance(turn, str) or not turn.strip():
            raise UserError(f"prompts: {where}: turn {place} is {turn!r}, not a text with something in it. {FORMAT}")
    return tuple(turns)


def _id(entry: dict[str, Any], turns: tuple[str, ...], where: str) -> str:
    given = [key for key in ID_KEYS if key in entry]
    if len(given) > 1:
        raise UserError(f"prompts: {where} has {' and '.join(given)}. Keep one of them.")
    if not given:
        return hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:12]
    value = entry[given[0]]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise UserError(f"prompts: {where}: {given[0]}={value!r} is neither a text nor a whole number. {FORMAT}")
    return str(value)
