"""Prompts whose results could not be told apart, or that no tokenizer reads, are refused before anything is timed."""

from __future__ import annotations

import pytest

from selfspec.errors import UserError
from selfspec.measure.items import check_names
from selfspec.prompts import Prompt


def test_an_id_that_is_another_prompts_further_turn_is_refused():
    talk = Prompt("a", "chat", ("x", "y"))
    with pytest.raises(UserError, match=r"'a#2' has the name that a further turn of prompt 'a' gets.*another id"):
        check_names([talk, Prompt("a#2", "chat", ("z",))])
    check_names([talk, Prompt("a#3", "chat", ("z",)), Prompt("a#1", "chat", ("z",))])


def test_half_a_character_is_named():
    with pytest.raises(UserError, match="prompt 'b' holds half of a character"):
        check_names([Prompt("a", "chat", ("héllo 🙂 \0",)), Prompt("b", "chat", ("fine", "x \ud83d y"))])
