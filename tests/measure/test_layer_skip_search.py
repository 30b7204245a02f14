"""Searching sets to skip: α is what decoding meets, tokens per second are what counts, and the entry point writes a
set that the drafter reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from selfspec import Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.config import conf_dir, typed
from selfspec.drafters.layer_skip import LayerSkip
from selfspec.drafters.skip_set import SkipSet
from selfspec.measure.skip_bench import SkipBench, Texts
from selfspec.measure.skip_speed import SublayerCosts, line, measure_costs, predict
from tiny_models import prompt_ids, tiny_llama, tiny_model

sys.path.append(str(Path(__file__).parent.parent.parent / "experiments"))
import layer_skip

TARGET = wrap_target(tiny_llama(num_layers=6), name="tiny")
PROMPTS = [prompt_ids(length, seed=length) for length in (5, 12, 30)]
SKIPPED = SkipSet.of([2, 4], [1, 2])
COSTS = SublayerCosts(6, attention_s=3.0, mlp_s=5.0, head_s=12.0, verify=(1.0, 1.1, 1.2, 1.3, 1.4))


def bench_of(target=TARGET, temperature=0.0, num_positions=16, **options):
    texts = Texts.written(target, PROMPTS, 17, num_positions, Sampling(temperature=temperature))
    return SkipBench(texts, temperature, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "cohere"])
def test_alpha_of_many_positions_at_once_is_that_of_the_first_drafts_one_by_one(family, temperature):
    """From scratch: at each position the target's keys of the text before it, then one pass of the thinned target."""
    target = wrap_target(tiny_model(family, num_layers=6))
    bench = bench_of(target, temperature, num_positions=6)
    layers, expected = target.thinned(SKIPPED.attention, SKIPPED.mlp), []
    with torch.inference_mode():
        for ids, positions in zip(bench.texts.token_ids_BT, bench.texts.positions_BN.tolist(), strict=True):
            for position in positions:
                cache = target.make_cache(1, 64)
                all_pass = cache.open(torch.arange(position + 1)[None], position + 1)
                embedded = target.embed(ids[None, : position + 1])
                p = target.head(target.run_layers(embedded, 0, 6, all_pass))[0, -1]
                one_pass = cache.open(torch.tensor([[position]]), position + 1)
                q = target.head(target.run_layers(embedded[:, -1:], 0, 6, one_pass, layers))[0, -1]
                if temperature == 0:
                    expected.append(float(p.argmax() == q.argmax()))
                else:
                    expected.append(float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum()))
    assert bench.alpha(SKIPPED) == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert bench.alpha(SkipSet()) == pytest.approx(1.0, abs=1e-5)
    assert bench.alpha(SKIPPED) < 0.99


def test_alpha_is_what_decoding_meets():
    """At every position of the answers, against rounds of one draft each."""
    bench = bench_of(num_positions=17)
    tested = []
    for answer in range(16):  # the answer up to here is prompt, and one more round is decoded
        texts = [ids[: len(p) + answer].tolist() for p, ids in zip(PROMPTS, bench.texts.token_ids_BT, strict=True)]
        outputs = decode(TARGET, LayerSkip(TARGET, SKIPPED), texts, max_new_tokens=2, lookahead=1, ignore_eos=True)
        tested += [output.rounds[0].num_accepted for output in outputs]
    texts = bench.texts
    assert texts.lengths_B.tolist() == [17 + len(ids) for ids in PROMPTS], "no answer ended early"
    positions = texts.positions_BN[:, :16]
    narrowed = SkipBench(Texts(TARGET, texts.token_ids_BT, texts.lengths_B, positions), 0.0)
    assert narrowed.alpha(SKIPPED) == pytest.approx(sum(tested) / len(tested))


def test_the_dynamic_programs_begin_at_the_targets_own_states():
    """Nothing skipped is the target: cosine one at every layer. And what they find is inside the allowed layers."""
    bench = bench_of()
    for sets in (bench.clasp(4), bench.knapsack(COSTS, least=-1.0)):
        assert len(sets) >= 4
        assert all((one.attention | one.mlp) <= set(range(1, 5)) for one in sets)
    assert [one.size for one in bench.clasp(4)] == [2, 4, 6, 8]
    assert all(one.attention == one.mlp for one in bench.clasp(4))
    saved = [len(one.attention) * 3 + len(one.mlp) * 5 for one in bench.knapsack(COSTS, least=-1.0)]
    assert saved == sorted(set(saved)) and max(saved) <= 24 and COSTS.weights() == (3, 5)


def test_branches_do_not_see_one_another():
    """A set found among many budgets is the set found among few."""
    bench = bench_of()
    assert bench.clasp(4)[:2] == bench.clasp(2)
    other = bench_of(num_tokens=4)
    assert other.knapsack(COSTS, least=-1.0) == bench.knapsack(COSTS, least=-1.0)


def test_a_layer_that_changes_nothing_is_the_first_to_go():
    model = tiny_llama(num_layers=6)
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    bench = bench_of(wrap_target(model))
    assert bench.clasp(1) == [SkipSet.of([3], [3])]
    first = bench.knapsack(COSTS, least=-1.0)[0]
    assert first == SkipSet.of([3], []) and bench.alpha(first) == 1.0


def test_a_parallel_residual_is_refused_where_halves_follow_each_other():
    bench = bench_of(wrap_target(tiny_model("cohere"), name="c"))
    with pytest.raises(UserError, match=r"search=knapsack .* 'c' \(cohere\) adds them side by side"):
        bench.knapsack(COSTS)
    assert len(bench.clasp(2)) == 2


# ---- what a set is worth


def test_the_costs_of_a_round_by_hand():
    assert COSTS.step_s == 6 * 8 + 12
    assert COSTS.draft_s(SKIPPED) == 60 - 2 * 3 - 2 * 5
    # three drafts; then layer 0, below the first skip, for the last draft, and the others over four tokens
    assert COSTS.round_s(SKIPPED, 3) == pytest.approx(3 * 44 + 8 + 1.3 * 52)
    assert COSTS.round_s(SkipSet.of([4, 5], [4, 5]), 2) == pytest.approx(2 * 44 + 32 + 1.2 * 28), "an exit at 4"


def test_tokens_per_second_and_not_acceptance_is_what_counts():
    careful, bold = SkipSet.of([3], []), SkipSet.of([2, 3, 4], [2, 3, 4])
    assert predict(careful, 0.99, COSTS).speedup < predict(bold, 0.8, COSTS).speedup
    hopeless = predict(bold, 0.05, COSTS)
    assert hopeless.num_drafted == 1 and hopeless.speedup < 1
    one = predict(bold, 0.9, COSTS)
    assert one.tau == pytest.approx(sum(0.9**k for k in range(one.num_drafted + 1)))
    assert one.tokens_per_s == pytest.approx(one.tau / COSTS.round_s(bold, one.num_drafted))
    for num_drafted in range(1, 5):
        tau = sum(0.9**k for k in range(num_drafted + 1))
        assert tau / COSTS.round_s(bold, num_drafted) <= one.tokens_per_s + 1e-12


def test_costs_are_measured_for_every_part():
    costs = measure_costs(TARGET, 20, 3, repeats=2)
    assert costs.num_layers == 6 and len(costs.verify) == 4 and costs.verify[0] == 1.0
    assert min(costs.attention_s, costs.mlp_s, costs.head_s) > 0
    assert line((10, 110), (1.0, 3.0), 60) == pytest.approx(2.0)
    assert line((10, 110), (1.0, 0.9), 60) == 1.0, "attention never gets cheaper with more text"


# ---- the entry point


def config_of(*overrides):
    shape = ["target=random-tiny", "runtime=cpu_float32", "prompts.limit=3", "repeats=1", "max_new_tokens=6"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("layer_skip", [*shape, "positions=4", "most_drafted=2", "trials=12", *overrides])
    return typed(layer_skip.LayerSkipConfig, composed)


@pytest.mark.parametrize("search", ["random", "bayes", "clasp", "knapsack"])
def test_a_search_writes_a_set_that_the_drafter_reads(search, tmp_path, capsys):
    config = config_of(f"search={search}", f"out={tmp_path / 'set'}", f"decoded={search == 'clasp'}")
    chosen = layer_skip.search(config)
    target = layer_skip.load_target(config.target, dtype="float32", device="cpu")
    assert build_drafter("layer_skip", target, sets=str(tmp_path / "set")).skipped == chosen.skipped
    assert "over AR" in capsys.readouterr().out
    with pytest.raises(UserError, match="was chosen for"):
        build_drafter("layer_skip", TARGET, sets=str(tmp_path / "set"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("search=genetic", r"search='genetic' is unknown. Allowed: .*knapsack"),
        ("trials=0", "trials=0 is not possible"),
        ("most_skipped=1.5", "most_skipped=1.5"),
        ("prompts=selfspec48", r"are for reports: .*selfspec_tune24"),
        ("runtime.dtype=float16", "Allowed on cpu"),
    ],
)
def test_what_a_search_refuses(override, message):
    with pytest.raises(UserError, match=message):
        layer_skip.check(config_of(override))


def test_the_drawn_sets_spare_the_first_and_the_last_layer():
    sets = list(layer_skip.draw(config_of(), 8))
    assert len(sets) == 12 and len(set(sets)) > 8
    assert all((one.attention | one.mlp) <= set(range(1, 7)) and 0 < one.size <= 9 for one in sets)
    assert sets == list(layer_skip.draw(config_of(), 8))
