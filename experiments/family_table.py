"""The family table: every supported family, checked against transformers as installed, as Markdown.

    python experiments/family_table.py [table.md]
    python experiments/family_table.py --bfloat16 [table.md]

Tiny random models in float32 (`tests/tiny_models.py`), tied and untied heads. Per family the largest difference, over
every split [0, E) + [E, L), between the split stack and transformers' full forward, relative to the largest logit: for
one query and for K+1, after a rollback, before, across and beyond a sliding window's edge. Then greedy tokens against
`model.generate` for every drafter and K, rows of unequal length. Exits with 1 if a cell fails. About a minute.

`--bfloat16`: greedy tokens only, in half precision, where sums in another order break ties another way. Every output
that differs from `generate`'s is classified as `selfspec.measure.divergence` does it: a near tie, or not. Tiny models
with wide random weights round more coarsely than that allows for, so what is left is held against the rounding of this
very model: an error is a gap that is larger than what bfloat16 moves the logits of that position away from float32.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from selfspec import Sampling, build_drafter, decode, wrap_target
from selfspec.measure.divergence import TOLERANCE, Divergence, classify
from selfspec.target import Target
from selfspec.target.attention import IMPLEMENTATION
from selfspec.target.families import as_they_are

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "target")]  # the table shows what the tests check, so it asks them
checks = importlib.import_module("family_checks")
tiny_models = importlib.import_module("tiny_models")
TINY = tiny_models.TINY

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


def divergences(name: str) -> list[Divergence]:
    """Of every output in bfloat16, from what `generate` gives for the same prompt: our own AR, drafters, K. One more
    kind: `rounding`.
    """
    target = wrap_target(tiny_models.tiny_model(name, dtype=torch.bfloat16))
    exact = copy.deepcopy(target.hf_model).float()
    prompts = [tiny_models.prompt_ids(length, seed=length) for length in checks.PROMPT_LENGTHS]
    expected = [target.hf_generate(ids, checks.NEW_TOKENS, Sampling()).token_ids for ids in prompts]

    def next_scores(token_ids: list[int]) -> torch.Tensor:
        return checks.full_forward(target.hf_model, token_ids)[-1]

    found = []
    for drafter in checks.DRAFTERS:
        options = {"exit_layer": target.num_layers // 2} if drafter == "early_exit" else {}
        for num_drafted in (1, checks.NUM_DRAFTED):
            outputs = decode(
                target,
                build_drafter(drafter, target, **options),
                prompts,
                max_new_tokens=checks.NEW_TOKENS,
                lookahead=num_drafted,
                ignore_eos=True,
                max_batch_rows=2,
            )
            for output, ids, reference in zip(outputs, prompts, expected, strict=True):
                one = classify(output.token_ids, reference, ids, next_scores, TOLERANCE["bfloat16"])
                if one.kind == "mismatch" and one.first is not None:
                    prefix, tokens = (
                        [*ids, *reference[: one.first]],
                        [output.token_ids[one.first], reference[one.first]],
                    )
                    scores, truth = next_scores(prefix).float(), checks.full_forward(exact, prefix)[-1]
                    moved = (scores - truth).abs().max()  # two logits may move towards each other
                    if scores.max() - scores[tokens].min() <= 2 * moved:
                        one = replace(one, kind="rounding")
                found.append(one)
    return found


def bfloat16_table() -> tuple[str, bool]:
    """Per family how many outputs are those of `generate`, and what the others are."""
    lines, wrong = (
        [
            "family | outputs | identical | near ties | within rounding | errors | largest top-2 margin",
            "--- | " * 6 + "---",
        ],
        0,
    )
    for name in TINY:
        found = divergences(name)
        kinds = [one.kind for one in found]
        margin = max((one.top2_margin for one in found if one.top2_margin is not None), default=None)
        counts = [
            str(len(found)),
            *(str(kinds.count(kind)) for kind in ("identical", "near_tie", "rounding", "mismatch")),
        ]
        lines.append(" | ".join([name, *counts, "" if margin is None else f"{margin:.3f}"]))
        wrong += kinds.count("mismatch")
        print(lines[-1], file=sys.stderr, flush=True)
    caption = (
        f"transformers {version('transformers')}, torch {torch.__version__}, CPU, bfloat16, tiny random models. Greedy "
        f"tokens of {', '.join(checks.DRAFTERS)} with K = 1 and {checks.NUM_DRAFTED} against `model.generate`, "
        f"{checks.NEW_TOKENS} new ones. Near tie: at the first token that differs, both lie within "
        f"{TOLERANCE['bfloat16']:g} of the largest |logit| below the best. Within rounding: not so, but the gap is at "
        "most twice what bfloat16 moves a logit of that position away from float32. Made with "
        "`python experiments/family_table.py --bfloat16`."
    )
    return "\n".join(["# Families in bfloat16", "", caption, "", *(f"| {line} |" for line in lines), ""]), wrong == 0


def float32_table() -> tuple[str, bool]:
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
    return "\n".join(["# Families", "", caption, "", *(f"| {line} |" for line in lines), ""]), fine


def main() -> int:
    parser = argparse.ArgumentParser(description="Every supported family against transformers, as Markdown.")
    parser.add_argument("--bfloat16", action="store_true", help="greedy tokens in half precision, with their near ties")
    parser.add_argument("table", nargs="?", type=Path, help="the file to write; without one the table is printed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table, fine = bfloat16_table() if given.bfloat16 else float32_table()
    if given.table is not None:
        given.table.write_text(table, encoding="utf-8")
    else:
        print(table)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
