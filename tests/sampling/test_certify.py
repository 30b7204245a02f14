"""The certificate command: passes for what is shipped, fails for a wrong rule, speaks when it cannot load one."""

from __future__ import annotations

import dataclasses

import pytest

from selfspec.sampling import certify
from selfspec.sampling.exact_rules import MemorylessRule, play_rejection
from selfspec.sampling.games import GAMES
from selfspec.sampling.planted_faults import FAULTS


@pytest.fixture(autouse=True)
def few_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself plays all games; the small ones are enough to test it."""
    monkeypatch.setattr(certify, "GAMES", [game for game in GAMES if game.num_drafts < 3 and game.num_children < 3])


def test_shipped_rules_are_certified(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main([]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "(0.2, 0.3, 0.1)" in out
    for rule in FAULTS:
        assert rule.name in out
    assert out.rstrip().endswith("Certified.")


def test_a_fault_that_is_not_caught_fails_the_certificate() -> None:
    line = certify.fault_is_caught(MemorylessRule("no fault at all", play_rejection))
    assert not line.ok


class Mine:
    name = "my rule"

    def round(self, game, prefix, memory, chance):
        return play_rejection(game, prefix, chance), None


class Wrong(Mine):
    def round(self, game, prefix, memory, chance):
        return (chance.choose(game.q(prefix)),), None


class Broken(Mine):
    def round(self, game, prefix, memory, chance):
        raise RuntimeError("boom")


MINE = Mine()


@pytest.mark.parametrize(("attribute", "code"), [("MINE", 0), ("Mine", 0), ("Wrong", 1), ("Broken", 1)])
def test_a_third_partys_rule_is_judged(attribute: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main(["--rule", f"{__name__}:{attribute}"]) == code
    out = capsys.readouterr().out
    assert ("NOT certified" in out) == bool(code)
    assert ("boom" in out) == (attribute == "Broken")


def test_a_third_partys_tensor_function_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    rejection = "selfspec.sampling.acceptance.rejection:accept_rejection"
    assert certify.main(["--device", rejection]) == 0
    assert certify.main(["--device", rejection, "--like", "block"]) == 1
    assert "instead of" in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["no_such_module:x", "math:nothing", "math:pi", "math", "math:sqrt"])
def test_what_cannot_be_loaded_is_said(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main(["--rule", reference]) == 1
    assert reference.split(":")[0] in capsys.readouterr().err


def test_lines_are_plain_values() -> None:
    assert dataclasses.astuple(certify.Line(True, "claim", "evidence")) == (True, "claim", "evidence")
