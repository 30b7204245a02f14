"""The project as a stranger gets it: installable, pinned, complete in a wheel, and free of anybody's machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from test_dependencies import imports_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Put together here, so that this file does not hold what it forbids.
REGISTRY_HOSTS = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.", "deb." + "debian.org", "whl.py" + "torch"]
PRIVATE_PATH = re.compile(r"(?<![\w.:~/-])/" + r"(?:work|root|tmp|(?:home|Users)/\w+)/\w")


def committed_texts() -> Iterator[tuple[str, str]]:
    """Name and content of every text file that git knows; all that are not ignored in an unpacked source archive."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone: what is committed cannot be told")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_committed_text_names_a_registry_or_a_path_of_one_machine():
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in committed_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if any(host in line for host in REGISTRY_HOSTS) or PRIVATE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


# --- dependencies -------------------------------------------------------------------------------------------------


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in pins), "only name==version"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in pins)}


def direct_requirements() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_constraints_pin_every_direct_dependency_to_an_allowed_version():
    pins = constraints()
    for requirement in direct_requirements():
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned, prereleases=True), f"{requirement} excludes {pinned}"
    assert pins["torch"] == "2.13.0"


def test_constraints_pin_everything_that_is_installed_for_it():
    """Without the packages that only a CUDA build of torch brings: those are pinned by torch itself."""
    pins = constraints()
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in direct_requirements()]
    missing: set[str] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in pins and not name.startswith(("nvidia-", "cuda-", "triton")):
            missing.add(name)
        for wanted_extra in ("", *sorted(requirement.extras)):
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                waiting += [(Requirement(text), wanted_extra) for text in needs]
    assert not missing
    assert len({name for name, _ in seen}) > len(direct_requirements())


def test_every_package_that_is_imported_is_declared():
    """Not one of them may come only because another package happens to need it."""
    distributions = {"hydra": "hydra-core", "yaml": "pyyaml"}
    extras = [text for name, texts in PROJECT["optional-dependencies"].items() if name != "dev" for text in texts]
    declared = {canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *extras]}
    own = {"selfspec"} | set(sys.stdlib_module_names)
    files = [*(ROOT / "selfspec").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    imported = {one.module.split(".")[0] for path in files for one in imports_of(path)} - own
    assert {canonicalize_name(distributions.get(name, name)) for name in imported} - declared == set()


def test_the_supported_python_is_said_once_and_the_same():
    assert PROJECT["requires-python"] == ">=3.11"
    assert "3, 11" in (ROOT / "Makefile").read_text()
    assert Version(sys.version.split()[0]) >= Version("3.11")


# --- commands -----------------------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def documented(pattern: str) -> set[str]:
    """What matches in the READMEs' code: fenced, indented by four, or between backticks."""
    code = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)
    texts = [path.read_text() for path in (ROOT / "README.md", ROOT / "experiments" / "README.md")]
    return {match for text in texts for block in code.findall(text) for match in re.findall(pattern, block)}


def test_every_make_command_in_the_readmes_exists():
    commands = documented(r"\bmake ([a-z-]+)\b")
    assert {"demo", "test"} <= commands <= make_targets()


def test_every_entry_point_in_the_readmes_exists():
    scripts = documented(r"python (experiments/[\w/]+\.py)")
    assert "experiments/compare.py" in scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_ci_runs_the_readmes_own_commands():
    script = ROOT / ".ci" / "run"
    assert "make lint" in script.read_text() and "make test" in script.read_text()
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no interpreter"),
        ('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n', "is Python 3.9.1, but Python 3.11 or newer"),
    ],
)
def test_make_says_which_python_it_needs(tmp_path: Path, script: str | None, message: str):
    python = tmp_path / "old-python"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "test", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 10_000
    assert PROJECT["license"] == "Apache-2.0"


# --- the wheel ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("selfspec-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_the_package_all_configs_and_prompts_and_nothing_else(unpacked_wheel: Path):
    def names(root: Path, under: Path) -> set[str]:
        return {
            path.relative_to(root).as_posix()
            for path in under.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    assert names(unpacked_wheel / "selfspec", unpacked_wheel / "selfspec" / "conf") == names(ROOT, ROOT / "conf")
    assert (unpacked_wheel / "selfspec" / "prompts_data" / "selfspec48.jsonl").is_file()
    assert (unpacked_wheel / "selfspec" / "py.typed").is_file()
    assert {path.name.split("-")[0] for path in unpacked_wheel.iterdir()} == {"selfspec"}


def test_names_resolve_outside_a_clone(unpacked_wheel: Path, tmp_path: Path):
    code = """
import pathlib, sys, selfspec
from hydra import compose, initialize_config_dir
from selfspec.config import conf_dir, conf_names, load_conf
from selfspec.prompts import load_prompts
here = pathlib.Path(sys.argv[1])
assert here in pathlib.Path(selfspec.__file__).parents, selfspec.__file__
assert here in conf_dir().parents, conf_dir()
assert "smollm2-135m" in conf_names("target") and load_conf("target", "smollm2-135m").kind == "smollm2"
assert len(load_prompts("selfspec48")) == 48
with initialize_config_dir(str(conf_dir()), version_base="1.3"):
    assert compose("compare", ["experiment=smollm2_quick"]).prompts.name == "selfspec48"
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(unpacked_wheel)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked_wheel)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
