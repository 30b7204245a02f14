"""A load has the lengths and arrivals it was asked for, is the same for the same seed, and says what is wrong with a
trace, line by line.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from selfspec import UserError, load_target
from selfspec.config import conf_names, load_conf
from selfspec.measure.load import (
    FromFile,
    Length,
    LogNormal,
    PromptText,
    arrivals,
    build_lengths,
    make_load,
    read_lengths,
)
from selfspec.prompts import load_prompts

MANY = 20_000
SETTING = dict(
    prompt_median=50, prompt_sigma=0.5, prompt_max=10_000, output_median=20, output_sigma=1.0, output_max=10_000
)


@functools.cache
def target():
    return load_target("random-tiny", dtype="float32", device="cpu")


@functools.cache
def prompts():
    return load_prompts("selfspec48")


def load_of(lengths, num_requests=12, rate_per_s=None, seed=(0, 0), positions=400):
    return make_load(target(), prompts(), lengths, num_requests, rate_per_s, seed, positions)


# ---- lengths


def test_lengths_follow_the_log_normal_that_was_asked_for():
    """Seeded, so it cannot flicker; the tolerances are about five standard errors."""
    drawn = LogNormal(**SETTING).draw(MANY, (1, 2))
    for values, median, sigma in (
        ([length.prompt_tokens for length in drawn], 50, 0.5),
        ([length.output_tokens for length in drawn], 20, 1.0),
    ):
        logs = np.log(values)
        assert np.median(logs) == pytest.approx(math.log(median), abs=5 * 1.25 * sigma / math.sqrt(MANY) + 0.01)
        assert logs.std() == pytest.approx(sigma, rel=0.04)
        assert np.mean(values) == pytest.approx(median * math.exp(sigma**2 / 2), rel=0.05)
    correlation = np.corrcoef([(length.prompt_tokens, length.output_tokens) for length in drawn], rowvar=False)[0, 1]
    assert abs(correlation) < 5 / math.sqrt(MANY)


def test_lengths_are_cut_to_their_range_and_depend_on_the_seed_alone():
    lengths = LogNormal(**(SETTING | dict(prompt_min=40, prompt_max=60, output_min=10, output_max=15)))
    drawn = lengths.draw(500, (3, 4))
    assert {length.prompt_tokens for length in drawn} == set(range(40, 61))
    assert {length.output_tokens for length in drawn} == set(range(10, 16))
    assert drawn == lengths.draw(500, (3, 4))
    assert drawn != lengths.draw(500, (3, 5))
    assert drawn[:100] == lengths.draw(100, (3, 4)), "asking for more requests changes none of the first"


def test_sigma_zero_makes_all_equal():
    lengths = LogNormal(**(SETTING | dict(prompt_sigma=0, output_sigma=0)))
    assert set(lengths.draw(10, (0,))) == {Length(50, 20)}


@pytest.mark.parametrize("name", conf_names("lengths"))
def test_every_shipped_setting_can_be_built(name):
    options = load_conf("lengths", name)
    if name == "file":
        options.path = "trace.jsonl"
    assert build_lengths(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "kind=None is unknown. Allowed: file, lognormal"),
        ({"kind": "lognorm"}, "Did you mean 'lognormal'"),
        ({"kind": "lognormal", "prompt_median": 5}, "not complete"),
        ({"kind": "lognormal", **SETTING, "mean": 5}, "lengths.mean is unknown"),
        ({"kind": "lognormal", **SETTING, "prompt_median": 0.5}, "prompt_median=0.5 is not possible"),
        ({"kind": "lognormal", **SETTING, "prompt_median": "50"}, "prompt_median='50'"),
        ({"kind": "lognormal", **SETTING, "output_sigma": -1}, "output_sigma=-1"),
        ({"kind": "lognormal", **SETTING, "output_sigma": math.nan}, "output_sigma=nan"),
        ({"kind": "lognormal", **SETTING, "output_max": 2.5}, "output_max=2.5 is not possible: it should be int"),
        ({"kind": "lognormal", **SETTING, "prompt_min": 70, "prompt_max": 60}, "prompt_min=70 and prompt_max=60"),
        ({"kind": "file"}, "not complete"),
        ({"kind": "file", "path": 3}, "path=3"),
    ],
)
def test_an_impossible_setting_says_what_is_allowed(options, message):
    with pytest.raises(UserError, match=message):
        build_lengths(options)


# ---- traces


def test_traces_are_read_from_jsonl_and_csv_in_order(tmp_path):
    jsonl, table = tmp_path / "trace.jsonl", tmp_path / "trace.csv"
    jsonl.write_text(
        '{"prompt_tokens": 12, "output_tokens": 3, "id": "a"}\n\n{"output_tokens": 7, "prompt_tokens": 5}\n'
    )
    table.write_text("at,prompt_tokens,output_tokens\n0.1,12,3\n0.2,5,7\n")
    expected = [Length(12, 3), Length(5, 7)]
    for path in (jsonl, table):
        assert read_lengths(path, "prompt_tokens", "output_tokens") == expected
        assert FromFile(str(path)).draw(2, (0,)) == FromFile(str(path)).draw(2, (1,)) == expected
        assert FromFile(str(path)).draw(1, (0,)) == expected[:1]


def test_a_public_trace_with_other_column_names_can_be_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n")
    options = {"kind": "file", "path": str(path)}
    lengths = build_lengths({**options, "prompt_column": "Request tokens", "output_column": "Response tokens"})
    assert lengths.draw(1, (0,)) == [Length(472, 18)]
    with pytest.raises(UserError, match="line 2 has no 'prompt_tokens'; it has: Timestamp, Model, Request tokens"):
        build_lengths(options).draw(1, (0,))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "12 3", "neither a .jsonl nor a .csv"),
        ("missing.csv", None, "cannot read .*No such file"),
        ("a.jsonl", b"\xff\xfe{}", "not UTF-8"),
        ("a.jsonl", "", "holds no request"),
        ("a.csv", "prompt_tokens,output_tokens\n", "holds no request"),
        ("a.jsonl", '{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 is a list"),
        ("a.jsonl", '{"prompt_tokens": 1}', "line 1 has no 'output_tokens'"),
        (
            "a.jsonl",
            '{"prompt_tokens": 0, "output_tokens": 2}',
            "line 1: prompt_tokens=0 is not a whole number above 0",
        ),
        ("a.jsonl", '{"prompt_tokens": 1.5, "output_tokens": 2}', "prompt_tokens=1.5"),
        ("a.jsonl", '{"prompt_tokens": true, "output_tokens": 2}', "prompt_tokens=True"),
        ("a.csv", "prompt_tokens,output_tokens\n4,5\n4,many\n", "line 3: output_tokens='many'"),
        ("a.csv", "prompt_tokens,output_tokens\n4\n", "line 2 has no 'output_tokens'"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        FromFile(str(path)).draw(1, (0,))


def test_more_requests_than_the_trace_holds_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt_tokens,output_tokens\n4,5\n")
    with pytest.raises(UserError, match="holds 1 requests; num_requests=2"):
        FromFile(str(path)).draw(2, (0,))


# ---- arrivals


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    times = arrivals(MANY, 4.0, (7,))
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps.std() == pytest.approx(0.25, rel=0.05), "exponential: as spread as they are long"
    assert times == arrivals(MANY, 4.0, (7,)) != arrivals(MANY, 4.0, (8,))
    assert arrivals(3, None, (7,)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(UserError, match="rate_per_s"):
        arrivals(3, rate, (0,))


# ---- the load


def test_without_a_chat_template_prompts_have_exactly_the_drawn_lengths():
    lengths = LogNormal(**(SETTING | dict(prompt_max=300, output_max=60)))
    load = load_of(lengths, positions=1000)
    drawn = lengths.draw(12, (0, 0))
    assert [len(one.prompt_ids) for one in load] == [length.prompt_tokens for length in drawn]
    assert [one.max_new_tokens for one in load] == [length.output_tokens for length in drawn]
    assert not any(one.shortened for one in load)
    assert load == load_of(lengths, positions=1000)
    assert [one.prompt_ids for one in load] != [one.prompt_ids for one in load_of(lengths, seed=(0, 1), positions=1000)]


def test_prompts_are_real_text_and_differ_from_each_other():
    load = load_of(LogNormal(**(SETTING | dict(prompt_sigma=0, output_max=60))))
    texts = [target().tokenizer.decode(one.prompt_ids) for one in load]
    assert len(set(texts)) == len(texts)
    everything = "\n\n".join(turn for prompt in prompts() for turn in prompt.turns)
    assert all(text in everything for text in texts)


def test_what_does_not_fit_into_the_positions_is_shortened_and_counted():
    """The output keeps its length as long as one prompt token has room."""
    lengths = LogNormal(**(SETTING | dict(prompt_sigma=0, prompt_median=90, output_sigma=0, output_median=30)))
    for positions, expected in (
        (120, (90, 30, False)),
        (100, (70, 30, True)),
        (31, (1, 30, True)),
        (20, (1, 19, True)),
    ):
        for one in load_of(lengths, num_requests=2, positions=positions):
            assert (len(one.prompt_ids), one.max_new_tokens, one.shortened) == expected


class ChatTokenizer:
    """The byte tokenizer with a template of 20 characters around the user's text."""

    chat_template = "<user> ... <answer>"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text):
        return self.tokenizer(text)

    def decode(self, ids, **options):
        return self.tokenizer.decode(ids, **options)

    def apply_chat_template(self, messages, **options):
        return self.tokenizer("<user>....." + messages[0]["content"] + "<answer>.")


def test_a_chat_template_counts_towards_the_length(monkeypatch):
    monkeypatch.setattr(target(), "tokenizer", ChatTokenizer(target().tokenizer))
    text = PromptText(target(), prompts())
    assert text.num_frame == 20
    for wanted, first in itertools.product((40, 333, 1000), (0, 47)):
        ids = text.of_length(first, wanted)
        assert len(ids) == wanted
        assert target().tokenizer.decode(ids).startswith("<user>.....")
    assert len(text.of_length(0, 5)) == 21, "the template and one token of text"
