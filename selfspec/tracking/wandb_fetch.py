"""Run directories back out of W&B: the `records-*` artifacts of a project, byte for byte what was measured.

    wandb://<entity>/<project>                     every run
    wandb://<entity>/<project>/<pattern>           runs whose study or name matches: smollm2, quick-0123abcd, quick-*
    wandb://<entity>/<project>/<pattern>:v0        this version of them, where a name has several; else the latest

A run is kept as `<cache>/wandb/<digest of its files>/<name>`, so it is downloaded once, cannot get stale, and is there
whole or not at all: it is written beside its place, checked against W&B's own checksums, and renamed.
Cost: one request per run in the project, and for a run that is not in the cache one per file.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import UserError
from selfspec.provenance import redact_text
from selfspec.tracking.wandb import answers

if TYPE_CHECKING:
    import wandb

SCHEME = "wandb://"
PREFIX = "records-"
TIMEOUT_S = 20
_PART = r"[\w.-]+"
_ADDRESS = re.compile(rf"{SCHEME}({_PART})/({_PART})(?:/([\w.*?\[\]!-]+)(?::({_PART}))?)?/?")


@dataclass(frozen=True)
class Address:
    """What a `wandb://` address asks for."""

    entity: str
    project: str
    pattern: str = "*"
    version: str = "latest"

    @property
    def place(self) -> str:
        return f"{self.entity}/{self.project}"


def parse_address(text: str) -> Address:
    """UserError for one that names no project, or more than a pattern behind it."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} is no address of runs in W&B. Give {SCHEME}<entity>/<project>, and behind it if you like "
            "/<study or run>, with * and ? as in file names."
        )
    entity, project, pattern, version = match.groups()
    return Address(entity, project, pattern or "*", version or "latest")


def fetch_runs(text: str, cache: Path) -> list[Path]:
    """The run directories that the address asks for, by study and name, downloaded where the cache lacks them.

    Raises `UserError`, within half a minute, for a bad address, no login, a server that does not answer or refuses, a
    project that is not there, one without (matching) records, and records that are not what was uploaded.
    """
    address = parse_address(text)
    api = _open_api()
    with _explained(address):
        names = _names(api, address)
        found = [api.artifact(f"{address.place}/{name}:{address.version}", type="records") for name in names]
        chosen = {(_study(one), _run_name(one)): one for one in found if _matches(one, address.pattern)}
        if not chosen:
            studies = sorted({_study(one) for one in found})
            runs = sorted(map(_run_name, found))
            raise UserError(
                f"No run in W&B project {address.place} has a study or name like {address.pattern!r}. "
                f"Studies: {_some(studies)}. Runs: {_some(runs)}."
            )
        return [_keep(chosen[key], cache / "wandb") for key in sorted(chosen)]


def _open_api() -> wandb.Api:
    """wandb itself would ask for a key on a terminal, and try for a minute where nothing answers."""
    import wandb

    base_url = wandb.setup(wandb.Settings(silent=True)).settings.base_url
    try:
        if not wandb.login(prompt=False, verify=False):
            raise UserError(
                "no W&B login found, so no runs can be fetched. Run `wandb login` or set WANDB_API_KEY, or give "
                "runs=outputs/... where the run directories are at hand."
            )
        if not answers(base_url):
            raise UserError(
                f"The W&B server {base_url} does not answer, so no runs can be fetched. Try again later, or give "
                "runs=outputs/... where the run directories are at hand."
            )
        return wandb.Api(timeout=TIMEOUT_S)
    except wandb.Error as error:
        raise UserError(
            f"W&B at {base_url} did not accept the login: {_one_line(error)}. Run `wandb login`, or try again later."
        ) from error


def _names(api: wandb.Api, address: Address) -> list[str]:
    try:
        kinds = {one.name for one in api.artifact_types(address.place)}
    except ValueError as error:  # the server's answer for a project that is not there, or not for this account
        raise UserError(
            f"W&B has no project {address.place}, or this login may not see it. The address is "
            f"{SCHEME}<entity>/<project>, as in the project's page."
        ) from error
    names = []
    if "records" in kinds:
        names = sorted(one.name for one in api.artifact_collections(address.place, "records"))
    if not (names := [name for name in names if name.startswith(PREFIX)]):
        raise UserError(
            f"W&B project {address.place} holds no records of runs. Upload finished ones with `python "
            "experiments/mirror.py runs=outputs/<study> tracking=wandb` (tracking.artifacts must name records)."
        )
    return names


def _matches(artifact: wandb.Artifact, pattern: str) -> bool:
    return fnmatchcase(_study(artifact), pattern) or fnmatchcase(_run_name(artifact), pattern)


def _study(artifact: wandb.Artifact) -> str:
    return str(artifact.metadata.get("study") or "")


def _run_name(artifact: wandb.Artifact) -> str:
    return str(artifact.metadata.get("name") or artifact.name.partition(":")[0].removeprefix(PREFIX))


def _keep(artifact: wandb.Artifact, shelf: Path) -> Path:
    """The artifact's files as a folder that bears the run's name."""
    name = _check_name(_run_name(artifact), artifact)
    folder = shelf / re.sub(r"\W", "", artifact.digest) / name
    if folder.exists():
        return folder
    for file in artifact.manifest.entries:
        _check_name(file, artifact)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shelf, prefix=".partial-") as partial:
        fetched = Path(artifact.download(root=str(Path(partial) / name)))
        artifact.verify(str(fetched))
        try:
            os.rename(fetched, folder)
        except OSError:
            if not folder.exists():  # else another process has just put the same files there
                raise
    return folder


def _check_name(name: str, artifact: wandb.Artifact) -> str:
    """A file of a run directory has no folder in its name, so nothing is ever written outside the cache."""
    if Path(name).name != name or name == "..":
        raise UserError(f"{artifact.name} in W&B is no run directory: it has {name!r} for a name.")
    return name


@contextmanager
def _explained(address: Address) -> Iterator[None]:
    """Whatever wandb raises while it talks to its server, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its own classes, requests', pydantic's, plain ones: all of them end here
        raise UserError(f"The runs of {address.place} could not be fetched from W&B: {_one_line(error)}.") from error


def _one_line(error: Exception) -> str:
    return redact_text(" ".join(str(error).split()))[:300].rstrip(".")


def _some(names: list[Any]) -> str:
    return ", ".join(name or "(none)" for name in names[:10]) + (", ..." if len(names) > 10 else "")
