"""The only assembler: from a config to a measured run directory and its table.

Everything a user can get wrong is found before the first generation: the config, the names, the model, the drafters,
the lengths of the prompts. Then the same config always leads to the same directory, so that starting a killed run
again resumes it, and starting a finished one prints its table.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selfspec.config import CompareConfig, GenerateConfig, allowed, conf_dir, config_hash, resolve, run_dir
from selfspec.errors import UserError
from selfspec.measure.bench import Bench, assemble
from selfspec.measure.costs import costs
from selfspec.measure.protocol import measure, warm_up
from selfspec.measure.ranks import failed_elsewhere, in_step, said_once, seen_by_first
from selfspec.measure.speed import read_bandwidth
from selfspec.measure.tracing import trace
from selfspec.mirror import keep_files, mirror_run, tracked
from selfspec.provenance import changed_contents, collect, redact, redact_argv
from selfspec.records import Key, PromptRecord, RunWriter, read_run, to_json, writable, write_traces
from selfspec.report.render import print_table
from selfspec.report.runs import measured
from selfspec.report.tables import comparison_table
from selfspec.target.fastest import choices_made, fastest_dtype
from selfspec.target.loading import choose_device, choose_dtype
from selfspec.tracking import Tracker, log_result, tracker_from_config


def run_compare(composed: DictConfig) -> dict[str, Any]:
    """Measures what the config asks for, or shows what is already measured; returns the summary.

    Raises UserError for a bad config, and, after everything is written, for tokens that differ from the target's own.
    """
    config = resolve(CompareConfig, composed)
    refuse_side_by_side(config)
    with in_step(config.runtime) as first:
        settle_runtime(config)
        if not first:
            config.tracking = {"kind": "none"}
        with seen_by_first(choose_folder(config), first) as folder:
            return compare_into(folder, config)


def compare_into(folder: Path, config: CompareConfig) -> dict[str, Any]:
    """Measures into the folder, unless that is done; prints the table."""
    measured_before = (folder / "DONE").exists()
    if not measured_before:
        measure_into(folder, config)
    elif os.environ.get("WANDB_SWEEP_ID"):
        mirror_run(folder, config)  # a sweep's trial has to report, measured before or not
    run = read_run(folder)
    assert run.summary is not None, "a finished run has a summary"
    print_table(comparison_table([measured(run)]))
    print(f"{folder}" + ("  (measured before; force=true measures again)" if measured_before else ""))
    refuse_mismatch(run.summary, folder)
    return run.summary


def settle_runtime(config: GenerateConfig) -> None:
    """Replaces `auto` by what this machine has, so that the hash names what really runs. UserError for a target on
    several ranks in an entry point that has not brought them together (`in_step`).
    """
    if config.runtime.tensor_parallel > 1 and not torch.distributed.is_initialized():
        raise UserError("runtime.tensor_parallel is for compare.py and generate.py. Leave it at 1 here.")
    device = choose_device(config.runtime.device)
    if config.runtime.num_threads is not None:
        torch.set_num_threads(config.runtime.num_threads)
    if config.runtime.dtype == "fastest":
        Console(stderr=True).print(f"runtime.dtype=fastest is {fastest_dtype(device).reason}", soft_wrap=True)
    config.runtime.dtype = str(choose_dtype(config.runtime.dtype, device)).removeprefix("torch.")
    config.runtime.device = str(device)


def choose_folder(config: CompareConfig) -> Path:
    """This config's latest folder; with `force` a fresh one beside it once it is finished: <name>-<hash8>-2."""
    first = run_dir(config)
    existing = [first] if first.exists() else []
    while existing and (following := Path(f"{first}-{len(existing) + 1}")).exists():
        existing.append(following)
    if not existing:
        return first
    if config.force and (existing[-1] / "DONE").exists():
        return Path(f"{first}-{len(existing) + 1}")
    return existing[-1]


def measure_into(folder: Path, config: CompareConfig) -> None:
    """The slow part: every result that the folder does not hold yet, then the summary and DONE."""
    tracker = tracker_from_config(config.tracking)
    bench = assemble(config)
    with open_writer(folder) as writer:
        begin(writer, config, bench)
        done = {record.key: record for record in read_run(folder, allow_unfinished=True).prompts}
        with tracked(tracker, config, folder) as tracker:
            try:
                run_methods(config, bench, writer, tracker, done)
            except KeyboardInterrupt:
                warn(f"interrupted; the same command goes on where it stopped, in {folder}")
                raise
            run = read_run(folder, allow_unfinished=True)
            keep_traces(config, bench, folder, run.prompts)
            summary = measured(run).summary | {"divergence": bench.comparison.report(run.prompts, bench.items)}
            if config.measure.timed:
                bytes_per_s = read_bandwidth(bench.target.device)
                summary["costs"] = costs(run.prompts, bench.drafters, bench.target, bytes_per_s)
            tracker.summary(summary)
            writer.finish(summary)
            keep_files(tracker, config, folder)


def run_methods(
    config: CompareConfig, bench: Bench, writer: RunWriter, tracker: Tracker, done: Mapping[Key, PromptRecord]
) -> None:
    """Warm-up, then every missing result, written as it comes."""
    total = len(bench.methods) * bench.num_turns * config.measure.repeats
    if len(done) == total:
        return
    device = bench.target.device
    with progress_bar() as progress:
        task = progress.add_task("warm-up", total=2 * len(bench.methods))
        for label in warm_up(bench.methods, bench.items, config.measure.warmup_tokens, device):
            progress.update(task, advance=1, description=f"warm-up: {label}")
        progress.remove_task(task)
        task = progress.add_task("measuring", total=total, completed=len(done))
        for record in measure(
            bench.methods,
            bench.items,
            max_new_tokens=config.max_new_tokens,
            repeats=config.measure.repeats,
            seed=config.seed,
            device=device,
            compare=bench.comparison.fill_in,
            done=done,
        ):
            writer.append(record)
            log_result(tracker, record)
            progress.update(task, advance=1, description=f"{record.prompt_id}: {record.method}")


def keep_traces(config: CompareConfig, bench: Bench, folder: Path, records: Sequence[PromptRecord]) -> None:
    """traces.jsonl: a few prompts once more, token by token, when everything has been timed."""
    if config.measure.trace == 0 or (folder / "traces.jsonl").exists():
        return
    tokenizer = bench.target.tokenizer
    assert tokenizer is not None, "prompts were encoded with it"
    traces = trace(
        bench.methods,
        bench.items[: config.measure.trace],
        {record.key: record for record in records},
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        text_of=tokenizer.decode,
    )
    write_traces(folder / "traces.jsonl", traces)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """On a terminal only; never where output is collected."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def open_writer(folder: Path) -> RunWriter:
    with writable(folder, "output_dir"):
        return RunWriter(folder)


def begin(writer: RunWriter, config: CompareConfig, bench: Bench) -> None:
    """config.yaml, overrides.yaml and provenance.json; a resumed run adds its own code and time to the last."""
    now = collect(seeds={"seed": config.seed}, fingerprints=bench.fingerprints, dtype_choices=choices_made())
    path = writer.path / "provenance.json"
    if not path.exists():
        writer.write_text("config.yaml", OmegaConf.to_yaml(OmegaConf.create(redact(asdict(config)))))
        writer.write_text("overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(redact_argv(command_line_overrides()))))
        versions = {**now["packages"], "cuda": now["torch"]["cuda"]}
        machine = machine_of(now)
        provenance = {
            "config_hash": config_hash(config),
            "machine": machine,
            "versions": versions,
            **now,
            "resumed": [],
        }
        lines = [
            {name: getattr(prompt, name) for name in ("prompt_id", "category", "split", "reference")}
            for prompt in bench.prompts
        ]
        writer.write_text("prompt_set.jsonl", "".join(to_json(line) + "\n" for line in lines))
    else:
        provenance = json.loads(path.read_text())
        if changed := changed_contents(provenance, now):
            raise UserError(
                f"{writer.path} was begun with other contents of: {', '.join(changed)}. Delete it, or choose another "
                "name=... for what there is now."
            )
        if provenance["git"] != now["git"]:
            warn(f"{writer.path} was begun by other code than this; provenance.json records both.")
        provenance["resumed"].append({name: now[name] for name in ("time_utc", "argv", "git")})
    writer.write_text("provenance.json", to_json(provenance, indent=2) + "\n")


def machine_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share for their times to be compared."""
    return {
        "host_hash": provenance["host_hash"],
        "cpu": provenance["cpu"]["model"],
        "num_cpus": provenance["cpu"]["num_available_cores"],
        "num_threads": provenance["torch"]["num_threads"],
        "gpus": [gpu["name"] for gpu in provenance["gpus"]],
    }


def refuse_side_by_side(config: CompareConfig) -> None:
    """Jobs that share a machine slow each other down, and their times would measure the launcher."""
    if not config.measure.timed or not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    launcher = HydraConfig.get().launcher
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    if kind in ("LocalLauncher", "RayLauncher") or (kind == "JoblibLauncher" and launcher.get("n_jobs") != 1):
        raise UserError(
            f"{kind} runs several jobs at once on this machine, and what they time would be each other. Leave "
            "hydra/launcher out (one job after another), give every job a machine of its own (hydra/launcher=slurm), "
            "or measure acceptance only: measure.timed=false, and tables say so."
        )


def refuse_mismatch(summary: Mapping[str, Any], folder: Path) -> None:
    """Tokens that differ beyond a near tie are an error, and the last thing the run says."""
    wrong = {
        name: stats["equality"]["mismatch"]
        for name, stats in summary["methods"].items()
        if stats["equality"] and stats["equality"]["mismatch"]
    }
    if wrong:
        counts = ", ".join(f"{name} on {count} of {summary['num_prompts']} prompts" for name, count in wrong.items())
        raise UserError(
            f"the tokens are not the target's own: {counts}, and by more than rounding explains. The speedups above do "
            f"not count. Where they first differ: `divergence` in {folder / 'summary.json'}"
        )


# ---- entry points


def entry_point(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], object]]:
    """`@hydra.main` on this project's conf/, wherever it is started, with errors as `user_errors` shows them."""

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def job(composed: DictConfig) -> object:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                return task(composed)  # one bad job of a sweep is reported when the others are done
            return user_errors(task)(composed)

        return user_errors(hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(job))

    return decorate


def user_errors(function: Callable[..., object]) -> Callable[..., object]:
    """Mistakes of the user become one line on stderr and exit code 1; everything else keeps its traceback."""

    @functools.wraps(function)
    def guarded(*args: object) -> object:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra's errors reach us instead of being printed at length
        try:
            return function(*args)
        except UserError as error:
            message = str(error)
        except HydraException as error:
            message = composition_message(error)
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception:
            if failed_elsewhere():  # another rank has said why; this one only lost it
                sys.exit(1)
            raise
        sys.exit(said_once(f"error: {' '.join(message.split())}"))

    return guarded


OPEN = ("drafter", "drafters", "grid", "lookahead", "prompts", "tracking")  # their keys are checked where they are read


def composition_message(error: Exception) -> str:
    """Hydra's complaint in one line, with the names that would have been allowed."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"No {group} named {name!r}. {allowed(name, error.options)}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        names = [str(name) for name in cause.parent_node if name != "hydra"]
        parent, _, key = str(cause.full_key).rpartition(".")
        adding = parent.split(".")[0] in OPEN
        hint = f" To add one that the file does not have, write a plus: +{cause.full_key}=..." if adding else ""
        return f"No key {cause.full_key!r}. {allowed(key, names)}{hint}"
    return str(error).split("See https://")[0]


def command_line_overrides() -> list[str]:
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def warn(message: str) -> None:
    Console(stderr=True).print(f"warning: {message}", style="yellow", soft_wrap=True, highlight=False)
