"""What a table says, and what it refuses to say."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys

import pytest
from made_runs import made_record, made_records, timed_record, write_run
from rich.console import Console

from selfspec.errors import UserError
from selfspec.report.caption import _hardware, _lookahead
from selfspec.report.render import print_table, to_latex, to_markdown
from selfspec.report.runs import find_run_dirs, load_runs
from selfspec.report.tables import DASH, category_table, comparison_table, to_csv


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("outputs") / "study" / "quick-0123abcd")


@pytest.fixture(scope="module")
def runs(run_dir):
    return load_runs(run_dir)


def printed(table, width=100, encoding="utf-8"):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_table(table, Console(file=stream, width=width, highlight=False))
    stream.flush()
    return raw.getvalue().decode(encoding)


def row_of(table, method):
    return next(row for block in table.blocks for row in block.rows if row[0].rstrip("†‡!") == method)


def test_cells_are_the_summary_and_not_something_else(runs):
    stats = runs[0].summary["methods"]["early_exit"]
    row = dict(zip(comparison_table(runs).one_line_header, row_of(comparison_table(runs), "early_exit"), strict=True))
    low, high = stats["speedup_paired_geomean_low"], stats["speedup_paired_geomean_high"]
    assert row == {
        "method": "early_exit",
        "tokens/s": f"{stats['tokens_per_s']:.1f}",
        "speedup vs AR": f"{stats['speedup_paired_geomean']:.2f}* [{low:.2f}, {high:.2f}]",
        "τ": "2.40",  # 60 tokens in 25 rounds
        "α": "0.75",  # 30 over 40
        "draft/verify/other %": "30/60/10",
        "TTFT ms": f"{1000 * stats['ttft_median_s']:.0f}",
        "peak GB": "1.20",
        "equal to AR": "12/12",
        "ROUGE-L to AR": DASH,  # there for the lossy method only
    }


def test_lossy_and_synthetic_methods_carry_marks_and_the_marks_are_explained(runs, load_one_at):
    table = comparison_table(runs)
    methods = [row[0] for row in table.blocks[0].rows]
    assert methods == ["hf_generate", "ar", "early_exit", "typical_exit†", "synthetic_80‡"]
    assert {note[0] for note in table.notes} >= {"†", "‡", "*", DASH}
    plain = comparison_table([load_one_at([record for record in made_records() if record.method == "ar"])])
    assert not {note[0] for note in plain.notes} & {"†", "‡", "*"}


@pytest.fixture
def load_one_at(tmp_path):
    return lambda records, **more: load_runs(write_run(tmp_path / "one-0000000f", records, **more))[0]


def test_what_was_not_measured_is_a_dash_and_never_zero(runs):
    row = row_of(comparison_table(runs), "hf_generate")
    assert row[3:6] == [DASH, DASH, DASH]  # plain generate has no rounds, so no τ, α or phases


def test_equality_cell_counts_near_ties_and_mismatches_apart(load_one_at):
    tokens = [9, 9, 9]
    records = [made_record(f"p{i}") for i in range(4)]
    records += [
        made_record("p0", "draft", [3], 2, equals_ar=True, divergence_class="identical"),
        made_record("p1", "draft", [3], 2, token_ids=tokens, equals_ar=False, divergence_class="near_tie"),
        made_record("p2", "draft", [3], 2, token_ids=tokens, equals_ar=False, divergence_class="mismatch"),
        made_record("p3", "draft", [3], 2, token_ids=tokens, equals_ar=False, divergence_class="mismatch"),
    ]
    table = comparison_table([load_one_at(records)])
    assert row_of(table, "draft")[0] == "draft!" and row_of(table, "draft")[-1] == "1/4 (1~ 2!)"
    assert {note[0] for note in table.notes} >= {"~", "!"}


def test_percentages_add_up_to_one_hundred(load_one_at):
    record = made_record("p0", "draft", [3], 2, prefill_s=0.0, decode_s=0.3, ttft_s=0.1)
    record.rounds[0].draft_s = record.rounds[0].verify_s = record.rounds[0].other_s = 0.1
    cell = row_of(comparison_table([load_one_at([made_record("p0"), record])]), "draft")[5]
    assert sorted(cell.split("/")) == ["33", "33", "34"]


def test_caption_names_hardware_versions_precision_temperature_prompts_and_hash(runs):
    caption = comparison_table(runs).caption
    for part in (
        "smollm2",
        "float32",
        "temperature 0",
        "12 prompts, 3 repeats",
        "Xeon & co_1",
        "2 threads",
        "torch 2.13.0",
    ):
        assert part in caption
    assert caption.endswith("Config 0123abcd.")


def test_a_noisy_run_says_so_in_every_caption_and_label(load_one_at):
    records = made_records(repeats=1)
    slow = [timed_record(r.prompt_id, "ar_again", 60, 60, 1.2 * r.total_s, category=r.category)
            for r in records if r.method == "ar"]  # fmt: skip
    item = load_one_at(records + slow)
    for table in (comparison_table([item]), category_table([item])):
        assert table.caption.startswith("NOISY (one-0000000f)")
        assert "noisy" in table.blocks[0].label
        assert any(note.startswith("AR against AR: 0.8") for note in table.notes)
    assert "ar_again" not in [row[0] for row in comparison_table([item]).blocks[0].rows]


def test_the_caption_says_k_for_every_drafter_and_counts_threads_in_english():
    shared = {"kind": "fixed", "num_drafted": 4}
    own = {"kind": "ngram", "lookahead": {"kind": "fixed", "num_drafted": 2}}
    adaptive = {"kind": "ngram", "lookahead": {"kind": "confidence", "threshold": 0.4, "most": None}}
    exits = {"kind": "early_exit", "exit_layer": 3}
    assert _lookahead({"lookahead": shared, "drafters": {"a": exits}}) == "K = 4"
    assert _lookahead({"lookahead": shared, "drafters": {"a": exits, "b": own}}) == "K = 4, K = 2 for b"
    assert _lookahead({"lookahead": shared, "drafters": {"b": own}}) == "K = 2 for b"
    assert _lookahead({"lookahead": 3, "drafters": {"a": exits, "c": adaptive}}) == (
        "K = 3, confidence (threshold 0.4) for c"
    )
    assert _lookahead({"lookahead": shared, "drafters": {}}) == ""
    assert _hardware({"num_cpus": 1, "num_threads": 1}) == "1 CPU, 1 thread"


def test_runs_of_one_table_share_what_they_share_and_say_what_differs(tmp_path):
    write_run(tmp_path / "a-0000000a", made_records(4, 1))
    write_run(tmp_path / "b-0000000b", made_records(5, 1))
    table = comparison_table(load_runs(tmp_path))
    assert [block.label for block in table.blocks] == ["a-0000000a", "b-0000000b"]
    assert "a-0000000a: 4 prompts. b-0000000b: 5 prompts." in table.caption
    assert table.caption.count("Xeon") == 1


# ---- the formats


def test_console_table_fits_one_hundred_columns_with_every_cell_whole(runs):
    table = comparison_table(runs)
    text = printed(table)
    assert max(map(len, text.splitlines())) <= 100
    for row in table.blocks[0].rows:
        line = next(line for line in text.splitlines() if line.startswith(row[0] + " "))
        assert re.split(r"\s{2,}", line.strip()) == row


def test_narrow_console_loses_no_digit(runs):
    digits = re.sub(r"\D", "", "".join(row_of(comparison_table(runs), "early_exit")[1]))
    text = printed(comparison_table(runs), width=60)
    assert max(map(len, text.splitlines())) <= 60 and digits in re.sub(r"\D", "", text)


def test_ascii_console_gets_ascii(runs):
    text = printed(comparison_table(runs), encoding="ascii")
    assert "tau" in text and "alpha" in text


def test_six_categories_fit_one_hundred_columns(load_one_at):
    names = ("chat", "code", "math", "qa", "summarise", "translate")
    records = [record for record in made_records(12, 1)]
    for record in records:
        record.category = names[int(record.prompt_id[1:]) % 6]
    table = category_table([load_one_at(records)])
    assert table.header == ["method", *names, "overall", "τ"]
    assert max(map(len, printed(table).splitlines())) <= 100
    assert "ar" not in [row[0] for row in table.blocks[0].rows]


def test_markdown_rows_have_one_cell_per_column_even_with_pipes_in_labels(load_one_at):
    run = load_one_at([made_record("p0"), made_record("p0", "a|b*c", [3], 2)], machine={"cpu": "x|y\nz"})
    lines = [line for line in to_markdown(comparison_table([run])).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert r"a\|b\*c" in lines[-1]


def test_latex_escapes_every_special_character(load_one_at):
    nasty = r"[50%_&#${}~^\|<>" + '"'
    run = load_one_at([made_record("p0"), made_record("p0", nasty, [3], 2)], machine={"cpu": nasty})
    text = to_latex(comparison_table([run]))
    line = next(line for line in text.splitlines() if "50" in line and line.endswith(r"\\"))
    unescaped = re.sub(
        r"\\text\w+\{\}|\\[&%$#_{}]|\$\\(tau|alpha|sum)\$|\\textsuperscript\{.*?\}+|\\\\$|\{\[\}", "", line
    )
    assert not re.search(r"[%_#$~^|<>\"\\{}]", unescaped)
    assert unescaped.count("&") == len(comparison_table([run]).header) - 1
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    assert body.count("\\midrule") == 1 and text.isascii()


def test_csv_keeps_full_precision_and_traces_every_row(runs):
    rows = list(csv.DictReader(io.StringIO(to_csv(runs))))
    assert {row["category"] for row in rows} == {"overall", "chat", "code", "math"}
    row = next(row for row in rows if row["category"] == "overall" and row["method"] == "early_exit")
    stats = runs[0].summary["methods"]["early_exit"]
    assert (row["run"], row["config_hash"]) == ("quick-0123abcd", "0123abcd")
    assert float(row["speedup_paired_geomean"]) == stats["speedup_paired_geomean"]
    assert [float(value) for value in row["joint_acceptance"].split(";")] == stats["joint_acceptance"]
    assert next(row for row in rows if row["method"] == "hf_generate")["al_pooled"] == ""


def test_every_format_is_byte_identical_on_rebuild_in_another_process(run_dir, runs):
    program = (
        "import sys; from selfspec.report.runs import load_runs; from selfspec.report.tables import *;"
        "from selfspec.report.render import *; runs = load_runs(sys.argv[1]); t = comparison_table(runs);"
        "sys.stdout.write(to_markdown(t) + to_latex(t) + to_csv(runs) + to_markdown(category_table(runs)))"
    )
    table = comparison_table(runs)
    expected = to_markdown(table) + to_latex(table) + to_csv(runs) + to_markdown(category_table(runs))
    done = subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=True)
    assert done.stdout == expected


# ---- which runs


def test_a_folder_a_glob_and_a_list_find_the_same_runs_once(tmp_path):
    paths = [write_run(tmp_path / f"{name}-0000000{name}", made_records(2, 1)) for name in "ab"]
    assert find_run_dirs(tmp_path) == find_run_dirs(f"{tmp_path}/*-0*") == find_run_dirs([*paths, *paths]) == paths
    for nothing in (tmp_path / "nowhere", f"{tmp_path}/z*"):
        with pytest.raises(UserError, match="no run directory at"):
            find_run_dirs(nothing)


def test_an_unfinished_run_is_refused_or_marked(tmp_path):
    path = write_run(tmp_path / "half-0000000a", made_records(2, 1), finish=False)
    with pytest.raises(UserError, match="not a finished run"):
        load_runs(path)
    table = comparison_table(load_runs(path, allow_unfinished=True))
    assert table.blocks[0].label == "half-0000000a (unfinished)"


def test_a_method_that_lacks_prompts_is_named(load_one_at):
    records = [record for record in made_records(4, 1) if (record.prompt_id, record.method) != ("p01", "early_exit")]
    notes = comparison_table([load_one_at(records)]).notes
    assert "INCOMPLETE: early_exit decoded 3 of 4 prompts of one-0000000f." in notes


def test_a_run_without_the_baseline_or_without_results_is_refused(tmp_path):
    path = write_run(tmp_path / "a-0000000a", [made_record("p0", "draft", [3], 2)])
    with pytest.raises(UserError, match=r"no 'ar' results to compare with .it has: draft"):
        load_runs(path)
    with pytest.raises(UserError, match="holds no results"):
        load_runs(write_run(tmp_path / "b-0000000b", []))


def test_a_noisy_run_says_so(load_one_at):
    records = [timed_record(f"p{i}", "ar", 9, 9, 1 + 0.2 * r + i / 100, repeat=r) for i in range(8) for r in (0, 1)]
    table = comparison_table([load_one_at(records)])
    assert table.blocks[0].label.endswith("(noisy)")
    assert any("NOISY" in note for note in table.notes)
