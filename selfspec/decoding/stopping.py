"""Where a row's output ends on the host: stop strings, which only text can tell.

EOS and length are found on the device, in `Rows.commit`. A stop string may straddle tokens and accepted runs, so the
generated text is decoded once per round, and only when it holds a stop string is the completing token looked for. As
in transformers, the token that completes the stop string is the last; the returned text is cut right before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from selfspec.errors import UserError


class Stop(Protocol):
    """Ends rows on the host, after each round, where the device cannot tell."""

    def cut(self, request: int, token_ids: list[int], num_checked: int) -> int | None:
        """How many of a request's tokens to keep, which ends it, or None. The first `num_checked` were seen before."""

    def text(self, token_ids: list[int], stopped: bool) -> str:
        """The text of a finished output; `stopped`: it was ended by `cut`."""


class StopStrings:
    """Finds the first of several stop strings in what a row has generated."""

    def __init__(self, strings: Sequence[str], tokenizer: Any | None) -> None:
        if isinstance(strings, str):
            strings = [strings]
        if not isinstance(strings, Iterable):
            raise UserError(f"stop_strings={strings!r} is not possible: give a text or a list of texts.")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise UserError(f"stop_strings holds {string!r}; allowed are non-empty texts.")
        if strings and tokenizer is None:
            raise UserError("stop_strings need a tokenizer, and this target has none. Use eos_token_ids.")
        self.strings = tuple(strings)
        self.tokenizer = tokenizer

    def cut(self, request: int, token_ids: list[int], num_checked: int) -> int | None:
        """How many tokens to keep, or None if no stop string occurs. The first `num_checked` are known to be free of
        one.
        """
        if not self.strings or self._first(token_ids) is None:
            return None
        for count in range(num_checked + 1, len(token_ids) + 1):
            if self._first(token_ids[:count]) is not None:
                return count
        return len(token_ids)

    def text(self, token_ids: list[int], stopped: bool) -> str:
        """The text of the output, without special tokens, cut right before the stop string that ended it."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        found = [at for at in (text.find(string) for string in self.strings) if at >= 0] if stopped else []
        return text[: min(found)] if found else text

    def _first(self, token_ids: list[int]) -> int | None:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        found = [at for at in (text.find(string) for string in self.strings) if at >= 0]
        return min(found) if found else None
