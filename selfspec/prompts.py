"""Prompt sets: the bundled ones, Spec-Bench's own file, or any JSONL of the user's. No torch, no network.

One JSON object per line. What is read from it (other keys are left alone):

    prompt_id | question_id | id    text or number, unique in the file; without one: a hash of the turns
    category                        text; without one: "default"
    turns | prompt                  a list of user turns, or one text
    reference                       a right answer, text or a list of texts (the first counts); may be left out
    split                           "tune" or "report"; without one: "report"

Settings are chosen on one split and reported on the other: what was chosen for being high on a set of prompts reads too
high there. A set that marks no split is all for reporting; only who asks for a split of it gets one of two halves, by a
hash of the ids. Sets of the hub are in `selfspec.prompts_hub`. Cost: the file is read whole, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec.errors import UserError
from selfspec.prompts_hub import hub_lines, hub_set

DATA_DIR = Path(__file__).parent / "prompts_data"
ID_KEYS = ("prompt_id", "question_id", "id")
SPLITS = ("tune", "report")
SCORES = ("rouge_l", "exact_number")  # what an answer may be compared with its reference by: selfspec.report.quality
COMMON_KEYS = ("categories", "limit", "split", "score")
CONFIG_KEYS = ("name", "path", *COMMON_KEYS)
SPLIT_RULE = (
    'A line says its split ("split": "tune" or "report"); one that does not is for reporting. A set without any is '
    "halved by a hash of the ids, so that one half of a small set may be empty."
)
FORMAT = (
    'Each line is one JSON object: {"prompt_id": ..., "category": ..., "turns": ["..."]}; "question_id" or "id" may '
    'stand for "prompt_id" and "prompt": "..." for one turn.'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `turns` are the user's turns, in order; the model's answers belong between them.

    split: "" of a prompt that is not marked, until `select` has seen the whole set.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    split: str = "report"
    reference: str | None = None


def bundled_sets() -> list[str]:
    """The names that `load_prompts` knows without a path."""
    return sorted(path.stem for path in DATA_DIR.glob("*.jsonl"))


def load_prompts(
    name_or_path: str | Path,
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    split: str | None = None,
) -> list[Prompt]:
    """The prompts of a bundled set or of a JSONL file, in the file's order.

    `categories` keeps only these, `split` only those of "tune" or "report". `limit` keeps at most that many, taken
    evenly: the first of every category, then the second of every category, and so on; the same arguments always give
    the same prompts.
    Raises UserError: unknown set, unreadable line (with its number), duplicate id, unknown category, limit below 1.
    """
    path = _find(name_or_path)
    return select(_read(path), path.name, categories, limit, split)


def select(
    prompts: list[Prompt], source: str, categories: Sequence[str] | None, limit: int | None, split: str | None
) -> list[Prompt]:
    """What is asked for of a whole set, every prompt with its split; `source` names the set in errors."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"prompts: limit={limit!r} is not allowed. Give 1 or more, or null for all prompts.")
    if split is not None and split not in SPLITS:
        raise UserError(f"prompts.split={split!r} is unknown. Allowed: {', '.join(SPLITS)}, or null for all prompts.")
    prompts = _with_splits(prompts, halve=split is not None)
    if categories is not None:
        prompts = _keep_categories(prompts, categories, source)
    if split is not None:
        prompts = [prompt for prompt in prompts if prompt.split == split]
        if not prompts:
            raise UserError(
                f"prompts.split={split} leaves no prompt of {source}. {SPLIT_RULE} Mark some, or drop prompts.split."
            )
    return prompts if limit is None else take_evenly(prompts, limit)


def split_of(prompt_id: str) -> str:
    """The half of a set without marks that a prompt is in, the same on every machine and whatever the set holds."""
    return SPLITS[hashlib.sha256(prompt_id.encode()).digest()[0] % 2]


def _with_splits(prompts: Sequence[Prompt], halve: bool) -> list[Prompt]:
    """Unmarked prompts are for reporting; in a set without any mark they may be halved by id instead."""
    halve = halve and not any(prompt.split for prompt in prompts)
    return [
        prompt if prompt.split else replace(prompt, split=split_of(prompt.prompt_id) if halve else "report")
        for prompt in prompts
    ]


def check_apart(prompts: Sequence[Prompt], tuned_on: Sequence[str | Path]) -> None:
    """UserError if a prompt occurs in a set that settings were chosen on: `name`, or `name#tune` for its half."""
    mine = {prompt.turns[0].strip(): prompt.prompt_id for prompt in prompts}
    for name in tuned_on:
        whole, _, split = str(name).partition("#")
        tuned = load_prompts(whole, split=split or None)
        if both := [mine[text] for prompt in tuned if (text := prompt.turns[0].strip()) in mine]:
            raise UserError(
                f"{len(both)} prompts of this run, for example {both[0]!r}, are in {name}, which its settings were "
                "chosen on (tuned_on): a speedup on them reads too high. Use prompts.split=report, or another set."
            )


def prompts_from_config(config: Mapping[str, Any]) -> list[Prompt]:
    """The prompts a conf/prompts file asks for: `name` (bundled), `path` (JSONL) or `hub`, and what is kept of it."""
    _check_common(config)
    if config.get("hub") is not None:
        return _hub_prompts(config)
    unknown = sorted(set(config) - set(CONFIG_KEYS))
    if unknown:
        raise UserError(f"prompts.{unknown[0]} is unknown. Allowed: {', '.join(CONFIG_KEYS)}.")
    name, path = config.get("name"), config.get("path")
    if (name is None) == (path is None):
        raise UserError(
            f"prompts: give either a name ({', '.join(bundled_sets())}) or a path (a .jsonl file), "
            f"not {'both' if name is not None else 'neither'}."
        )
    if name is not None and name not in bundled_sets():
        raise _unknown_set(str(name))
    source = name if name is not None else Path(str(path))
    return load_prompts(source, config.get("categories"), config.get("limit"), config.get("split"))


def _check_common(config: Mapping[str, Any]) -> None:
    categories, score = config.get("categories"), config.get("score")
    if categories is not None and (isinstance(categories, str) or not isinstance(categories, Sequence)):
        raise UserError(f"prompts.categories={categories!r} is not a list. Give for example [math,code], or null.")
    if score not in (None, *SCORES):
        raise UserError(f"prompts.score={score!r} is unknown. Allowed: {', '.join(SCORES)}, or null for none.")


def _hub_prompts(config: Mapping[str, Any]) -> list[Prompt]:
    options = hub_set(config, COMMON_KEYS)
    prompts = [_prompt(line, f"{options.hub}, row {place}") for place, line in enumerate(hub_lines(options))]
    _check_ids([(prompt, f"row {place}") for place, prompt in enumerate(prompts)], options.hub)
    if options.content_sha256 not in (None, found := prompts_hash(prompts)):
        raise UserError(
            f"{options.hub} holds other prompts than prompts.content_sha256 says: {found}. Choose the revision that "
            "was used before, or take this hash if the change is wanted."
        )
    return select(prompts, options.hub, config.get("categories"), config.get("limit"), config.get("split"))


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


def _keep_categories(prompts: list[Prompt], categories: Sequence[str], source: str) -> list[Prompt]:
    present = dict.fromkeys(prompt.category for prompt in prompts)
    for category in categories:
        if category not in present:
            raise UserError(f"prompts: {source} has no category {category!r}. It has: {', '.join(present)}.")
    wanted = set(categories)
    if not wanted:
        raise UserError(f"prompts: categories=[] leaves no prompt. {source} has: {', '.join(present)}; null for all.")
    return [prompt for prompt in prompts if prompt.category in wanted]


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: texts may hold U+2028
    except UnicodeDecodeError as error:
        raise UserError(f"prompts: {path} is not UTF-8 text (byte {error.start}). {FORMAT}") from error
    found = [
        (_parse(line, f"{path}, line {number}"), f"line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    _check_ids(found, str(path))
    return [prompt for prompt, _ in found]


def _check_ids(found: Sequence[tuple[Prompt, str]], source: str) -> None:
    if not found:
        raise UserError(f"prompts: {source} holds no prompt. {FORMAT}")
    place_of: dict[str, str] = {}
    for prompt, place in found:
        if prompt.prompt_id in place_of:
            raise UserError(
                f"prompts: {source}: {place_of[prompt.prompt_id]} and {place} both are {prompt.prompt_id!r}. "
                "Results are kept by id: give every prompt its own."
            )
        place_of[prompt.prompt_id] = place


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"prompts: {where} is not JSON ({error.msg} at column {error.colno}). {FORMAT}") from error
    if not isinstance(entry, dict):
        raise UserError(f"prompts: {where} is a {type(entry).__name__}, not an object. {FORMAT}")
    return _prompt(entry, where)


def _prompt(entry: dict[str, Any], where: str) -> Prompt:
    turns = _turns(entry, where)
    category = entry.get("category", "default")
    if not isinstance(category, str) or not category.strip():
        raise UserError(f"prompts: {where}: category={category!r} is not a text. {FORMAT}")
    prompt_id = _id(entry, turns, where)
    split = entry.get("split") or ""
    if split not in ("", *SPLITS):
        raise UserError(f"prompts: {where}: split={split!r} is unknown. Allowed: {', '.join(SPLITS)}.")
    return Prompt(prompt_id, category, turns, split, _reference(entry.get("reference"), where))


def _reference(given: object, where: str) -> str | None:
    """Spec-Bench and MT-Bench give a list, with one answer per turn."""
    if isinstance(given, list):
        given = given[0] if given else None
    if given is not None and not isinstance(given, str):
        raise UserError(f"prompts: {where}: reference={given!r} is neither a text nor a list of texts. {FORMAT}")
    return given or None


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
