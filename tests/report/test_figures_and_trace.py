"""Figures and pages: the same bytes each time, nothing cut off, nothing that only colour tells, nothing unescaped."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from made_runs import made_record, write_run
from matplotlib.image import imread

from selfspec.errors import UserError
from selfspec.records import TraceRecord, TraceRound, TraceToken
from selfspec.report.figures import acceptance_figure, all_figures, time_figure, to_bytes
from selfspec.report.runs import load_runs, told_apart
from selfspec.report.trace import KINDS, trace_page


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("outputs") / "quick-0123abcd")


@pytest.fixture(scope="module")
def runs(run_dir):
    return load_runs(run_dir)


def test_no_bar_of_the_time_figure_ends_at_its_frame(runs):
    (axes,) = time_figure(runs).axes
    longest = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert 0 < longest < axes.get_xlim()[1]


def test_figures_are_byte_identical_in_another_process_and_under_another_style(run_dir):
    program = (
        "import sys, hashlib; import matplotlib; matplotlib.rcParams['font.size'] = 20;"
        "from selfspec.report.runs import *;"
        "from selfspec.report.figures import *; runs = load_runs(sys.argv[1]);"
        "print({n: hashlib.sha256(b''.join(to_bytes(f(runs), e) for e in ('pdf', 'png'))).hexdigest()"
        " for n, f in all_figures(runs).items()})"
    )
    seen = [
        subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=True).stdout
        for program in (program, program.replace("matplotlib.rcParams['font.size'] = 20;", ""))
    ]
    assert seen[0] == seen[1] and "acceptance" in seen[0]


def test_figures_hold_no_date_and_no_version(runs):
    for make in all_figures(runs).values():
        pdf, png = (to_bytes(make(runs), file_format) for file_format in ("pdf", "png"))
        assert b"CreationDate" not in pdf and b"Matplotlib" not in pdf and b"Software" not in png


def test_nothing_reaches_the_border_of_a_figure(runs):
    """Text that is cut off leaves ink in the outermost pixels."""
    for name, make in all_figures(runs).items():
        grey = imread(io.BytesIO(to_bytes(make(runs), "png")))[:, :, :3].mean(axis=2)
        border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert border.min() == 1.0, f"{name} is cut off"


def test_figures_use_no_colour(runs):
    for make in all_figures(runs).values():
        pixels = imread(io.BytesIO(to_bytes(make(runs), "png")))[:, :, :3]
        assert np.ptp(pixels, axis=2).max() < 1e-6


def test_without_drafts_there_is_no_acceptance_figure(tmp_path):
    runs = load_runs(write_run(tmp_path / "ar-0000000a", [made_record("p0"), made_record("p1")]))
    assert set(all_figures(runs)) == {"time"}
    with pytest.raises(UserError, match="no acceptance to draw"):
        acceptance_figure(runs)


# ---- trace


class Page(HTMLParser):
    """Collects tags with their attributes, checks nesting, and keeps the text by class."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, attrs in self.open:
            for name in (attrs.get("class") or "").split():
                self.text.setdefault(name, []).append(data)


NASTY = '<script>alert("1")</script>&amp;\n'


@pytest.fixture
def page():
    tokens = [
        TraceToken("The", 1, "accepted", 0.9, 0.75),
        TraceToken(NASTY, 2, "rejected", 0.01, 0.5),
        TraceToken(" river", 3, "correction", 0.25),
    ]
    rounds = [TraceRound(tokens, 0.010, 0.020, 0.0), TraceRound([TraceToken("", 4, "bonus")], 0.0, 0.015, 0.0)]
    return Page(trace_page([TraceRecord("p<1>", "early_exit", NASTY, rounds)]))


def test_trace_shows_every_token_under_its_kind_with_its_chances(page):
    body = {kind: "".join(page.text[kind]) for kind in KINDS}
    assert "The" in body["accepted"] and "q = 0.75, p = 0.9" in body["accepted"]
    assert "river" in body["correction"] and "p = 0.25" in body["correction"]
    assert "∅" in body["bonus"]  # a token without text is still there


def test_trace_escapes_what_the_model_wrote(page):
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert NASTY.replace("\n", "⏎") in "".join(page.text["rejected"])
    assert "".join(page.text["prompt"]) == NASTY
    assert "".join(page.text["output"]) == "The river"  # rejected tokens are not part of the output


def test_trace_bars_are_to_scale_and_spelled_out(page):
    bars = [attrs for tag, attrs in page.tags if tag == "span" and "style" in attrs]
    assert [attrs["style"] for attrs in bars] == [
        "width:33.33%", "width:66.67%", "width:0.00%", "width:0.00%", "width:50.00%", "width:0.00%"
    ]  # fmt: skip
    titles = [attrs["title"] for _, attrs in page.tags if "title" in attrs]
    assert titles[0] == "draft 10.00 ms, verify 20.00 ms, other 0.00 ms"
    assert "τ = 1.50" in "".join(page.text["facts"])  # 3 kept tokens in 2 rounds


def test_trace_page_needs_nothing_from_outside(page):
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs]
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>
const token = document.querySelector("tbody .token"), tip = token.querySelector(".tip");
const before = getComputedStyle(tip).display;
const probe = triesLeft => {
token.focus();
if (getComputedStyle(tip).display === "none" && triesLeft) return setTimeout(probe, 50, triesLeft - 1);
const colours = ["accepted", "rejected", "correction", "bonus"].map(
  kind => getComputedStyle(document.querySelector("tbody ." + kind)).backgroundColor);
document.title = JSON.stringify([before, getComputedStyle(tip).display, new Set(colours).size,
  document.documentElement.scrollWidth <= innerWidth]);
};
probe(40); // the window has the focus only some time after it is made
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_trace_works_in_a_real_browser(tmp_path):
    kinds = [TraceToken(f" {kind}", 1, kind, 0.5, 0.5) for kind in KINDS] * 30
    text = trace_page([TraceRecord("p", "m", "Hi " * 400, [TraceRound(kinds, 0.1, 0.1, 0.1)])])
    (tmp_path / "page.html").write_text(text.replace("</body>", PROBE))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--window-size=800,600",
        "--virtual-time-budget=4000",
    ]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
    )
    title = html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1])
    assert json.loads(title) == ["none", "block", len(KINDS), True]  # hidden tip shows, four colours, nothing overflows


def test_unknown_kind_and_empty_set_are_named():
    with pytest.raises(UserError, match=r"token kind 'maybe'; allowed: accepted, rejected"):
        trace_page([TraceRecord("p", "m", "", [TraceRound([TraceToken("a", 1, "maybe")], 0, 0, 0)])])
    with pytest.raises(UserError, match="no trace"):
        trace_page([])


def test_rows_of_several_runs_name_their_run_and_its_hash_only_where_names_meet():
    def labels(*names: str) -> list[str]:
        runs = [SimpleNamespace(name=name) for name in names]
        return [told_apart(item, runs) for item in runs]

    assert labels("paper-0123abcd") == [""]
    assert labels("paper-0123abcd", "paper_t1-4567cdef") == [" (paper)", " (paper_t1)"]
    assert labels("paper-0123abcd", "paper-4567cdef") == [" (paper-0123abcd)", " (paper-4567cdef)"]
    assert labels("here", "there") == [" (here)", " (there)"]
    assert labels("k-2", "k-2-0123abcd", "k-3") == [" (k-2)", " (k-2-0123abcd)", " (k-3)"]  # a name like another's stem
