"""What blocks save: bytes of keys and values, contiguous against paged, under a distribution of request lengths.

    python experiments/paged_memory.py
    python experiments/paged_memory.py lengths=file lengths.path=trace.jsonl target=random-1b block_size=64

Nothing is decoded: requests of the drawn lengths pass through the real allocator (`selfspec.cache.blocks`) as the
decoding loop would take them through it, round by round, with drafts accepted at a set rate. Seconds, on any machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from selfspec.cache.blocks import BlockPool
from selfspec.cache.estimate import ModelShape, config_of_random, shape_from_config
from selfspec.cache.storage import Contiguous, Paged
from selfspec.config import TargetConfig
from selfspec.errors import UserError
from selfspec.measure.load import Length, build_lengths
from selfspec.run import command_line_overrides, entry_point


@dataclass
class PagedMemoryConfig:
    """conf/paged_memory.yaml"""

    target: TargetConfig = field(default_factory=TargetConfig)
    lengths: dict[str, Any] = MISSING
    dtype: str = "bfloat16"
    rows: list[int] = MISSING
    num_requests: int = 1024
    shared_tokens: list[int] = MISSING
    block_size: int = 16
    num_drafted: int = 4
    accept_rate: float = 0.7
    seed: int = 0
    out: str | None = None


@dataclass(frozen=True)
class Use:
    """What one simulated service took, in blocks (shared ones once), tokens and rows.

    Means are over the rounds in which requests were waiting, so that the end, when rows run empty, does not count.
    """

    peak_blocks: int
    mean_blocks: float
    mean_tokens: float
    mean_saved: float  # blocks that sharing saved
    mean_rows: float


@dataclass
class Running:
    num_tokens: int  # in the cache
    end: int  # done when this many are


def serve(lengths: Sequence[Length], rows: int, num_blocks: int, shared_tokens: int, config: PagedMemoryConfig) -> Use:
    """All requests through `rows` rows and `num_blocks` blocks, refilled as they finish, as `run_requests` does it.

    Raises UserError if a request alone needs more blocks.
    """
    width = config.num_drafted + 1
    longest = max(one.prompt_tokens + one.output_tokens for one in lengths) + shared_tokens + width
    Paged(config.block_size, num_blocks).blocks_for(rows, [longest])
    pool = BlockPool(num_blocks, config.block_size, rows)
    coins = random.Random(config.seed)
    waiting, running = deque(range(len(lengths))), dict[int, Running]()
    blocks, tokens, saved, at_once = list[int](), list[int](), list[int](), list[int]()
    idle = list(range(rows))
    while waiting or running:
        while idle and waiting:
            prompt = prompt_of(waiting[0], lengths[waiting[0]], shared_tokens)
            end = len(prompt) + lengths[waiting[0]].output_tokens
            if not pool.fits(prompt[:-1], end + width):
                break  # first come, first served
            row = idle.pop()
            found = pool.place(row, prompt[:-1], end + width)
            pool.reserve(row, found, len(prompt) - 1)
            pool.publish(row, prompt[:-1])
            running[row] = Running(len(prompt) - 1, end - 1)
            waiting.popleft()
        for row, one in running.items():
            pool.reserve(row, one.num_tokens, one.num_tokens + width)
        if waiting or not blocks:
            blocks.append(pool.num_in_use)
            saved.append(pool.num_saved)
            tokens.append(sum(one.num_tokens for one in running.values()))
            at_once.append(len(running))
        for row, one in list(running.items()):
            accepted = 0
            while accepted < config.num_drafted and coins.random() < config.accept_rate:
                accepted += 1
            one.num_tokens = min(one.num_tokens + accepted + 1, one.end)
            pool.trim(row, one.num_tokens)
            if one.num_tokens == one.end:
                pool.release(row)
                idle.append(row)
                del running[row]
    return Use(pool.peak_in_use, mean(blocks), mean(tokens), mean(saved), mean(at_once))


def prompt_of(request: int, length: Length, shared_tokens: int) -> list[int]:
    """Token ids that are the same for all requests, then ids that are this request's own."""
    return list(range(shared_tokens)) + [shared_tokens + request] * length.prompt_tokens


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def table(lengths: Sequence[Length], shared_tokens: int, kv_bytes: int, config: PagedMemoryConfig) -> list[str]:
    """One line per number of rows."""
    width = config.num_drafted + 1
    needs = [shared_tokens + one.prompt_tokens + one.output_tokens + width for one in lengths]
    lines = [
        "| rows | contiguous MiB | paged peak MiB | saved | paged mean MiB | of it used, contiguous → paged | "
        "rows at once in the contiguous cache's bytes |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for rows in config.rows:
        contiguous = Contiguous().total_slots(rows, needs)
        use = serve(lengths, rows, Paged(config.block_size).blocks_for(rows, needs), shared_tokens, config)
        peak = (use.peak_blocks + 1) * config.block_size
        many = min(16 * rows, len(lengths))
        same_bytes = serve(lengths, many, contiguous // config.block_size, shared_tokens, config)
        mean_slots = use.mean_blocks * config.block_size
        used = (use.mean_tokens - use.mean_saved * config.block_size) / mean_slots
        lines.append(
            f"| {rows} | {mib(contiguous * kv_bytes)} | {mib(peak * kv_bytes)} | {1 - peak / contiguous:.0%} "
            f"| {mib(mean_slots * kv_bytes)} | {use.mean_tokens / contiguous:.0%} → {used:.0%} "
            f"| {same_bytes.mean_rows:.1f} |"
        )
    return lines


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f}" if count >= 100 * 2**20 else f"{count / 2**20:.1f}"


def report(config: PagedMemoryConfig, overrides: Sequence[str]) -> str:
    """The tables in Markdown, with the command and everything they follow from."""
    drawn = build_lengths(config.lengths).draw(config.num_requests, [config.seed])
    model = shape_of_target(config)
    prompts, outputs = sorted(one.prompt_tokens for one in drawn), sorted(one.output_tokens for one in drawn)
    given = ", ".join(f"{key} {value}" for key, value in config.lengths.items())
    lines = [
        f"`{' '.join(['python experiments/paged_memory.py', *overrides])}`",
        "",
        f"{config.num_requests} requests, lengths {given}; drawn: prompts mean {mean(prompts):.0f}, largest "
        f"{prompts[-1]}; outputs mean {mean(outputs):.0f}, largest {outputs[-1]} tokens. "
        f"{model.kv_bytes_per_token:,} bytes of keys and values per token ({config.target.name or config.target.kind}, "
        f"{config.dtype}); blocks of {config.block_size}; {config.num_drafted} drafts a round, accepted at "
        f"{config.accept_rate}; rows are refilled as they finish.",
        "",
        "Contiguous: every row as long as the longest request, rounded up to 64. Paged: the most blocks in use at any "
        "time. Used: tokens in the cache over slots, a shared token once. Rows at once: as many requests as the blocks "
        "allow, each with its full length kept free for it. Means are over the rounds in which requests wait.",
    ]
    for shared in config.shared_tokens:
        title = f"a system prompt of {shared} tokens in front of every request" if shared else "nothing in common"
        lines += ["", f"**Prompts with {title}**", "", *table(drawn, shared, model.kv_bytes_per_token, config)]
    return "\n".join(lines) + "\n"


def shape_of_target(config: PagedMemoryConfig) -> ModelShape:
    """From the configuration alone where the weights are random; else the model is loaded for its shape."""
    if config.target.kind == "random":
        return shape_from_config(config_of_random(config.target), config.dtype)
    from selfspec.decoding.budget import shape_of
    from selfspec.target import load_target

    return shape_of(load_target(config.target, dtype=config.dtype))


def typed(composed: DictConfig) -> PagedMemoryConfig:
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PagedMemoryConfig), plain))
    assert isinstance(config, PagedMemoryConfig)
    if not config.rows or min(config.rows) < 1 or config.num_requests < 1 or config.num_drafted < 0:
        raise UserError(
            f"rows={config.rows}, num_requests={config.num_requests}, num_drafted={config.num_drafted}: allowed are "
            "one number of rows and one request or more, and 0 or more drafts."
        )
    if not 0 <= config.accept_rate <= 1 or min(config.shared_tokens, default=-1) < 0:
        raise UserError(
            f"accept_rate={config.accept_rate}, shared_tokens={config.shared_tokens}: allowed are a probability and a "
            "list of whole numbers, 0 or more."
        )
    Paged(config.block_size)  # may refuse
    return config


@entry_point("paged_memory")
def main(composed: DictConfig) -> None:
    config = typed(composed)
    text = report(config, command_line_overrides())
    print(text, end="")
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        Path(config.out).write_text(text)


if __name__ == "__main__":
    main()
