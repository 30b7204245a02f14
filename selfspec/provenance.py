"""Where a number comes from: code, packages, machine, seeds, command line. No torch until `collect` is called.

Everything is best effort and never raises: what a machine does not tell is None. Never recorded: the environment (but
for the few variables in ENVIRONMENT, which change speed), the host's name (a hash of it, so that runs of one machine
can be told apart), and secrets: `redact` and `redact_argv` blank values whose name or shape gives them away.
Cost: a few subprocesses, about 0.1 s, once per run and outside every timed section.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"
PACKAGES = (
    "selfspec", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "scipy", "einops",
    "hydra-core", "omegaconf", "wandb",
)  # fmt: skip
ENVIRONMENT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME",
    "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
GPU_FIELDS = (
    "name", "driver_version", "memory.total", "power.limit", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "temperature.gpu",
)  # fmt: skip

# A name is secret by one of these words, or by its last word: `hf_token` is, `max_new_tokens` and `key_dtype` are not.
SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey",
    "authorization", "bearer", "cookie",
}  # fmt: skip
SECRET_LAST_WORDS = {"key", "token", "pat", "auth"}
TOKENIZER_TOKENS = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "image"}  # `pad_token` holds no secret
SECRET_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|wandb_v\d_\w{16,}"
    r"|local-[0-9a-f]{40}|AKIA[0-9A-Z]{16}|xox[abpr]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=Bearer )\S+|(?<=Basic )\S+"
)
URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret: `WANDB_API_KEY`, `--hf-token`, `db.userPassword`."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]
    if not words:
        return False
    if words[-1] == "token" and len(words) > 1 and words[-2] in TOKENIZER_TOKENS:
        return False
    joined = "".join(words)
    return words[-1] in SECRET_LAST_WORDS or bool(SECRET_WORDS & set(words)) or joined.endswith(("apikey", "password"))


def redact_text(text: str) -> str:
    """The text without what looks like a secret by itself: known token shapes, logins inside URLs."""
    return URL_LOGIN.sub(REDACTED, SECRET_SHAPES.sub(REDACTED, text))


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested dicts, lists and values in which secrets are replaced; None stays, to show that none was set."""
    if value is None:
        return None
    if is_secret_name(name) and not isinstance(value, Mapping):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redact(inner, f"{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, name) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The command line without secrets: `a.token=x`, `--api-key x`, `--api-key=x`; the home folder becomes `~`."""
    cleaned: list[str] = []
    name_before = ""  # the option that the next argument belongs to
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name_before and is_secret_name(name_before) and not argument.startswith("-"):
            cleaned.append(REDACTED)
        elif equals and is_secret_name(name):
            cleaned.append(f"{name}={REDACTED if value else ''}")
        else:
            cleaned.append(_redact_inline(argument))
        name_before = argument if argument.startswith("-") and not equals else ""
    return cleaned


def _redact_inline(argument: str) -> str:
    """Secrets inside one argument: Hydra's `tracking={api_key:x}`, token shapes, and the home folder's name."""
    argument = re.sub(
        r"(?P<name>[\w.\"'-]+)(?P<colon>\s*:\s*)(?P<value>[^,{}\[\]]+)",
        lambda match: f"{match['name']}{match['colon']}{REDACTED}" if is_secret_name(match["name"]) else match[0],
        argument,
    )
    home = str(Path.home())
    return redact_text(argument if home == "/" else argument.replace(home, "~"))


def collect(
    *,
    seeds: Mapping[str, int] | None = None,
    fingerprints: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    dtype_choices: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything about this process that a number may depend on, ready for provenance.json.

    `fingerprints` are hashes that only the caller knows: of the target, the draft, the prompts. `argv`: sys.argv.
    `dtype_choices`: of `selfspec.target.fastest`, where the machine was asked.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": redact_argv(sys.argv if argv is None else argv),
        "git": git_state(Path(__file__).resolve().parent),
        "packages": package_versions(),
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "host_hash": host_hash(),
        "cpu": cpu(),
        "memory_bytes": memory_bytes(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,  # over 1, 5, 15 minutes
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "torch": torch_state(),
        "dtype_choices": dict(dtype_choices or {}),
        "gpus": gpus(),
        "seeds": dict(seeds or {}),
        "fingerprints": redact(dict(fingerprints or {})),
    }


def changed_contents(earlier: Mapping[str, Any], now: Mapping[str, Any], aside: Collection[str] = ()) -> list[str]:
    """Of two provenances of one run: what has another hash now than when the run was begun, except `aside`. A hash that
    the earlier one lacks counts only where both are of one code: other code may name it otherwise.
    """
    before, same_code = earlier["fingerprints"], earlier["git"] == now["git"]
    known = [name for name in now["fingerprints"] if (same_code or name in before) and name not in aside]
    return sorted(name for name in known if now["fingerprints"][name] != before.get(name))


def git_state(package_dir: Path) -> dict[str, Any] | None:
    """Commit, and what differs from it. None unless `package_dir` lies at the root of its own clone.

    `diff_sha256` covers tracked changes and the contents of new files that git does not ignore; None when clean.
    """
    root = _run("git", "-C", str(package_dir), "rev-parse", "--show-toplevel")
    # An installed package may lie inside a repository that is not its own: a .venv in the user's project.
    if root is None or Path(root.strip()).resolve() != package_dir.parent:
        return None
    git = ("git", "-C", root.strip())
    commit = _run(*git, "rev-parse", "HEAD")
    if commit is None:
        return None
    difference = _run(*git, "diff", "HEAD", "--no-ext-diff", "--no-color") or ""
    new_files = (_run(*git, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    digest = hashlib.sha256(difference.encode())
    for name in sorted(filter(None, new_files)):
        path = Path(root.strip(), name)
        digest.update(name.encode() + b"\0" + (hash_file(path).encode() if path.is_file() else b""))
    dirty = bool(difference) or any(new_files)
    return {"commit": commit.strip(), "dirty": dirty, "diff_sha256": digest.hexdigest() if dirty else None}


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def host_hash() -> str:
    """Twelve digits that are the same for every run on this host, and do not name it."""
    return hashlib.sha256(f"selfspec:{socket.gethostname()}".encode()).hexdigest()[:12]


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu() -> dict[str, Any]:
    """Model, cores of the machine and of this process, and the instruction sets that decide matrix speed."""
    text = _read(Path("/proc/cpuinfo"))
    fields: dict[str, str] = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text, flags=re.MULTILINE))
    model = fields.get("model name") or _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    flags = fields.get("flags", fields.get("Features", "")).split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "bf16", "sve")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model.strip() or None,
        "num_logical_cores": os.cpu_count(),
        "num_available_cores": available,
        "instruction_sets": [flag for flag in wanted if flag in flags],
    }


def memory_bytes() -> int | None:
    """Memory of the machine, or of the container if that has less."""
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        sizes.append(int(limit))
    return min(sizes, default=None)


def torch_state() -> dict[str, Any] | None:
    """Threads and numerical switches of this process's torch."""
    try:
        import torch
    except ImportError:
        return None
    return {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says about each GPU, units included; empty without one. Clocks are those of this moment."""
    table = _run("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    rows = [line.split(",") for line in (table or "").splitlines()]
    return [
        dict(zip(GPU_FIELDS, (cell.strip() for cell in row), strict=True))
        for row in rows
        if len(row) == len(GPU_FIELDS)
    ]


def _run(*command: str) -> str | None:
    """Standard output of a command; None if it is not there, fails, or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
