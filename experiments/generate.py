"""Watch one prompt being decoded: accepted drafts green, rejected ones struck through in red, the target's own bold.

    python experiments/generate.py prompt="Write a haiku about rivers." drafter=early_exit drafter.exit_layer=26

Where output is collected instead of watched, only what was really generated is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

import selfspec
from selfspec.config import WatchConfig, resolve
from selfspec.measure.bench import drafter_of, lookahead_of, settings_from
from selfspec.measure.ranks import in_step
from selfspec.measure.tracing import piece
from selfspec.run import entry_point, settle_runtime

ACCEPTED, REJECTED, OWN = "green", "strike red", "bold"


class Watcher:
    """Prints the tokens of each round as it is committed."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.tokenizer = tokenizer
        self.console = console
        self.token_ids: list[int] = []

    def __call__(self, event: selfspec.RoundEvent) -> None:
        num_accepted = event.record.num_accepted
        accepted, own = event.emitted_ids[:num_accepted], event.emitted_ids[num_accepted:]
        rejected = event.drafted_ids[num_accepted : event.record.num_drafted]
        self.show(accepted, ACCEPTED)
        if self.console.is_terminal:
            for index in range(len(rejected)):
                self.console.print(self.piece(rejected[:index], rejected[index], REJECTED), end="", soft_wrap=True)
        self.show(own, OWN)

    def show(self, token_ids: Sequence[int], style: str) -> None:
        for token_id in token_ids:
            self.console.print(self.piece([], token_id, style), end="", soft_wrap=True)
            self.token_ids.append(token_id)

    def piece(self, before: Sequence[int], token_id: int, style: str) -> Text:
        return Text(piece(self.tokenizer, [*self.token_ids, *before], token_id), style=style)


@entry_point("generate")
def main(composed: DictConfig) -> None:
    config = resolve(WatchConfig, composed)
    with in_step(config.runtime):
        settle_runtime(config)
        watch(config)


def watch(config: WatchConfig) -> None:
    settings = settings_from(config)
    options = config.drafter or {"kind": "none"}
    lookahead = lookahead_of(options, config)
    target = selfspec.load_target(
        config.target, config.runtime.dtype, config.runtime.device, tensor_parallel=config.runtime.tensor_parallel
    )
    drafter = drafter_of(options, target)
    as_chat = config.chat and getattr(target.tokenizer, "chat_template", None)
    console = Console(highlight=False)
    (output,) = selfspec.decode(
        target,
        drafter,
        [[{"role": "user", "content": config.prompt}] if as_chat else config.prompt],
        max_new_tokens=config.max_new_tokens,
        lookahead=lookahead,
        sampling=settings.sampling,
        acceptance=settings.acceptance,
        seed=config.seed,
        stop_strings=config.stop_strings,
        ignore_eos=settings.ignore_eos,
        cache=settings.cache,
        on_round=Watcher(target.tokenizer, console),
    )
    console.print("\n")
    console.print(summary_line(output), style="dim", soft_wrap=True)


QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL)


def as_typed(arguments: Sequence[str]) -> list[str]:
    """`prompt=` made to mean the text as it stands, where Hydra would read commas, colons and quotes as its syntax.

    A text that is quoted for Hydra already stays as it is.
    """
    return [_quoted(given) if given.startswith("prompt=") else given for given in arguments]


def _quoted(argument: str) -> str:
    key, _, text = argument.partition("=")
    if QUOTED.fullmatch(text):
        return argument
    escaped = re.sub(r'(\\*)("|\Z)', lambda match: 2 * match[1] + (r"\"" if match[2] else ""), text)
    return f'{key}="{escaped}"'


def summary_line(output: selfspec.Output) -> str:
    num_tokens, seconds = len(output.token_ids), output.prefill_s + output.decode_s
    num_drafted = sum(entry.num_drafted for entry in output.rounds)
    num_accepted = sum(entry.num_accepted for entry in output.rounds)
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s), "
        f"{num_tokens / len(output.rounds):.2f} per verify pass; accepted {num_accepted} of {num_drafted} drafted; "
        f"ended by {output.finish_reason}" + ("; lossy" if output.lossy else "")
    )


if __name__ == "__main__":
    sys.argv[1:] = as_typed(sys.argv[1:])
    main()
