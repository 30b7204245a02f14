"""The grid of a comparison: every drafter with every lookahead, as if each pair had been written out."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from selfspec.config import CompareConfig, conf_dir, config_hash, resolve
from selfspec.errors import UserError
from selfspec.grid import expand
from selfspec.lookahead import build_lookahead

GAIN = {"kind": "expected_gain", "max_drafted": 5}
GRID = {
    "a": {"drafters": {"ngram": {"kind": "ngram"}, "wrong": {"kind": "synthetic"}}, "lookaheads": {"k1": 1, "g": GAIN}}
}


def config(**given):
    return resolve(CompareConfig, OmegaConf.create({"study": "s", "name": "n", "target": {"kind": "random"}, **given}))


def test_a_grid_is_its_pairs_written_out_and_hashed_like_them():
    pairs = {
        "ngram_k1": {"kind": "ngram", "lookahead": 1},
        "ngram_g": {"kind": "ngram", "lookahead": GAIN},
        "wrong_k1": {"kind": "synthetic", "lookahead": 1},
        "wrong_g": {"kind": "synthetic", "lookahead": GAIN},
    }
    assert config(grid=GRID).drafters == pairs and list(config(grid=GRID).drafters) == list(pairs)
    assert config_hash(config(grid=GRID)) == config_hash(config(drafters=pairs))
    assert config_hash(config()) != config_hash(config(drafters=pairs))
    assert expand({**GRID, "a": None}) == {}


@pytest.mark.parametrize(
    "grid, message",
    [
        ({"a": {"drafters": {"x": {"kind": "ngram"}}}}, "grid.a holds drafters. A block of the grid is"),
        ({"a": {"drafters": {"x": {"kind": "ngram"}}, "lookahead": {"k": 1}}}, "grid.a holds drafters, lookahead"),
        ({"a": 3}, "grid.a holds 3"),
        ({"a": {"drafters": {}, "lookaheads": {"k": 1}}}, "grid.a pairs nothing"),
        ({"a": {"drafters": {"x": "ngram"}, "lookaheads": {"k": 1}}}, "grid.a.drafters.x='ngram' is no drafter"),
        ({"a": {"drafters": {"x": {"kind": "ngram", "lookahead": 2}}, "lookaheads": {"k": 1}}}, "of its own"),
        ({**GRID, "b": GRID["a"]}, "makes the drafter 'ngram_k1' twice"),
        (
            {"a": {"drafters": {"x": {"kind": "ngram"}}, "lookaheads": {"k": 0}}},
            "drafters.x_k.lookahead=0 is too small",
        ),
    ],
)
def test_a_grid_of_another_form_is_refused(grid, message):
    with pytest.raises(UserError, match=message):
        config(grid=grid)


def test_a_drafter_that_is_written_out_is_not_overwritten():
    with pytest.raises(UserError, match="'ngram_k1', which is in drafters already"):
        config(grid=GRID, drafters={"ngram_k1": {"kind": "ngram"}})


def test_the_policy_study_compares_every_policy_and_lets_none_draft_more_than_the_longest_fixed_k():
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        study = resolve(CompareConfig, compose("compare", ["experiment=smollm2_policies"]))
        fewer = resolve(CompareConfig, compose("compare", ["experiment=smollm2_policies", "grid.medusa=null"]))
    assert study.tuned_on == ["selfspec_tune24"] and study.prompts["name"] == "selfspec48"
    assert not any(label.startswith("medusa_k") for label in fewer.drafters)
    for drafter in ("eagle3", "exit_adapter", "hybrid", "medusa", "ngram"):
        policies = {
            label.removeprefix(f"{drafter}_"): build_lookahead(options["lookahead"])
            for label, options in study.drafters.items()
            if label.startswith(f"{drafter}_")
        }
        assert {"k1", "k2", "k3", "heuristic", "expected_gain", "bandit"} <= set(policies)
        longest = max(policy.max_drafted for label, policy in policies.items() if label.startswith("k"))
        assert max(policy.max_drafted for policy in policies.values()) == longest
        assert drafter == "ngram" or {"confidence", "adaptive_threshold", "entropy"} <= set(policies)
