"""Hydra's launchers: jobs that share a machine refuse to time; SLURM jobs get machines of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from selfspec.config import conf_dir
from selfspec.records import read_run
from selfspec.report.runs import measured

REPO = Path(__file__).parent.parent.parent
LAUNCHERS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
    "submitit's local executor": ("hydra_plugins.hydra_submitit_launcher", ["hydra/launcher=submitit_local"]),
}


def multirun(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Two jobs of the tiny experiment; Hydra and its launchers write below `tmp_path`."""
    swept = ["-m", "experiment=smoke_tiny", "measure.max_prompts=1", "max_new_tokens=4", "~drafters.ngram"]
    places = [f"output_dir={tmp_path}", f"hydra.sweep.dir={tmp_path / 'hydra'}", "drafters.early_exit.exit_layer=1,2"]
    command = [sys.executable, str(REPO / "experiments" / "compare.py"), *swept, *places, *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_jobs_that_share_a_machine_run_untimed_and_the_table_says_so(name: str, tmp_path: Path):
    module, launcher = LAUNCHERS[name]
    pytest.importorskip(module)
    done = multirun(tmp_path, "measure.timed=false", "measure.noise_check=false", "measure.trace=0", *launcher)
    assert done.returncode == 0, done.stderr
    runs = [measured(read_run(path.parent)) for path in tmp_path.rglob("DONE")]
    assert len(runs) == 2 and all("untimed" in run.label for run in runs)
    layers = [json.dumps(run.run.config["drafters"]["early_exit"]["exit_layer"]) for run in runs]
    assert sorted(layers) == ["1", "2"]


def test_joblib_refuses_to_time_before_anything_is_written(tmp_path: Path):
    module, launcher = LAUNCHERS["joblib"]
    pytest.importorskip(module)
    done = multirun(tmp_path, *launcher)
    assert done.returncode != 0
    assert "JoblibLauncher runs several jobs at once on this machine" in done.stderr
    assert "measure.timed=false" in done.stderr
    assert not list(tmp_path.rglob("prompts.jsonl"))


def test_a_slurm_job_gets_a_machine_of_its_own():
    """What SLURM would be told, written by submitit itself."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    from submitit.slurm.slurm import _make_sbatch_string

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("compare", ["experiment=smoke_tiny", "hydra/launcher=slurm"], return_hydra_config=True)
    launcher = composed.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    text = _make_sbatch_string(
        command="run",
        folder="logs",
        nodes=launcher.nodes,
        gpus_per_node=launcher.gpus_per_node,
        additional_parameters=dict(launcher.additional_parameters),
    )
    assert "#SBATCH --exclusive\n" in text and "#SBATCH --gpus-per-node=1\n" in text
