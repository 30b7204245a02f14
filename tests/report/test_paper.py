"""A study from nothing to its tables: one command, the same bytes when made again, and a README that nobody edits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from made_runs import made_records, write_run
from omegaconf import OmegaConf

from selfspec.config import CompareConfig, conf_dir, conf_names, resolve
from selfspec.errors import UserError
from selfspec.prompts import check_apart, prompts_from_config
from selfspec.report.headline import END, START, fill_in, headline
from selfspec.report.runs import load_runs

ROOT = Path(__file__).parents[2]


def test_the_headline_is_the_runs_own_table_and_only_what_is_between_the_marks_changes(tmp_path):
    (run,) = load_runs(write_run(tmp_path / "paper-0123abcd", made_records(4, 1)))
    text = headline(run, "python experiments/compare.py experiment=x", "experiments/x/paper")
    assert "paper-0123abcd" in text and "experiment=x" in text and "early_exit" in text and "Config 0123abcd" in text
    assert max(map(len, text.splitlines())) <= 240 and not any(line != line.rstrip() for line in text.splitlines())
    readme = f"# Title\n\n{START}\n\nold numbers\n\n{END}\n\nEnd.\n"
    filled = fill_in(readme, text, "README.md")
    assert filled.startswith("# Title\n") and filled.endswith("\nEnd.\n") and "old numbers" not in filled
    assert fill_in(filled, text, "README.md") == filled
    for broken in ("no marks", f"{END} {START}", readme + START):
        with pytest.raises(UserError, match="needs one line"):
            fill_in(broken, text, "README.md")


def test_the_readme_of_the_project_has_the_marks():
    assert fill_in((ROOT / "README.md").read_text(), "x", "README.md").count("x") > 0


def test_the_paper_names_experiments_that_exist_and_reports_no_prompt_it_was_tuned_on():
    names = OmegaConf.load(conf_dir() / "paper.yaml").experiments
    assert set(names) <= set(conf_names("experiment"))
    for name in names:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = resolve(CompareConfig, compose("compare", [f"experiment={name}"]))
        assert config.tuned_on == ["selfspec_tune24"] and config.measure.noise_check
        check_apart(prompts_from_config(config.prompts), config.tuned_on)
        for label, drafter in config.drafters.items():  # named for its folder, and for how far it looks
            folder = drafter.get("checkpoint") or drafter.get("model")
            assert folder is None or (ROOT / folder / "config.json").is_file()
            assert folder is None or label.split("_tree")[0].split("_gain")[0] == folder.rpartition("/")[2]


@pytest.mark.slow
def test_one_command_measures_once_and_rebuilds_the_same_bytes(tmp_path):
    overrides = f'overrides=["output_dir={tmp_path}/runs","measure.max_prompts=2","max_new_tokens=6"]'
    command = [
        sys.executable,
        str(ROOT / "experiments" / "paper.py"),
        "experiments=[smoke_tiny]",
        overrides,
        "readme=null",
    ]
    made = []
    for out in ("one", "two"):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, f"out={tmp_path / out}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        made.append({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()})
    assert made[0] == made[1]
    assert {"comparison.md", "costs.tex", "statistics.csv", "speedup.pdf"} <= set(made[0])
    assert any(name.startswith("trace-") for name in made[0])
    assert len(list((tmp_path / "runs").rglob("DONE"))) == 1
