"""Mirrors of a run outside its directory: none, a JSONL file of events, Weights & Biases.

    tracker = build_tracker("wandb_offline", project="selfspec")
    tracker.start(config, run_name="quick", group="smollm2", job_type="compare", run_dir=path, config_hash=hash)
    log_result(tracker, record)            # for every prompt record, outside timed sections
    tracker.summary(summary)
    tracker.keep("figures", "quick", paths)
    tracker.finish(exit_code=0)            # always, also after an exception (then not 0)

A new tracker is one file with the methods of `Tracker`, one line in `build_tracker` and one file in conf/tracking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.errors import UserError
from selfspec.tracking.base import ARTIFACTS, Tracker, log_result
from selfspec.tracking.guard import GuardedTracker
from selfspec.tracking.null import NullTracker

__all__ = ["KINDS", "Tracker", "build_tracker", "log_result", "tracker_from_config", "wanted_artifacts"]

KINDS = ("none", "jsonl", "wandb", "wandb_offline")
CONFIG_KEYS = ("kind", "project", "entity", "tags", "artifacts")


def build_tracker(
    kind: str,
    *,
    project: str = "selfspec",
    entity: str | None = None,
    tags: Sequence[str] = (),
    artifacts: Sequence[str] = ARTIFACTS,
) -> Tracker:
    """The tracker of that kind; the rest is W&B's. UserError for another kind."""
    if kind == "none":
        return NullTracker()
    if kind == "jsonl":
        from selfspec.tracking.jsonl import FILE_NAME, JsonlTracker

        return GuardedTracker(JsonlTracker(), name=FILE_NAME)
    if kind in ("wandb", "wandb_offline"):
        from selfspec.tracking.wandb import WandbTracker

        offline = kind == "wandb_offline"
        inner = WandbTracker(
            offline=offline, project=project, entity=entity, tags=tuple(tags), artifacts=tuple(artifacts)
        )
        return GuardedTracker(inner, name="W&B")
    raise UserError(f"tracking.kind={kind!r} is unknown. Allowed: {', '.join(KINDS)}.")


def tracker_from_config(config: Mapping[str, Any]) -> Tracker:
    """The tracker a conf/tracking file asks for. An empty config is `none`."""
    unknown = sorted(set(config) - set(CONFIG_KEYS))
    if unknown:
        raise UserError(f"tracking.{unknown[0]} is unknown. Allowed: {', '.join(CONFIG_KEYS)}.")
    tags = config.get("tags") or ()
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise UserError(f"tracking.tags={tags!r} is not a list of texts. Give for example [paper,rerun], or null.")
    return build_tracker(
        str(config.get("kind", "none")),
        project=config.get("project") or "selfspec",
        entity=config.get("entity"),
        tags=tags,
        artifacts=wanted_artifacts(config),
    )


def wanted_artifacts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a conf/tracking file wants uploaded: none unless it is W&B. UserError for an unknown kind of file."""
    wanted = config.get("artifacts")
    if not str(config.get("kind", "none")).startswith("wandb"):
        return ()
    if wanted is None:
        return ARTIFACTS
    if isinstance(wanted, str) or (unknown := sorted(set(map(str, wanted)) - set(ARTIFACTS))):
        given = wanted if isinstance(wanted, str) else unknown[0]
        raise UserError(f"tracking.artifacts: {given!r} is unknown. Give a list of {', '.join(ARTIFACTS)}, or [].")
    return tuple(map(str, wanted))
