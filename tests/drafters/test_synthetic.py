"""The synthetic drafter: the acceptance that was set, exactly the target's output, and labelled for what it is."""

from __future__ import annotations

import functools

import pytest
import torch
from scipy.stats import binomtest

from selfspec import Decoder, Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.config import load_conf
from tiny_models import prompt_ids, tiny_llama

COUPLED = dict(sampling=Sampling(temperature=0.9, top_p=0.95), acceptance="coupled")
FALSE_ALARM = 1e-3  # of one test of the rate; 8 of them: one false alarm in 125 runs with fresh seeds


@functools.cache
def target():
    return wrap_target(tiny_llama(max_positions=1024))


def synthetic(accept_rate, cost_layers=0):
    return build_drafter("synthetic", target(), accept_rate=accept_rate, cost_layers=cost_layers)


def outcomes(outputs):
    """1 for every draft that stood, 0 for every one that was tested and fell, in order."""
    coins = []
    for output in outputs:
        for record in output.rounds:
            coins += [1] * record.num_accepted + [0] * (record.num_accepted < record.num_drafted)
    return coins


@pytest.mark.parametrize("options", [{}, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("accept_rate", [0.3, 0.6, 0.8, 0.9])
def test_drafts_stand_at_the_rate_that_was_set(accept_rate, options):
    """Each tested draft is an independent coin, so the first 1500 tested ones are binomial whatever came of them."""
    prompts = [prompt_ids(4, seed=seed) for seed in range(8)]
    outputs = decode(
        target(),
        synthetic(accept_rate),
        prompts,
        max_new_tokens=260,
        lookahead=5,
        max_batch_rows=8,
        ignore_eos=True,
        seed=11,
        **options,
    )
    coins = outcomes(outputs)[:1500]
    assert len(coins) == 1500
    assert binomtest(sum(coins), 1500, accept_rate).pvalue > FALSE_ALARM
    assert binomtest(sum(coins), 1500, accept_rate + 0.08).pvalue < FALSE_ALARM, "negative control: another rate fails"


@pytest.mark.parametrize("options", [{}, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("cost_layers", [0, 1, 3])
@pytest.mark.parametrize("accept_rate", [0.0, 0.7, 1.0])
def test_the_output_is_exact_for_any_rate_cost_rows_and_cache(accept_rate, cost_layers, options):
    prompts = [prompt_ids(length, seed=length) for length in (9, 1, 70, 2, 9)]
    options = dict(options, max_new_tokens=12, seed=5)
    expected = [output.token_ids for output in decode(target(), None, prompts, **options)]
    for rows, cache in [(3, "contiguous"), (2, "paged")]:
        outputs = decode(
            target(),
            synthetic(accept_rate, cost_layers),
            prompts,
            lookahead=4,
            max_batch_rows=rows,
            cache=cache,
            **options,
        )
        assert [output.token_ids for output in outputs] == expected
        coins = outcomes(outputs)
        assert accept_rate == 0.7 or set(coins) == {int(accept_rate)}


def test_the_same_drafts_are_wrong_whatever_the_number_of_drafts_and_rows():
    prompts = [prompt_ids(5, seed=1), prompt_ids(8, seed=2)]
    wrong = []
    for lookahead, rows in [(1, 1), (3, 2), (7, 1)]:
        tested = [{}, {}]  # position -> whether the draft stood
        options = dict(max_new_tokens=200, lookahead=lookahead, max_batch_rows=rows, ignore_eos=True, seed=3)
        for index, output in enumerate(decode(target(), synthetic(0.7), prompts, **options)):
            position = 0
            for record in output.rounds:
                for step in range(min(record.num_accepted + 1, record.num_drafted)):
                    tested[index][position + step] = step < record.num_accepted
                position += record.num_emitted
        wrong.append(tested)
    for index in range(2):
        for one in wrong[1:]:
            common = set(wrong[0][index]) & set(one[index])
            assert len(common) > 30 and all(wrong[0][index][p] == one[index][p] for p in common)
    assert wrong[0][0] != wrong[0][1], "each request has coins of its own"


def test_with_layers_to_run_the_draft_costs_what_an_early_exit_costs(monkeypatch):
    """The same layers on the same numbers of tokens, and as many heads."""

    def work(drafter):
        calls: list[tuple] = []
        run_layers, head = target().run_layers, target().head
        monkeypatch.setattr(
            target(),
            "run_layers",
            lambda hidden, first, last, pass_: (
                calls.append((first, last, hidden.shape[1])) or run_layers(hidden, first, last, pass_)
            ),
        )
        monkeypatch.setattr(target(), "head", lambda hidden: calls.append(("head", hidden.shape[1])) or head(hidden))
        Decoder(target(), drafter).decode([prompt_ids(3)], max_new_tokens=12, lookahead=3, ignore_eos=True)
        monkeypatch.undo()
        return calls[-9:]

    exit_round = work(build_drafter("early_exit", target(), exit_layer=2))
    assert exit_round == work(synthetic(0.5, cost_layers=2))
    assert work(synthetic(0.5))[-2:] == [(0, 4, 4), ("head", 4)]


def test_finding_the_tokens_is_off_the_clock():
    """The autoregressive run comes before, so neither the time to the first token nor the rounds contain it."""
    import time

    begin = time.perf_counter()
    output = decode(target(), synthetic(1.0), [prompt_ids(5)], max_new_tokens=300, lookahead=10, ignore_eos=True)[0]
    elapsed = time.perf_counter() - begin
    assert output.prefill_s + output.decode_s < elapsed / 2, "11 tokens a round against one token a round"


@pytest.mark.parametrize("acceptance", ["rejection", "block", "typical"])
def test_rules_whose_output_depends_on_the_drafts_are_refused_before_anything_runs(acceptance):
    with pytest.raises(UserError, match=f"acceptance='{acceptance}' they depend on the drafts. Use temperature=0, or"):
        decode(target(), synthetic(0.8), [[5]], sampling=Sampling(temperature=1.0), acceptance=acceptance)
    assert decode(target(), synthetic(0.8), [[5]], max_new_tokens=3, acceptance=acceptance)[0].token_ids


def test_eos_and_stop_end_it_as_they_end_plain_decoding():
    prompt = prompt_ids(9, seed=9)
    plain = decode(target(), None, [prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids
    outputs = decode(target(), synthetic(1.0), [prompt], max_new_tokens=30, lookahead=4, eos_token_ids=plain[6])
    assert outputs[0].token_ids == plain[: plain.index(plain[6]) + 1] and outputs[0].finish_reason == "eos"
    assert all(record.num_accepted == record.num_drafted for record in outputs[0].rounds), "nothing past the end counts"


def test_it_says_that_it_is_synthetic_and_what_is_not_possible():
    assert synthetic(0.5).synthetic and load_conf("drafter", "synthetic").kind == "synthetic"
    for rate in (-0.1, 1.1):
        with pytest.raises(UserError, match="accept_rate=.* is a probability, 0 to 1"):
            synthetic(rate)
    with pytest.raises(UserError, match="cost_layers=4 is not possible .* which has 4 layers: allowed are 0 .* to 3"):
        synthetic(0.5, cost_layers=4)


def test_a_prompt_it_was_not_told_about_is_refused():
    from selfspec.decoding.rows import Rows

    drafter = synthetic(0.5)
    rows = Rows(target(), 1, 64)
    drafter.start(rows)
    with pytest.raises(UserError, match="was not told .* Run it through selfspec.decode or a Decoder"):
        rows.place(0, [5, 6, 7], 10, request=0)
    drafter.learn([[5, 6, 7, 8, 9]])
    rows.place(0, [5, 6, 7], 10, request=0)
    assert torch.equal(rows.draft_state.tokens_BS[0, :6], torch.tensor([5, 6, 7, 8, 9, 0]))


def test_records_are_marked():
    from selfspec.lookahead import build_lookahead
    from selfspec.measure.methods import Settings, decode_method

    method = decode_method("anything", target(), synthetic(0.5), build_lookahead(2), Settings(Sampling()), 64)
    assert (
        method.synthetic
        and not decode_method("x", target(), None, build_lookahead(1), Settings(Sampling()), 64).synthetic
    )
