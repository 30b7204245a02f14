"""A near tie is told from an error by the target's own logits; nothing is claimed where tokens need not be equal."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from selfspec.drafters import build_drafter
from selfspec.lookahead import build_lookahead
from selfspec.measure.divergence import TOLERANCE, Comparison, classify, first_divergence
from selfspec.measure.methods import Settings, decode_method, hf_method
from selfspec.measure.protocol import AR, HF, Item, measure, request_seed
from selfspec.records import PromptRecord
from selfspec.sampling import Sampling
from selfspec.target import wrap_target

NEAR, FAR = 10.0 - 1e-4, 9.0  # beside a largest logit of 10, at a relative tolerance of 2**-16 (1.5e-4 here)


def _classify(ours: list[int], theirs: list[int], logits: list[float]):
    return classify(ours, theirs, [7, 8], lambda ids: torch.tensor(logits), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([], [], None), ([1], [1, 2], 1), ([1, 2], [1], 1), ([0], [1], 0)],
)
def test_first_divergence(ours: list[int], theirs: list[int], first: int | None) -> None:
    assert first_divergence(ours, theirs) == first


def test_equal_tokens_cost_no_forward() -> None:
    result = classify([1, 2], [1, 2], [7], lambda ids: pytest.fail("ran the model"), 0.1)
    assert (result.kind, result.first, result.top2_margin) == ("identical", None, None)


def test_two_nearly_equal_logits_are_a_near_tie() -> None:
    result = _classify([5, 1, 3], [5, 0, 4], [10.0, NEAR, FAR])
    assert (result.kind, result.first) == ("near_tie", 1)
    assert result.top2_margin == pytest.approx(1e-4, abs=1e-5)


def test_a_wrong_token_beside_a_tie_is_a_mismatch() -> None:
    """The top-2 margin alone would excuse it: the drafter's token is neither of the two."""
    assert _classify([5, 2], [5, 0], [10.0, NEAR, FAR]).kind == "mismatch"


def test_a_clear_difference_is_a_mismatch() -> None:
    assert _classify([1], [0], [10.0, FAR, 0.0]).kind == "mismatch"


def test_ending_early_is_a_mismatch_even_at_a_tie() -> None:
    assert _classify([5], [5, 0], [10.0, NEAR, FAR]).kind == "mismatch"


def test_forbidden_tokens_do_not_set_the_scale() -> None:
    assert _classify([1], [0], [10.0, NEAR, float("-inf")]).kind == "near_tie"


def test_the_forward_sees_the_prompt_and_the_autoregressive_prefix() -> None:
    seen = []
    classify([1, 2, 9], [1, 2, 3, 4], [7, 8], lambda ids: seen.append(ids) or torch.zeros(10), 0.1)
    assert seen == [[7, 8, 1, 2]]


def _comparison(acceptance: str = "auto", **sampling: float) -> tuple[Comparison, Settings]:
    target = wrap_target(tiny_models.tiny_llama())
    settings = Settings(Sampling(**sampling), acceptance)
    return Comparison(target, settings.sampling, acceptance, 0, TOLERANCE["float32"]), settings


def _records(comparison: Comparison, settings: Settings) -> tuple[list[PromptRecord], list[Item]]:
    """HF, AR and an early exit on three prompts, compared."""
    target = comparison.target
    items = [Item(f"p{i}", "chat", tiny_models.prompt_ids(5 + i, seed=i)) for i in range(3)]
    drafter = build_drafter("early_exit", target, exit_layer=2)
    methods = [
        hf_method(target, settings),
        decode_method(AR, target, None, build_lookahead(1), settings, 64),
        decode_method("early_exit", target, drafter, build_lookahead(3), settings, 64),
    ]
    options = {"max_new_tokens": 16, "repeats": 1, "seed": 0, "device": target.device, "done": {}}
    return list(measure(methods, items, compare=comparison.fill_in, **options)), items


def test_greedy_tokens_of_every_method_are_compared_and_equal() -> None:
    records, items = _records(*(pair := _comparison()))
    others = [record for record in records if record.method != AR]
    assert [record.divergence_class for record in others] == ["identical"] * 6
    assert all(record.equals_ar is None for record in records if record.method == AR), "nothing is compared with itself"
    assert pair[0].report(records, items)["differing"] == []


def test_sampled_tokens_are_compared_only_where_they_have_to_be_equal() -> None:
    records, _ = _records(*_comparison("coupled", temperature=1.0))
    compared = {record.method: record.equals_ar for record in records}
    assert compared == {HF: None, AR: None, "early_exit": True}
    records, _ = _records(*_comparison("rejection", temperature=1.0))
    assert {record.equals_ar for record in records} == {None}


@pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [("auto", {}), ("auto", {"repetition_penalty": 1.3}), ("coupled", {"temperature": 0.8, "top_k": 20})],
)
def test_the_check_recomputes_the_very_choice_that_decoding_made(acceptance: str, sampling: dict[str, float]) -> None:
    """Transforms and noise included: at every position the recomputed scores choose the token that came out."""
    comparison, settings = _comparison(acceptance, **sampling)
    records, items = _records(comparison, settings)
    record = next(record for record in records if record.method == AR and record.prompt_id == "p1")
    altered = [*record.token_ids[:9], (record.token_ids[9] + 1) % tiny_models.VOCAB_SIZE, *record.token_ids[10:]]
    for cut in range(16):
        prefix = items[1].token_ids + record.token_ids[:cut]
        scores_V = comparison._next_scores(prefix, len(items[1].token_ids), request_seed(0, "p1", 0))
        assert scores_V.argmax().item() == record.token_ids[cut]
    wrong = next(r for r in records if r.method == "early_exit" and r.prompt_id == "p1")
    wrong.token_ids = altered
    comparison.fill_in(wrong, record, items[1])
    assert (wrong.divergence_class, wrong.first_divergence) == ("mismatch", 9)
    (entry,) = comparison.report(records, items)["differing"]
    assert entry["prompt_id"] == "p1"
    assert entry["top2_margin"] > 0
