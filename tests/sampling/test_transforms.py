"""Every built-in transform against the transformers processor it claims to be, on random logits with real prefixes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.errors import UserError
from selfspec.sampling import Prefix, Sampling, build_transforms

B, T, S, V = 3, 4, 24, 40
STARTS = [0, 2, 5]
PROMPT_LENS = [4, 3, 1]
COMMITTED = [12, 9, 7]  # slots, padding included


def make_case(seed: int = 0, ties: bool = False) -> tuple[Tensor, Prefix]:
    generator = torch.Generator().manual_seed(seed)
    logits_BTV = torch.randn(B, T, V, generator=generator) * 3
    if ties:
        logits_BTV = logits_BTV.round()  # a few distinct values: every boundary falls into a tie
    tokens_BS = torch.randint(0, 6, (B, S), generator=generator)  # few ids, so n-grams do repeat
    ends_BT = torch.tensor(COMMITTED)[:, None] + torch.arange(T)
    tokens_BS[torch.arange(S) >= ends_BT[:, -1:]] = -7  # stale slots hold garbage
    return logits_BTV, Prefix(tokens_BS, ends_BT, torch.tensor(PROMPT_LENS), torch.tensor(STARTS))


def by_hf(processors: list[hf.LogitsProcessor], logits_BTV: Tensor, prefix: Prefix) -> Tensor:
    """What generate would compute at each position, one call per (row, position)."""
    out_BTV = torch.empty_like(logits_BTV)
    for b in range(B):
        for t in range(T):
            input_ids = prefix.tokens_BS[b, STARTS[b] : int(prefix.ends_BT[b, t])][None]
            scores = logits_BTV[b, t][None].clone()
            for processor in processors:
                scores = processor(input_ids, scores)
            out_BTV[b, t] = scores[0]
    return out_BTV


SAME_AS_HF = {
    "temperature": (dict(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": (dict(temperature=1.0, top_k=5), [hf.TopKLogitsWarper(5)]),
    "top_k_above_vocabulary": (dict(temperature=1.0, top_k=V + 9), [hf.TopKLogitsWarper(V + 9)]),
    "top_p": (dict(temperature=1.0, top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
    "top_p_tiny": (dict(temperature=1.0, top_p=1e-9), [hf.TopPLogitsWarper(1e-9)]),
    "min_p": (dict(temperature=1.0, min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
    "min_p_one": (dict(temperature=1.0, min_p=1.0), [hf.MinPLogitsWarper(1.0)]),
    "repetition": (dict(repetition_penalty=1.3), [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition_below_one": (dict(repetition_penalty=0.8), [hf.RepetitionPenaltyLogitsProcessor(0.8)]),
    "ngram_1": (dict(no_repeat_ngram_size=1), [hf.NoRepeatNGramLogitsProcessor(1)]),
    "ngram_2": (dict(no_repeat_ngram_size=2), [hf.NoRepeatNGramLogitsProcessor(2)]),
    "ngram_3": (dict(no_repeat_ngram_size=3), [hf.NoRepeatNGramLogitsProcessor(3)]),
    "ngram_above_prefix": (dict(no_repeat_ngram_size=20), [hf.NoRepeatNGramLogitsProcessor(20)]),
    "logit_bias": (
        dict(logit_bias={3: 2.5, 7: -math.inf}),
        [hf.SequenceBiasLogitsProcessor({(3,): 2.5, (7,): -math.inf})],
    ),
    "suppress": (dict(suppress_tokens=(0, 5, V + 3)), [hf.SuppressTokensLogitsProcessor((0, 5, V + 3))]),
    "everything_in_generate_order": (
        dict(
            temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, no_repeat_ngram_size=2,
            logit_bias={3: 2.5}, suppress_tokens=(5,),
        ),
        [
            hf.SequenceBiasLogitsProcessor({(3,): 2.5}),
            hf.RepetitionPenaltyLogitsProcessor(1.2),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.SuppressTokensLogitsProcessor((5,)),
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(20),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
}  # fmt: skip


@pytest.fixture
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' top-p leaves the order of ties to torch's unstable sort; pinned, there is one right answer."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


@pytest.mark.usefixtures("stable_sort")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("name", SAME_AS_HF)
def test_transform_equals_transformers_bit_for_bit(name: str, ties: bool) -> None:
    settings, processors = SAME_AS_HF[name]
    for seed in range(5):
        logits_BTV, prefix = make_case(seed, ties)
        ours = build_transforms(Sampling(**settings), None, V)(logits_BTV, prefix)
        assert torch.equal(ours, by_hf(processors, logits_BTV, prefix))


def test_top_p_boundary_that_falls_on_the_threshold_is_removed_as_in_transformers() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(B, T, 4)
    ours = build_transforms(Sampling(temperature=1.0, top_p=0.75))(logits, None)
    assert torch.equal(ours, by_hf([hf.TopPLogitsWarper(0.75)], logits.contiguous(), make_case()[1]))
    assert torch.isfinite(ours).sum(-1).eq(2).all()


def test_top_p_keeps_as_many_tied_tokens_of_the_same_logits_as_unpinned_transformers() -> None:
    for seed in range(20):
        logits_BTV, prefix = make_case(seed, ties=True)
        ours = build_transforms(Sampling(temperature=1.0, top_p=0.8))(logits_BTV, prefix)
        theirs = by_hf([hf.TopPLogitsWarper(0.8)], logits_BTV, prefix)
        assert torch.equal(ours.sort(dim=-1).values, theirs.sort(dim=-1).values)


def test_transforms_equal_transformers_over_a_whole_vocabulary() -> None:
    logits_BTV = torch.randn(1, 2, 49152, generator=torch.Generator().manual_seed(1)) * 3
    ours = build_transforms(Sampling(temperature=0.8, top_k=400, top_p=0.95))(logits_BTV)
    for t in range(2):
        scores = logits_BTV[:, t]
        for warper in (hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(400), hf.TopPLogitsWarper(0.95)):
            scores = warper(None, scores)
        assert torch.equal(ours[:, t], scores)


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits_BTV, prefix = make_case()
    ours = build_transforms(Sampling(presence_penalty=0.5, frequency_penalty=0.25))(logits_BTV, prefix)
    for b in range(B):
        for t in range(T):
            generated = prefix.tokens_BS[b, STARTS[b] + PROMPT_LENS[b] : int(prefix.ends_BT[b, t])].tolist()
            expected = logits_BTV[b, t].clone()
            for token in set(generated):
                expected[token] -= 0.5 + 0.25 * generated.count(token)
            torch.testing.assert_close(ours[b, t], expected)


def test_each_position_sees_what_it_would_see_without_speculation() -> None:
    """T positions at once equal T single calls: nothing of a later position shows in an earlier one."""
    settings = Sampling(
        temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, no_repeat_ngram_size=2
    )
    logits_BTV, prefix = make_case(3)
    transforms = build_transforms(settings)
    together = transforms(logits_BTV, prefix)
    for t in range(T):
        alone = Prefix(prefix.tokens_BS, prefix.ends_BT[:, t : t + 1], prefix.prompt_lens_B, prefix.starts_B)
        assert torch.equal(transforms(logits_BTV[:, t : t + 1], alone), together[:, t : t + 1])


def test_rejected_speculation_leaves_no_trace_in_penalties() -> None:
    logits_BTV, prefix = make_case(4)
    transforms = build_transforms(Sampling(repetition_penalty=1.3, no_repeat_ngram_size=2))
    before = transforms(logits_BTV[:, :1], Prefix(prefix.tokens_BS, prefix.ends_BT[:, :1]))
    transforms(logits_BTV, prefix)
    assert torch.equal(transforms(logits_BTV[:, :1], Prefix(prefix.tokens_BS, prefix.ends_BT[:, :1])), before)


def test_greedy_without_penalties_is_the_very_same_tensor() -> None:
    logits_BTV = torch.randn(1, 2, 8).bfloat16()
    assert build_transforms(Sampling())(logits_BTV) is logits_BTV


def test_at_temperature_0_warpers_do_not_apply_but_processors_do() -> None:
    logits_BTV = torch.randn(1, 1, 8)
    ours = build_transforms(Sampling(top_k=1, top_p=0.1, min_p=0.9, suppress_tokens=(2,)))(logits_BTV)
    assert torch.isfinite(ours).sum() == 7
    assert ours[0, 0, 2] == -math.inf


def test_half_precision_logits_are_lifted_to_float32_first() -> None:
    logits_BTV = torch.randn(1, 1, 64).bfloat16()
    ours = build_transforms(Sampling(temperature=0.7))(logits_BTV)
    assert torch.equal(ours[0], hf.TemperatureLogitsWarper(0.7)(None, logits_BTV[0].float()))


def test_transforms_never_write_into_the_logits_they_are_given() -> None:
    logits_BTV, prefix = make_case(5)
    kept = logits_BTV.clone()
    for settings, _ in SAME_AS_HF.values():
        build_transforms(Sampling(**settings))(logits_BTV, prefix)
    assert torch.equal(logits_BTV, kept)


def test_stateful_transforms_without_a_prefix_are_refused() -> None:
    with pytest.raises(UserError, match="Prefix"):
        build_transforms(Sampling(repetition_penalty=1.1))(torch.zeros(1, 1, 4))


def test_tree_nodes_see_their_ancestors_and_nothing_else() -> None:
    r"""Slots behind the committed tokens hold nodes 1..5 of   0 -> 1 -> 3 -> 5,  0 -> 2 -> 4;  node 0 is committed."""
    committed = [3, 1, 4, 1, 5]
    node_tokens = [1, 2, 4, 1, 3]
    paths = {0: [], 1: [1], 2: [2], 3: [1, 3], 4: [2, 4], 5: [1, 3, 5]}
    tokens_BS = torch.tensor([committed + node_tokens + [-7, -7]])
    ancestors = torch.zeros(1, 6, 5, dtype=torch.bool)
    for node, path in paths.items():
        ancestors[0, node, [n - 1 for n in path]] = True
    prefix = Prefix(tokens_BS, torch.full((1, 6), 5), torch.tensor([2]), ancestors_BTN=ancestors)
    logits = torch.randn(1, 6, 8)
    seen: list[list[int]] = []

    def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    settings = Sampling(repetition_penalty=1.3, frequency_penalty=0.2, no_repeat_ngram_size=2)
    ours = build_transforms(settings, [spy])(logits, prefix)
    for node, path in paths.items():
        sequence = committed + [node_tokens[n - 1] for n in path]
        assert seen[node] == sequence
        chain = Prefix(torch.tensor([sequence]), torch.tensor([[len(sequence)]]), torch.tensor([2]))
        alone = build_transforms(settings)(logits[:, node : node + 1], chain)
        assert torch.equal(ours[:, node : node + 1], alone)
