"""Making the data: the target writes prompts and answers until there are enough, shard by shard, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from selfspec.errors import UserError
from selfspec.target import Target
from selfspec.training.data import (
    DataConfig,
    Sample,
    check_same_settings,
    lists_all,
    read_manifest,
    read_shard,
    shard_paths,
    write_manifest,
    write_shard,
)
from selfspec.training.generation import Spent, generate_stream
from selfspec.training.identity import target_identity
from selfspec.training.prompt_sources import GivenPrompt, prompts_digest
from selfspec.training.self_prompts import ChatTemplate, SampleSource, chat_template, normalised, template_of

Progress = Callable[[int, float, Spent], None]  # answer tokens made in all, tokens/s of this run, where time went
PROGRESS_S = 20.0


def make_data(
    target: Target,
    config: DataConfig,
    out: str | Path,
    prompts: Sequence[str | GivenPrompt] | None = None,
    progress: Progress = print,
) -> dict[str, Any]:
    """Add samples to `out` until it holds `config.answer_tokens` answer tokens; returns the manifest.

    Stopped at any moment, it goes on where it was: indices in no shard are written (again).
    Raises UserError: another process writes there, other settings there, no chat template, disk full.
    """
    folder = Path(out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"Another process is adding data to {folder}. Wait for it, or give another out=.") from error
    with lock:
        given = None if prompts is None else [GivenPrompt.of(prompt) for prompt in prompts]
        return _make_locked(target, config, folder, given, progress)


def _make_locked(
    target: Target, config: DataConfig, folder: Path, prompts: Sequence[GivenPrompt] | None, progress: Progress
) -> dict[str, Any]:
    template = chat_template(target.tokenizer) if prompts is None else template_of(target.tokenizer)
    identity = target_identity(target, template.before + template.after)
    given = prompts_digest(prompts)
    check_same_settings(folder, config, identity, given)
    done, seen, total = _already_made(folder, target.tokenizer, template)
    manifest = read_manifest(folder)
    if manifest is None or not lists_all(manifest, folder):  # else no text is added yet, and its hash stays
        manifest = write_manifest(folder, config, identity, given)
    fresh: list[Sample] = []
    rejected: dict[int, str] = {}
    begun, made, spent = time.perf_counter(), 0, Spent()
    reported = begun

    def flush() -> None:
        nonlocal manifest
        if fresh or rejected:
            write_shard(folder, fresh, rejected)
            manifest = write_manifest(folder, config, identity, given)
            fresh.clear()
            rejected.clear()

    def on_result(index: int, result: Sample | str) -> bool:
        nonlocal total, made
        if isinstance(result, str):
            rejected[index] = result
        else:
            fresh.append(result)
            total, made = total + result.answer_len, made + result.answer_len
            if len(fresh) >= config.shard_samples:
                flush()
        return total < config.answer_tokens

    def on_step() -> None:
        nonlocal reported
        now = time.perf_counter()
        if now - reported >= PROGRESS_S:
            reported = now
            progress(total, made / (now - begun), spent)

    if total < config.answer_tokens:
        source = SampleSource(config, target.tokenizer, target.eos_token_ids, prompts, done, seen, on_result)
        generate_stream(
            target,
            source,
            rows=config.rows,
            capacity=config.max_sequence_tokens,
            seed=config.seed,
            eos_ids=target.eos_token_ids,
            on_step=on_step,
            spent=spent,
        )
        flush()
    return manifest


def _already_made(folder: Path, tokenizer: Any, template: ChatTemplate) -> tuple[set[int], set[str], int]:
    """Indices not to be made again, the prompts seen (normalised), and the answer tokens there are."""
    done: set[int] = set()
    seen: set[str] = set()
    total = 0
    for path in shard_paths(folder):
        samples, rejected, _ = read_shard(path)
        done.update(rejected)
        for sample in samples:
            done.add(sample.index)
            text = tokenizer.decode(sample.token_ids[: sample.prompt_len], skip_special_tokens=template.raw)
            seen.add(normalised(text.removeprefix(template.before).removesuffix(template.after)))
            total += sample.answer_len
    return done, seen, total
