"""Is the answer still as good? For rules that change the output, and for prompts that come with a right answer.

    rouge_l        F1 of the longest common subsequence of words (Lin 2004), without stemming: 1 is the same text
    exact_number   1 if the last number of the answer is the last number of the reference (GSM8K's own check)

For greedy decoding with a lossless rule the check is stricter and elsewhere: the same tokens (`estimators.equality`).
Cost: one table of words by words per answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from selfspec.errors import UserError
from selfspec.report.estimators import Records, by_prompt

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
WORD = re.compile(r"\w+")


def rouge_l(text: str, reference: str) -> float:
    """0 to 1; 1 also for two texts without words."""
    ours, theirs = WORD.findall(text.lower()), WORD.findall(reference.lower())
    if not ours or not theirs:
        return float(ours == theirs)
    row = [0] * (len(theirs) + 1)
    for word in ours:
        diagonal = 0
        for place, other in enumerate(theirs, 1):
            diagonal, row[place] = row[place], diagonal + 1 if word == other else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(ours) + len(theirs))


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").rstrip(".")) if found else None


def exact_number(text: str, reference: str) -> float:
    """1 if both end on the same number."""
    expected = last_number(reference)
    return float(expected is not None and last_number(text) == expected)


SCORES: dict[str, Callable[[str, str], float]] = {"rouge_l": rouge_l, "exact_number": exact_number}


def quality(
    records: Records, baseline: Records, references: Mapping[str, str], score: str | None
) -> dict[str, float | str | None]:
    """The mean score against the references, one vote per prompt, and for a lossy rule the likeness to the baseline's
    texts. None where there is nothing to compare with.
    """
    if score is not None and score not in SCORES:
        raise UserError(f"score={score!r} is unknown. Allowed: {', '.join(SCORES)}.")
    answers = by_prompt(records)
    known = {name: group for name, group in answers.items() if name in references} if score else {}
    stats: dict[str, Any] = {"reference_score": None, "reference_score_name": score, "rouge_l_to_baseline": None}
    if score and known:
        measure = SCORES[score]
        stats["reference_score"] = fmean(
            fmean(measure(record.text, references[name]) for record in group) for name, group in known.items()
        )
    if any(record.lossy for record in records):
        texts = {record.key[0::2]: record.text for record in baseline}  # by prompt and repeat
        pairs = [(record.text, texts[record.key[0::2]]) for record in records if record.key[0::2] in texts]
        stats["rouge_l_to_baseline"] = fmean(rouge_l(*pair) for pair in pairs) if pairs else None
    return stats
