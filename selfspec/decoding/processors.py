"""The caller's logits processors under speculation: what goes wrong in one counts only where its result does.

Speculation asks a processor about positions that decoding without a draft never reaches: behind a draft that is to be
rejected, behind the end of the output, in a prompt lookup's padding. A grammar may well refuse such a prefix. So a
processor that raises, or returns another shape, leaves NaN scores; only when the output comes to depend on them is its
error raised, with the prompt and the position. Cost: none unless something goes wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.errors import UserError
from selfspec.sampling.transforms import Processor


class GuardedProcessors:
    """Processors in their order, as one."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)
        self._faults: dict[tuple[int, ...], tuple[str, Exception | None]] = {}  # by the prefix they were met at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        expected = scores.shape
        for processor in self.processors:
            fault: tuple[str, Exception | None]
            name = type(processor).__name__
            try:
                scores = processor(input_ids, scores)
            except Exception as error:
                fault = f"{name} raised {type(error).__name__}: {error}", error
            else:
                if isinstance(scores, Tensor) and scores.shape == expected:
                    continue
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                fault = (
                    f"{name} returned {got}; a processor must return scores of the shape it was given, "
                    f"{tuple(expected)}",
                    None,
                )
            self._faults[tuple(input_ids[0].tolist())] = fault
            return torch.full(expected, torch.nan, device=input_ids.device)
        return scores

    def forget(self) -> None:
        """A new round begins to be verified: what only drafts met is past."""
        self._faults.clear()

    def raise_for(self, row: int, prefix: Sequence[int]) -> None:
        """Raise UserError if a processor failed at this prefix."""
        if tuple(prefix) in self._faults:
            message, cause = self._faults[tuple(prefix)]
            raise UserError(f"row {row}, position {len(prefix)}: {message}.") from cause
