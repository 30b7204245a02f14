"""The concurrency experiment as it is started: balanced cells on one load, killed, gone on with, extended, refused."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from selfspec import UserError
from selfspec.config import conf_dir, resolve
from selfspec.measure import concurrency
from selfspec.measure.concurrency import (
    ConcurrencyConfig,
    Way,
    assemble,
    cell_order,
    cells,
    check,
    served,
    wanted,
    warm_up,
)
from selfspec.records.serving import read_cells

ROOT = Path(__file__).parents[2]


def config_of(*overrides, name="concurrency_smoke") -> ConcurrencyConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(ConcurrencyConfig, compose(name, list(overrides)))


def start(folder, *overrides):
    command = [sys.executable, "experiments/concurrency.py", "--config-name", "concurrency_smoke", f"out={folder}"]
    return subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_both_configs_compose_and_pass_their_checks():
    for name in ("concurrency", "concurrency_smoke"):
        check(config_of(name=name))
    assert config_of(name="concurrency").rows == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("labels", "rows"), [("abc", [1, 2, 4]), ("abcd", [1, 2, 4]), ("abc", [1, 8])])
def test_methods_on_the_same_rows_follow_each_other_and_no_cell_always_the_same_other(labels, rows):
    """Over as many repeats as balance needs: the methods at every number of rows, and the numbers of rows."""
    ways = [Way(label, None, {}) for label in labels]
    orders = [[(way.label, num_rows) for way, num_rows in cell_order(ways, rows, repeat)] for repeat in range(12)]
    blocks = {num_rows: [] for num_rows in rows}
    for order in orders:
        assert len(set(order)) == len(labels) * len(rows)
        for num_rows in rows:
            places = [place for place, (_, n) in enumerate(order) if n == num_rows]
            assert places == list(range(places[0], places[0] + len(labels))), "one after the other"
            blocks[num_rows].append([order[place][0] for place in places])
    for found in [*blocks.values(), [list(dict.fromkeys(n for _, n in order)) for order in orders]]:
        followers = Counter(pair for block in found for pair in pairwise(block))
        firsts = Counter(block[0] for block in found)
        number = len(found[0])
        assert len(followers) == number * (number - 1) and len(set(followers.values())) == 1, "after each equally often"
        assert len(firsts) == number and len(set(firsts.values())) == 1, "and equally often first"
    for order in orders:
        at_rows = [tuple(label for label, n in order if n == num_rows) for num_rows in rows]
        assert len(set(at_rows)) > 1, "not in the same order at all numbers of rows"


def test_cells_hold_the_same_load_and_float32_tokens_do_not_depend_on_the_cell():
    config = config_of("num_requests=5", "rows=[1,3]", "repeats=2", "rate_per_s=50")
    service = assemble(config)
    found = list(cells(service, done={("ngram", 3, 0)}))
    assert {one.key for one in found} == wanted(config) - {("ngram", 3, 0)}
    for repeat in range(2):
        of_repeat = [one for one in found if one.repeat == repeat]
        assert len({tuple(r.tokens_sha for r in one.requests) for one in of_repeat}) == 1
        for one in of_repeat:
            assert one.open_loop
            assert [r.num_prompt_tokens for r in one.requests] == [len(r.prompt_ids) for r in service.loads[repeat]]
            assert [sum(r.num_emitted) for r in one.requests] == [r.max_new_tokens for r in service.loads[repeat]]
            assert [r.arrival_s for r in one.requests] == [r.arrival_s for r in service.loads[repeat]]
    assert service.loads[0] != service.loads[1]


def test_a_killed_run_goes_on_where_it_stopped_and_can_be_extended(tmp_path):
    small = ("num_requests=3", "rows=[1,2]", "repeats=1")
    done = start(tmp_path, *small)
    assert done.returncode == 0, done.stderr
    assert "equal to AR" in done.stdout and "ITL ms" in done.stdout
    lines = (tmp_path / "cells.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    (tmp_path / "cells.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:50])
    assert start(tmp_path, *small).returncode == 0
    assert (tmp_path / "cells.jsonl").read_bytes().splitlines(keepends=True)[:4] == lines[:4]
    assert len(read_cells(tmp_path / "cells.jsonl")) == 6

    again = start(tmp_path, *small)
    assert again.returncode == 0 and len(read_cells(tmp_path / "cells.jsonl")) == 6
    before = {name: (tmp_path / name).read_bytes() for name in ("concurrency.md", "concurrency.pdf", "concurrency.png")}
    assert start(tmp_path, *small).returncode == 0
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "the same records, the same bytes"

    assert start(tmp_path, "num_requests=3", "rows=[1,2]", "repeats=2").returncode == 0
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert len(read_cells(tmp_path / "cells.jsonl")) == 12
    assert len(provenance["resumed"]) == 2 and len(provenance["loads"]) == 2
    assert "repeats=2" in (tmp_path / "concurrency.md").read_text().splitlines()[0]

    other = start(tmp_path, *small, "seed=1")
    assert other.returncode == 1 and "holds a run of another config" in other.stderr


def test_what_was_begun_with_other_contents_is_not_gone_on_with(tmp_path):
    small = ("num_requests=2", "rows=[1]", "repeats=1")
    assert start(tmp_path, *small).returncode == 0
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    provenance["fingerprints"] |= {"target": "0" * 16}
    (tmp_path / "provenance.json").write_text(json.dumps(provenance))
    again = start(tmp_path, *small[:2], "repeats=2")
    assert again.returncode == 1 and "was begun with other contents of: target. Choose another folder" in again.stderr
    assert {cell.repeat for cell in read_cells(tmp_path / "cells.jsonl")} == {0}


def test_a_cell_is_allocated_in_the_warm_up_for_trees_too():
    service = assemble(config_of("num_requests=2", "rows=[1]", "repeats=1", "~drafters.ngram",
                                "+drafters.early_exit.lookahead={kind: tree, branches: [3, 2]}"))  # fmt: skip
    list(warm_up(service, done=set()))
    allocated = {key: decoder.rows for key, decoder in service.decoders.items()}
    list(cells(service, done=set()))
    assert all(service.decoders[key].rows is rows for key, rows in allocated.items()) and len(allocated) == 2


def test_two_at_once_do_not_write_into_one_folder(tmp_path):
    """The second would measure every cell again, and cells.jsonl would then be refused for holding them twice."""
    with open(tmp_path / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = start(tmp_path)
    assert done.returncode == 1 and "is being written by another process; wait for it" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_what_is_kept_of_a_request_adds_up():
    (load,) = assemble(config_of("num_requests=2", "rows=[2]", "repeats=1")).loads
    assert len(load) == 2
    service = assemble(config_of("num_requests=2", "rows=[2]", "repeats=1"))
    for way in service.ways:
        for output in concurrency.serve(service, way, 2, load):
            kept = served(output)
            assert sum(kept.num_emitted) == len(output.token_ids)
            assert kept.num_accepted <= kept.num_drafted
            assert kept.commit_s == output.commit_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rows=[]"], r"rows=\[\] is not possible"),
        (["rows=[1,0]"], r"rows=\[1, 0\]"),
        (["rows=[2,2]"], r"rows=\[2, 2\]"),
        (["repeats=0"], "repeats=0"),
        (["num_requests=0"], "num_requests=0"),
        (["+drafters.ar={kind: ngram}"], "label 'ar' is taken"),
        (["+drafters.x={max_match: 2}"], "drafters.x has no kind"),
    ],
)
def test_an_impossible_experiment_is_refused_before_anything_is_loaded(overrides, message):
    with pytest.raises(UserError, match=message):
        check(config_of(*overrides))


def test_mistakes_are_one_line_on_the_command_line(tmp_path):
    for override, message in (
        ("lengths=file", "No value for lengths.path"),
        ("rate_per_s=-1", "rate_per_s=-1.0 is not possible"),
        ("lenghts=tiny", "lenghts"),
    ):
        done = start(tmp_path, override)
        assert done.returncode == 1
        assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
