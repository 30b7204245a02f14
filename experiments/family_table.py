"""The family table: every supported family, checked against transformers as installed, as Markdown.

    python experiments/family_table.py [table.md]

Tiny random models in float32 (`tests/tiny_models.py`), tied and untied heads. Per family the largest difference, over
every split [0, E) + [E, L), between the split stack and transformers' full forward, relative to the largest logit: for
one query and for K+1, after a rollback, before, across and beyond a sliding window's edge. Then greedy tokens against
`model.generate` for every drafter and K, rows of unequal length. Exits with 1 if a cell fails. About a minute.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from selfspec.target import Target
from selfspec.target.attention import IMPLEMENTATION
from selfspec.target.families import as_they_are

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "target")]  # the table shows what the tests check, so it asks them
checks = importlib.import_module("family_checks")
TINY = importlib.import_module("tiny_models").TINY

HEADER = (
    "family",
    "layer",
    "what differs",
    "error, 1 query",
    f"error, {checks.NUM_DRAFTED + 1} queries",
    "tokens equal",
)


def what_differs(name: str, target: Target) -> str:
    """The family's declaration in words, as far as it is not the plain one, and what its layers do by themselves."""
    family, windows = target.family, [window for window in target.windows if window]
    shape = target.layer_shapes[0]
    facts = [f"{target.config.num_attention_heads} heads over {shape.num_kv_heads} of {shape.head_dim}"]
    if windows:
        facts.append(f"window in {len(windows)} of {target.num_layers} layers")
    if family.rotary_by_layer_type:
        facts.append("a rotary table per layer type")
    if family.learned_positions:
        facts.append("learned positions" + (f" from row {family.position_offset}" if family.position_offset else ""))
    if family.embed_scale(target.config) != 1.0:
        facts.append("scaled embeddings")
    if family.finish_logits is not as_they_are:
        facts.append("soft-capped logits" if hasattr(target.config, "final_logit_softcapping") else "scaled logits")
    if family.attention != IMPLEMENTATION:
        facts.append("attention of its own")
    return ", ".join([*facts, *filter(None, [TINY[name].note])])


def row(name: str) -> tuple[list[str], bool]:
    """One line of the table, and whether all of it is as it should be."""
    one, wide = 0.0, 0.0
    for tied in (False, True):
        target = checks.target_of(name, tied)
        for start in checks.STARTS:
            for split in range(target.num_layers + 1):
                errors = checks.split_errors(target, start, split)
                one, wide = max(one, errors[0]), max(wide, errors[1])
    expected = [checks.generated(name, length) for length in checks.PROMPT_LENGTHS]
    equal, total = 0, 0
    for drafter in checks.DRAFTERS:
        for num_drafted in (1, checks.NUM_DRAFTED):
            decoded = checks.decoded(name, drafter, num_drafted)
            equal += sum(got == want for got, want in zip(decoded, expected, strict=True))
            total += len(expected)
    layer = type(target.layers[0]).__name__
    cells = [name, f"`{layer}`", what_differs(name, target), f"{one:.1e}", f"{wide:.1e}", f"{equal} of {total}"]
    return cells, max(one, wide) < checks.TOLERANCE and equal == total


def main() -> int:
    torch.set_num_threads(1)
    lines, fine = [" | ".join(HEADER), " | ".join("---" for _ in HEADER)], True
    for name in TINY:
        cells, correct = row(name)
        fine &= correct
        lines.append(" | ".join(cells) + ("" if correct else " **wrong**"))
        print(lines[-1], file=sys.stderr, flush=True)
    command = "python experiments/family_table.py"
    caption = (
        f"transformers {version('transformers')}, torch {torch.__version__}, CPU, float32. Errors are the largest over "
        f"all splits and both kinds of head, relative to the largest logit; allowed: {checks.TOLERANCE:g}. Tokens: "
        f"{', '.join(checks.DRAFTERS)} with K = 1 and {checks.NUM_DRAFTED}, prompts of "
        f"{', '.join(map(str, checks.PROMPT_LENGTHS))} tokens, {checks.NEW_TOKENS} new ones. Made with `{command}`."
    )
    table = "\n".join(["# Families", "", caption, "", *(f"| {line} |" for line in lines), ""])
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(table, encoding="utf-8")
    else:
        print(table)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
