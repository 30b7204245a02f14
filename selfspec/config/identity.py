"""The hash that names a run directory: equal hashes mean the same measurement."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from selfspec.config.schema import CompareConfig

# where things go, not what is measured; and the grid, which is among the drafters by then
NOT_HASHED = ("study", "name", "output_dir", "force", "tracking", "hydra", "grid")


def canonical(config: CompareConfig) -> dict[str, Any]:
    """What is measured, without where it is written: equal dicts mean the same measurement."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    kept = {str(key): value for key, value in plain.items() if key not in NOT_HASHED}
    kept["runtime"]["device"] = kept["runtime"]["device"].split(":")[0]
    if kept["runtime"]["tensor_parallel"] == 1:  # so that runs from before there was such a thing keep their names
        del kept["runtime"]["tensor_parallel"]
    return kept


def config_hash(config: CompareConfig) -> str:
    """sha256 of `canonical(config)`; its first 8 digits name the run directory."""
    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def run_dir(config: CompareConfig) -> Path:
    """outputs/<study>/<name>-<hash8>: the same config always lands in the same place, which is how a run resumes."""
    return Path(config.output_dir) / config.study / f"{config.name}-{config_hash(config)[:8]}"
