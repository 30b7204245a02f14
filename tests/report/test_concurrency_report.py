"""Throughput, latency and break-even from cells with known times, and cells that survive being killed."""

from __future__ import annotations

import json
import math

import pytest

from selfspec.errors import UserError
from selfspec.records.serving import Cell, ServedRequest, append_cell, cell_from_line, cell_to_line, read_cells
from selfspec.report import latency
from selfspec.report.concurrency import (
    break_even,
    break_even_text,
    concurrency_figure,
    concurrency_tables,
    speedup,
    summarise_cells,
)
from selfspec.report.figures import to_bytes
from selfspec.report.render import to_latex, to_markdown


def request(arrival=0.0, admitted=1.0, commits=(2.0, 2.5, 3.5), emitted=(2, 1, 3), sha="same") -> ServedRequest:
    return ServedRequest(10, arrival, admitted, 8, 3, sha, list(commits), list(emitted))


def cell(method="ar", num_rows=1, repeat=0, requests=None, **changes) -> Cell:
    values = {"open_loop": False, "lossy": False, "synthetic": False, **changes}
    return Cell(method, num_rows, repeat, requests=requests or [request()], **values)


def paced(method, num_rows, seconds_per_token, num_requests=6, repeat=0, factors=(1, 1), **changes) -> Cell:
    """Requests after each other, each of ten tokens in two rounds at this pace."""
    requests, start = [], 0.0
    for index in range(num_requests):
        wobble = seconds_per_token * (1 + 0.02 * (index % 3)) * factors[index % 2]
        requests.append(request(0.0, start, [start + 5 * wobble, start + 10 * wobble], [5, 5], sha=f"r{index}"))
        start += 10 * wobble
    return cell(method, num_rows, repeat, requests, **changes)


# ---- latency


def test_each_latency_is_what_its_definition_says():
    one = request()
    assert latency.queue_s(one) == 1.0
    assert latency.ttft_s(one, open_loop=False) == 1.0, "a closed loop's client sends when its row is free"
    assert latency.ttft_s(one, open_loop=True) == 2.0, "an open loop's client has been waiting since its arrival"
    assert latency.itl_s(one) == [0.5, 1.0]
    assert latency.tpot_s(one) == pytest.approx(1.5 / 4), "4 tokens came after the first commit"
    assert latency.row_s(one) == 2.5


def test_mean_itl_over_tpot_is_the_tokens_per_round():
    one = request(commits=(2.0, 2.5, 3.5, 3.75), emitted=(4, 1, 3, 2))
    gaps = latency.itl_s(one)
    assert sum(gaps) / len(gaps) / latency.tpot_s(one) == pytest.approx((1 + 3 + 2) / 3)


def test_a_request_that_ends_in_its_first_round_has_no_pace():
    one = request(commits=(2.0,), emitted=(5,))
    assert latency.tpot_s(one) is None and latency.itl_s(one) == []
    found = latency.latencies_ms([cell(requests=[one])])
    assert found["tpot"] is None and found["itl"] is None
    assert found["ttft"] == {"p50": 1000.0, "p95": 1000.0, "p99": 1000.0}
    summary = summarise_cells([cell(requests=[one])])
    assert "—" in to_markdown(concurrency_tables(summary, "c")[1])


def test_percentiles_are_those_of_all_requests_together():
    cells = [cell(repeat=r, requests=[request(0, 0, [t], [1]) for t in times]) for r, times in enumerate([[1, 2], [3]])]
    assert latency.latencies_ms(cells)["ttft"] == pytest.approx({"p50": 2000.0, "p95": 2900.0, "p99": 2980.0})


def test_throughput_is_tokens_over_the_makespan_and_busy_rows_over_it_too():
    one = cell(requests=[request(0.5, 1.0, [2.0, 3.0], [1, 2]), request(0.5, 1.0, [4.5], [3])])
    assert latency.makespan_s(one) == 4.0
    assert latency.num_tokens(one) == 6
    assert latency.busy_rows(one) == pytest.approx((2.0 + 3.5) / 4.0)
    point = summarise_cells([one])["points"][0]
    assert point["tokens_per_s"] == 1.5
    assert point["al_pooled"] == 2.0


# ---- speedup and break-even


def test_the_interval_of_a_speedup_is_the_spread_over_requests():
    ar, fast = paced("ar", 2, 0.03), paced("fast", 2, 0.02)
    found = speedup({0: fast}, {0: ar})
    assert found["ratio"] == pytest.approx(1.5)
    assert found["low"] == pytest.approx(1.5) and found["high"] == pytest.approx(1.5), "every request gained the same"
    found = speedup({0: paced("uneven", 2, 0.02, factors=(0.9, 1.7))}, {0: ar})
    assert found["ratio"] == pytest.approx(1.5 / 1.3, rel=0.01)
    assert 1.5 / 1.7 < found["low"] < 1.05 and 1.3 < found["high"] < 1.5 / 0.9


def test_only_repeats_that_both_have_are_compared():
    ar, fast = paced("ar", 1, 0.02), paced("fast", 1, 0.01, repeat=1)
    assert speedup({1: fast}, {0: ar}) is None
    assert speedup({0: paced("fast", 1, 0.01), 1: fast}, {0: ar})["ratio"] == pytest.approx(2.0)


def test_the_speedup_is_that_of_the_makespan_also_where_rows_stand_empty():
    """Equal times in a row, but one after the other: half the tokens/s, and the interval lies around that."""
    ar = cell(num_rows=2, requests=[request(0, 0, [1.0], [10]), request(0, 0, [1.0], [10])])
    late = cell("late", 2, requests=[request(0, 0, [1.0], [10]), request(0, 1.0, [2.0], [10])])
    points = {point["method"]: point for point in summarise_cells([ar, late])["points"]}
    assert points["late"]["tokens_per_s"] == points["ar"]["tokens_per_s"] / 2
    assert points["late"]["speedup"] == pytest.approx({"ratio": 0.5, "low": 0.5, "high": 0.5})


def curve(*ratios, width=0.05, rows=(1, 2, 4, 8, 16)):
    return [
        {"num_rows": n, "speedup": {"ratio": ratio, "low": ratio - width, "high": ratio + width}}
        for n, ratio in zip(rows, ratios, strict=False)
    ]


def test_break_even_lies_between_the_last_row_count_that_pays_and_the_first_that_does_not():
    found = break_even(curve(1.6, 1.3, 1.2, 1 / 1.2, 0.6))
    assert (found["pays_up_to"], found["not_at"], found["clear"]) == (4, 8, True)
    assert found["rows"] == pytest.approx(4 * math.sqrt(2)), "equal distance in log speedup: halfway in log rows"
    assert break_even_text("x", found) == "x stops paying between 4 and 8 rows, at about 5.7."


def test_a_crossing_inside_an_interval_is_said_to_be_in_doubt():
    found = break_even(curve(1.6, 1.3, 1.04, 0.9))
    assert found["clear"] is False
    assert "includes 1" in break_even_text("x", found)
    assert break_even([{"num_rows": 1, "speedup": {"ratio": 2.0, "low": None, "high": None}}])["clear"] is False


def test_a_method_that_never_or_always_pays_has_no_crossing():
    never, always = break_even(curve(0.9, 0.8)), break_even(curve(1.5, 1.2))
    assert (never["pays_up_to"], never["not_at"], never["rows"]) == (None, 1, None)
    assert break_even_text("x", never) == "x does not pay at 1 row already."
    assert (always["pays_up_to"], always["not_at"], always["rows"]) == (2, None, None)
    assert break_even_text("x", always) == "x pays at all measured numbers of rows, up to 2."


def test_a_recovery_after_the_first_loss_does_not_move_the_break_even():
    assert break_even(curve(1.5, 0.9, 1.2))["pays_up_to"] == 1


# ---- the summary, the tables and the figure


def two_methods():
    falling = {1: 0.6, 2: 0.8, 4: 1.25, 8: 1.6}
    cells = []
    for num_rows, factor in falling.items():
        for repeat in range(2):
            cells.append(paced("ar", num_rows, 0.1 / num_rows, repeat=repeat))
            cells.append(paced("draft_$", num_rows, 0.1 / num_rows * factor, repeat=repeat, synthetic=True))
    return cells


def test_the_summary_covers_every_point_with_ar_first():
    summary = summarise_cells(list(reversed(two_methods())))
    assert summary["methods"] == ["ar", "draft_$"] and summary["rows"] == [1, 2, 4, 8]
    assert len(summary["points"]) == 8 and summary["num_repeats"] == 2
    assert summary["break_even"]["draft_$"]["pays_up_to"] == 2
    assert all(point["speedup"] is None for point in summary["points"] if point["method"] == "ar")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_tokens_that_differ_from_ar_on_one_row_are_counted():
    cells = [paced("ar", 1, 0.1), paced("ar", 2, 0.1), paced("draft", 2, 0.1)]
    cells[2].requests[3].tokens_sha = "another"
    counts = {
        (p["method"], p["num_rows"]): (p["num_equal"], p["num_compared"]) for p in summarise_cells(cells)["points"]
    }
    assert counts == {("ar", 1): (6, 6), ("ar", 2): (6, 6), ("draft", 2): (5, 6)}
    throughput, _ = concurrency_tables(summarise_cells(cells), "caption")
    assert throughput.blocks[0].rows[2][-1] == "5/6"


def test_tables_say_where_it_stops_paying_and_what_is_synthetic():
    throughput, delays = concurrency_tables(summarise_cells(two_methods()), "made up")
    assert [row[:2] for row in throughput.blocks[0].rows[:3]] == [["1", "ar"], ["1", "draft_$‡"], ["2", "ar"]]
    assert throughput.blocks[0].rows[1][3] == "1.67 [1.67, 1.67]"
    assert "draft_$‡ stops paying between 2 and 4 rows, at about 2.8." in throughput.notes
    assert any("synthetic" in note for note in throughput.notes)
    assert delays.blocks[0].rows[0][2:] == ["2.5 / 5.1 / 5.1", "510 / 520 / 520", "102 / 104 / 104", "510 / 520 / 520"]
    for table in (throughput, delays):
        assert "made up" in to_markdown(table) and "made up" in to_latex(table)


def test_the_figure_is_the_same_bytes_each_time_and_needs_only_the_summary():
    summary = json.loads(json.dumps(summarise_cells(two_methods())))
    for file_format in ("pdf", "png"):
        assert to_bytes(concurrency_figure(summary), file_format) == to_bytes(concurrency_figure(summary), file_format)
    alone = summarise_cells([paced("ar", 1, 0.1)])
    assert to_bytes(concurrency_figure(alone), "png")
    left, right = concurrency_figure(summary).axes
    assert [line.get_label() for line in left.lines] == ["ar", r"draft_\$‡"]
    crosses = [line for line in right.lines if line.get_marker() == "x"]
    assert [float(line.get_xdata()[0]) for line in crosses] == [summary["break_even"]["draft_$"]["rows"]]


def test_without_ar_there_is_nothing_to_compare_with():
    with pytest.raises(UserError, match="no cell of AR"):
        summarise_cells([cell("draft")])


# ---- cells on disk


def test_cells_come_back_as_they_were_to_a_tenth_of_a_millisecond(tmp_path):
    path = tmp_path / "cells.jsonl"
    first, second = cell(requests=[request(commits=(2.00004, 3.0, 4.0))]), cell(repeat=1, lossy=True)
    append_cell(path, first)
    append_cell(path, second)
    found = read_cells(path)
    assert found[1] == second
    assert found[0].requests[0].commit_s[0] == pytest.approx(2.0, abs=1e-9)
    assert read_cells(tmp_path / "nothing.jsonl") == []


def test_a_torn_last_line_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "cells.jsonl"
    append_cell(path, cell())
    whole = cell_to_line(cell(repeat=1))
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(cell_to_line(cell()) + whole[:cut])
        assert [one.key for one in read_cells(path)] == [("ar", 1, 0)]
        append_cell(path, cell(repeat=2))
        assert [one.key for one in read_cells(path)] == [("ar", 1, 0), ("ar", 1, 2)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda entry: entry.update(schema_version=99), "schema version 99"),
        (lambda entry: entry.pop("method"), "not a cell of this schema"),
        (lambda entry: entry["requests"][0].pop(), "do not fit together|not a cell"),
        (lambda entry: entry["requests"][0].append(1), "not a cell of this schema"),
        (lambda entry: entry["requests"][0].__setitem__(6, [3.0, 2.0, 1.0]), "do not fit together"),
        (lambda entry: entry["requests"][0].__setitem__(6, []), "do not fit together"),
    ],
)
def test_a_damaged_cell_is_refused_by_line(tmp_path, damage, message):
    entry = json.loads(cell_to_line(cell()))
    damage(entry)
    with pytest.raises(UserError, match=message):
        cell_from_line(json.dumps(entry).encode(), "cells.jsonl, line 3")
    with pytest.raises(UserError, match="line 3 is damaged"):
        cell_from_line(b'{"method": NaN}', "cells.jsonl, line 3")


def test_the_same_cell_twice_is_refused(tmp_path):
    path = tmp_path / "cells.jsonl"
    append_cell(path, cell())
    append_cell(path, cell())
    with pytest.raises(UserError, match=r"line 2: \('ar', 1, 0\) is there twice"):
        read_cells(path)
