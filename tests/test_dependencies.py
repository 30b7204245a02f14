"""The dependency rule, read off the source: every import counts, also one inside a function.

    experiments -> tuning -> run -> {measure, tracking, training, hf} -> decoding -> {drafters, lookahead}
                -> {target, cache, sampling} -> {config, records, errors, grid, prompts, prompts_hub, provenance}
    report -> {records, errors};  run, tuning and experiments may import report

A package may import its own level, but no two packages may import each other. What stands under `if TYPE_CHECKING`
names types and loads nothing: a drafter may say that it is handed `decoding.rows.Rows`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = (
    {"config", "records", "errors", "grid", "prompts", "prompts_hub", "provenance", "sweep"},
    {"target", "cache", "sampling"},
    {"drafters", "lookahead"},
    {"decoding"},
    {"measure", "tracking", "training", "hf"},
    {"run", "mirror"},
    {"tuning"},
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
REPORT_MAY_IMPORT = {"report", "records", "errors"}
MAY_IMPORT_REPORT = {"run", "mirror", "tuning"}

# Heavy or optional packages, and the only places that may import them (paths under the root, prefixes).
HOMES = {
    "hydra": ("experiments/", "selfspec/run.py"),
    "wandb": ("selfspec/tracking/wandb.py", "selfspec/tracking/wandb_fetch.py"),
    "optuna": ("experiments/study.py", "experiments/layer_skip.py"),
    "ray": ("experiments/study.py",),
    "transformers": ("selfspec/target/", "selfspec/hf.py", "selfspec/training/export"),
    "torch": (
        "experiments/", "selfspec/target/", "selfspec/cache/", "selfspec/sampling/", "selfspec/drafters/",
        "selfspec/lookahead/", "selfspec/decoding/", "selfspec/measure/", "selfspec/training/", "selfspec/run.py",
        "selfspec/hf.py",
    ),
}  # fmt: skip
LAZY_TORCH = "selfspec/provenance.py"  # asks the torch of this process for its threads, once it is there


@dataclass(frozen=True)
class Import:
    file: str  # under the root
    line: int
    module: str  # absolute
    inside_function: bool
    only_types: bool

    @property
    def package(self) -> str:
        """The importing module's package: `drafters`, or the module's name at the top level."""
        parts = Path(self.file).parts
        return parts[0] if parts[0] == "experiments" else Path(parts[1]).stem

    @property
    def imported_package(self) -> str | None:
        """The same for what is imported; None outside selfspec, "" for selfspec itself."""
        parts = self.module.split(".")
        if parts[0] != "selfspec":
            return None
        return parts[1] if len(parts) > 1 else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path, root: Path = ROOT) -> Iterator[Import]:
    file = path.relative_to(root).as_posix()
    parts = path.relative_to(root).with_suffix("").parts
    package = parts[:-1]  # of a module, and of a package's __init__ alike
    for node, function, types in _walk(ast.parse(path.read_text(encoding="utf-8"), filename=file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, function, types)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "selfspec":  # `from selfspec import records`
                for alias in node.names:
                    yield Import(file, node.lineno, f"selfspec.{alias.name}", function, types)
            else:
                yield Import(file, node.lineno, module, function, types)


def _walk(node: ast.AST, function: bool = False, types: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node, whether it is inside a function, and whether it is inside `if TYPE_CHECKING:` (not its else)."""
    for child in ast.iter_child_nodes(node):
        types_here = types or (
            isinstance(node, ast.If)
            and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            and child in node.body
        )
        yield child, function, types_here
        function_here = function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, function_here, types_here)


def violation(one: Import) -> str | None:
    """Why this import breaks the rule, or None."""
    top = one.module.split(".")[0]
    lazy_torch = top == "torch" and one.file == LAZY_TORCH and one.inside_function
    if top in HOMES and not one.file.startswith(HOMES[top]) and not lazy_torch:
        return f"{top} is imported only in {', '.join(HOMES[top])}"
    if top == "experiments":
        return "nothing imports experiments"
    imported = one.imported_package
    if imported is None or one.only_types or one.package in ("experiments", "__init__"):
        return None  # entry points may import all of it, and the facade is what they import
    if imported == "" or imported.startswith("__") or imported not in LEVEL_OF.keys() | {"report"}:
        return "inside the package, import the module itself"
    if one.package == "report":
        return None if imported in REPORT_MAY_IMPORT else "report imports only records"
    if imported == "report":
        return None if one.package in MAY_IMPORT_REPORT else "only run and experiments import report"
    if one.package not in LEVEL_OF:
        return f"{one.package} has no level; give it one in LEVELS"
    if LEVEL_OF[imported] > LEVEL_OF[one.package]:
        return f"{one.package} lies below {imported}"
    return None


def all_imports() -> list[Import]:
    files = sorted([*(ROOT / "selfspec").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")])
    return [one for path in files for one in imports_of(path)]


def test_every_import_follows_the_rule():
    broken = [f"{one}: {reason}" for one in all_imports() if (reason := violation(one))]
    assert not broken, "\n".join(broken)


def test_no_two_packages_import_each_other():
    edges = {
        (one.package, one.imported_package)
        for one in all_imports()
        if one.imported_package and not one.only_types and one.package not in ("__init__", "experiments")
    }
    mutual = sorted((a, b) for a, b in edges if a is not None and a < str(b) and (b, a) in edges)
    assert not mutual


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("selfspec/drafters/x.py", "from selfspec.decoding import loop", "drafters lies below decoding"),
        ("selfspec/drafters/x.py", "def f():\n    from selfspec.decoding import loop", "drafters lies below decoding"),
        ("selfspec/drafters/x.py", "from ..decoding import loop", "drafters lies below decoding"),
        ("selfspec/cache/x.py", "import selfspec.measure.protocol", "cache lies below measure"),
        ("selfspec/target/x.py", "from selfspec import Sampling", "import the module itself"),
        ("selfspec/report/x.py", "import torch", "torch is imported only in"),
        ("selfspec/report/x.py", "from selfspec.config import canonical", "report imports only records"),
        ("selfspec/measure/x.py", "from selfspec.report import tables", "only run and experiments import report"),
        ("selfspec/measure/x.py", "import hydra.utils", "hydra is imported only in"),
        ("selfspec/tracking/base.py", "import wandb", "wandb is imported only in"),
        (
            "selfspec/decoding/x.py",
            "class A:\n    def f(self):\n        import transformers",
            "transformers is imported",
        ),
        ("selfspec/run.py", "import experiments.compare", "nothing imports experiments"),
        ("selfspec/provenance.py", "import torch", "torch is imported only in"),
        ("selfspec/newthing/x.py", "from selfspec.records import Run", "newthing has no level"),
        ("selfspec/drafters/x.py", "from selfspec.target.stack import Target", None),
        ("selfspec/drafters/x.py", "if TYPE_CHECKING:\n    from selfspec.decoding.rows import Rows", None),
        ("selfspec/provenance.py", "def f():\n    import torch", None),
        ("selfspec/run.py", "from selfspec.report import tables\nimport hydra", None),
        ("experiments/x.py", "import selfspec, hydra\nfrom selfspec.run import run_compare", None),
    ],
)
def test_the_rule_catches_planted_imports(tmp_path: Path, file: str, source: str, reason: str | None):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    reasons = [violation(one) for one in imports_of(path, tmp_path)]
    if reason is None:
        assert reasons and set(reasons) == {None}
    else:
        assert any(found and reason in found for found in reasons)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("selfspec", ("torch", "hydra", "wandb", "transformers")),
        ("selfspec.report", ("torch", "hydra", "wandb", "transformers")),
        ("selfspec.config", ("torch", "hydra", "wandb", "transformers")),
        ("selfspec.prompts", ("torch", "omegaconf")),
        ("selfspec.tracking", ("torch", "wandb")),
    ],
)
def test_importing_a_light_module_loads_nothing_heavy(module: str, forbidden: tuple[str, ...]):
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({forbidden!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == ""
