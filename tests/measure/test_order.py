"""Nothing that is compared is always first, nor always behind the same other one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from selfspec.measure.order import balanced


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 17])
def test_each_is_equally_often_in_every_place_and_after_each_other_one(number: int) -> None:
    turns = 2 * number if number % 2 else number
    orders = [balanced(range(number), turn) for turn in range(turns)]
    places = Counter(place for order in orders for place in enumerate(order))
    assert len(places) == number**2 and set(places.values()) == {turns // number}
    followers = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followers) == number * (number - 1) and len(set(followers.values())) <= 1
