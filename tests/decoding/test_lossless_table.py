"""The equality table says what is so: all equal for the decoder as it is, and unequal where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import lossless_table
from experiments.lossless_table import GREEDY, SAMPLED, rows_of, table
from selfspec.decoding.sampler import Sampler


def small_study(*transforms):
    study = lossless_table.tiny()
    few = {name: study.drafters[name] for name in ("early exit, layer 3 of 4", "n-gram")}
    return replace(study, drafters=few, lookaheads=(1, 3), transforms=transforms, num_new=10)


def test_every_output_is_equal_and_counted():
    study = small_study(GREEDY[0], GREEDY[-1], SAMPLED[0])
    lines, equal, total = rows_of(study)
    assert equal == total == 3 * (1 + 2 * 2) * len(study.prompts)
    assert [line[1] for line in lines[::2]] == ["generate", "generate", "no draft, one row"]
    text = table(study, lines, equal, total, "the command")
    assert f"{equal} of {total}" in text and "`the command`" in text and "**" not in text


def test_a_penalty_that_sees_the_wrong_prefix_shows(monkeypatch):
    prefix = Sampler._prefix

    def one_token_late(self, rows, first, width):
        seen = prefix(self, rows, first, width)
        return seen and replace(seen, ends_BT=(seen.ends_BT - 1).clamp(min=1))

    monkeypatch.setattr(Sampler, "_prefix", one_token_late)
    study = small_study(GREEDY[2])
    lines, equal, total = rows_of(study)
    assert equal < total and "**" in table(study, lines, equal, total, "")


def test_an_argument_that_is_not_understood_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lossless_table.py", "table.md"])
    with pytest.raises(SystemExit):
        lossless_table.main()
    assert "out=FILE" in capsys.readouterr().err
