"""Many rows at once: where speculation stops paying. AR and every drafter at 1, 2, 4, 8 and 16 rows, in one run.

    python experiments/concurrency.py                                   # SmolLM2-135M on this machine's CPU
    python experiments/concurrency.py rate_per_s=2 rows=[8]             # an open loop: latency under a given load
    python experiments/concurrency.py --config-name concurrency_smoke   # random weights, seconds

Each finished cell (method, rows, repeat) is on disk at once, so a killed run goes on where it stopped, more rows and
repeats can be added, and a finished run prints its tables. `out` holds cells.jsonl (the times themselves), config.yaml,
provenance.json, concurrency.json (the summary), concurrency.md, and the figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from selfspec.config import resolve
from selfspec.errors import UserError
from selfspec.measure.concurrency import (
    LOAD,
    ConcurrencyConfig,
    Service,
    assemble,
    cells,
    check,
    config_hash,
    wanted,
    warm_up,
)
from selfspec.provenance import changed_contents, collect, redact, redact_argv
from selfspec.records import take_lock, to_json, writable, write_atomic
from selfspec.records.serving import Cell, append_cell, read_cells
from selfspec.report.concurrency import concurrency_figure, concurrency_tables, summarise_cells
from selfspec.report.figures import to_bytes
from selfspec.report.render import print_table, to_markdown
from selfspec.run import entry_point, machine_of, progress_bar, settle_runtime
from selfspec.target.fastest import choices_made


def measure_into(folder: Path, config: ConcurrencyConfig) -> None:
    """Every cell that the folder does not hold yet."""
    begun(folder, config)
    asked = wanted(config)
    if asked <= {cell.key for cell in read_cells(folder / "cells.jsonl")}:
        return
    service = assemble(config)
    with writable(folder, "out"):
        lock = take_lock(folder, "choose another place: out=...")
    with lock, progress_bar() as progress:
        begin(folder, config, service, begun(folder, config))
        done = {cell.key for cell in read_cells(folder / "cells.jsonl")} & asked
        task = progress.add_task("warm-up", total=len(config.rows) * len(service.ways))
        for label in warm_up(service, done):
            progress.update(task, advance=1, description=f"warm-up: {label}")
        progress.remove_task(task)
        task = progress.add_task("measuring", total=len(asked), completed=len(done))
        for cell in cells(service, done):
            append_cell(folder / "cells.jsonl", cell)
            progress.update(task, advance=1, description=f"{cell.method}, {cell.num_rows} rows")


def begun(folder: Path, config: ConcurrencyConfig) -> dict[str, Any] | None:
    """The provenance of what the folder holds. UserError if that was measured with another config."""
    path = folder / "provenance.json"
    if not path.exists():
        return None
    provenance: dict[str, Any] = json.loads(path.read_text())
    if provenance["config_hash"] != config_hash(config):
        raise UserError(f"{folder} holds a run of another config (see its config.yaml). Choose another folder: out=...")
    return provenance


def begin(folder: Path, config: ConcurrencyConfig, service: Service, earlier: dict[str, Any] | None) -> None:
    """config.yaml and provenance.json; a resumed run adds its own code and time to the first's."""
    now = collect(seeds={"seed": config.seed}, fingerprints=service.fingerprints, dtype_choices=choices_made())
    if earlier is None:
        earlier = {"config_hash": config_hash(config), "machine": machine_of(now), **now, "resumed": []}
    elif earlier["machine"] != machine_of(now):
        raise UserError(f"{folder} was begun on another machine or with other threads: its times cannot be compared.")
    else:
        if changed := changed_contents(earlier, now, aside=(LOAD,)):
            raise UserError(
                f"{folder} was begun with other contents of: {', '.join(changed)}. Choose another folder: out=..."
            )
        earlier["resumed"].append({name: now[name] for name in ("time_utc", "argv", "git", "load_average")})
    earlier |= {"command": command(), "loads": [described(load) for load in service.loads]}
    write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(redact(asdict(config)))))
    write_atomic(folder / "provenance.json", to_json(earlier, indent=1) + "\n")


def command() -> str:
    return " ".join(["python experiments/concurrency.py", *redact_argv(sys.argv[1:])])


def described(load: Sequence[Any]) -> dict[str, Any]:
    """What was asked for, in a few numbers."""
    lengths = {
        "prompt_tokens": [len(one.prompt_ids) for one in load],
        "output_tokens": [one.max_new_tokens for one in load],
    }
    quantiles = {
        name: {f"p{which}": float(np.percentile(values, which)) for which in (0, 50, 95, 100)}
        | {"mean": float(np.mean(values))}
        for name, values in lengths.items()
    }
    return {"num_requests": len(load), "num_shortened": sum(one.shortened for one in load), **quantiles}


def write_report(folder: Path, config: ConcurrencyConfig, measured: Sequence[Cell]) -> None:
    """Tables and figure, from the folder's records alone."""
    provenance = json.loads((folder / "provenance.json").read_text())
    summary = summarise_cells(measured)
    tables = concurrency_tables(summary, caption(config, provenance))
    record = {"command": provenance["command"], "config_hash": provenance["config_hash"], **summary}
    write_atomic(folder / "concurrency.json", to_json(record, indent=1) + "\n")
    text = f"`{provenance['command']}`\n\n" + "\n".join(map(to_markdown, tables)) + "\n![](concurrency.png)\n"
    write_atomic(folder / "concurrency.md", text)
    figure = concurrency_figure(summary)
    for file_format in ("pdf", "png"):
        (folder / f"concurrency.{file_format}").write_bytes(to_bytes(figure, file_format))
    for table in tables:
        print_table(table)
    print(folder)


def caption(config: ConcurrencyConfig, provenance: Mapping[str, Any]) -> str:
    """Target, precision, load and machine."""
    machine, loads = provenance["machine"], provenance["loads"]
    lengths = ", ".join(
        f"{name.replace('_', ' ')} {np.mean([load[name]['mean'] for load in loads]):.0f} on average "
        f"({min(load[name]['p0'] for load in loads):.0f} to {max(load[name]['p100'] for load in loads):.0f})"
        for name in ("prompt_tokens", "output_tokens")
    )
    loop = "closed loop" if config.rate_per_s is None else f"Poisson arrivals at {config.rate_per_s:g}/s"
    name = config.target.name or config.target.path
    facts = [
        f"{name}, {config.runtime.dtype}, temperature {config.sampling.temperature:g}",
        f"{config.num_requests} requests per repeat, {len(loads)} repeat{'s' * (len(loads) > 1)}, {loop}; {lengths}",
        f"{machine['cpu']}, {machine['num_threads']} threads; GPUs: {', '.join(machine['gpus']) or 'none'}",
        f"torch {provenance['packages']['torch']}; config {provenance['config_hash'][:8]}, code {code(provenance)}",
    ]
    return "; ".join(facts) + "."


def code(provenance: Mapping[str, Any]) -> str:
    """The commits of the run and of where it was gone on with; + for uncommitted changes."""
    states = [entry["git"] for entry in [provenance, *provenance["resumed"]] if entry["git"]]
    return ", ".join(dict.fromkeys(state["commit"][:8] + "+" * state["dirty"] for state in states)) or "not recorded"


@entry_point("concurrency")
def main(composed: DictConfig) -> None:
    config = resolve(ConcurrencyConfig, composed)
    check(config)
    settle_runtime(config)
    folder = Path(config.out)
    measure_into(folder, config)
    write_report(folder, config, read_cells(folder / "cells.jsonl"))


if __name__ == "__main__":
    main()
