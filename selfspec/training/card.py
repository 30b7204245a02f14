"""The card that lies beside a trained draft: what it is, what it was made from, how, and how good it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec.training.data import Dataset, write_atomically
from selfspec.training.trainer import LOG

SUMMARY = "training.json"


def write_card(
    folder: Path,
    module: nn.Module,
    what: dict[str, Any],
    dataset: Dataset,
    summary: dict[str, Any],
    command: str,
    notes: Sequence[str] = (),
) -> None:
    """README.md for people (`notes` at its end), training.json for programs (the tokenizer is the target's, named there
    by its template).
    """
    log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    facts = {
        **what,
        "command": command,
        "parameters": parameters,
        "bytes": sum(path.stat().st_size for path in folder.glob("*model*.safetensors")),
        "train_samples": dataset.total("train_samples"),
        "train_answer_tokens": dataset.total("train_answer_tokens"),
        "data": {folder.name: _part(manifest) for folder, manifest in dataset.manifests.items()},
        "epochs": max((record["epoch"] for record in log if "epoch" in record), default=0) + 1,
        "torch": torch.__version__,
        "held_out": summary,
    }
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / SUMMARY, lambda partial: partial.write_text(text))
    write_atomically(folder / "README.md", lambda partial: partial.write_text(card_text(facts, log, notes)))


def card_text(facts: dict[str, Any], log: list[dict[str, Any]], notes: Sequence[str]) -> str:
    held_out, target = facts["held_out"], facts["target"]
    curve = [record for record in log if "held_out_alpha" in record]
    rows = [
        f"| {r['step']} | {r['held_out_alpha']:.3f} | {r['held_out_greedy_agreement']:.3f} "
        f"| {_tau(r['held_out_greedy_tau'])} |"
        for r in curve
    ]
    return "\n".join(
        [
            f"# {facts['kind']} draft for {target['name']}",
            "",
            f"{facts['parameters']:,} parameters, {facts['bytes']:,} bytes of bfloat16. Apache-2.0, as the target.",
            f"Made for the target with fingerprint `{target['fingerprint']}` ({target['num_layers']} layers, width "
            f"{target['width']}, {target['vocab_size']:,} tokens), whose tokenizer it uses.",
            "",
            "```",
            facts["command"],
            "```",
            "",
            f"Data: {facts['train_samples']:,} chats, {facts['train_answer_tokens']:,} answer tokens written by the "
            f"target ({'; '.join(f'{name}: {part}' for name, part in facts['data'].items())}; "
            f"sha256 `{facts['data_manifest_sha256']}`); "
            f"{facts['epochs']} epochs, {log[-1]['step']} steps; these are the weights of step "
            f"{held_out['kept_step']}.",
            *_begun(facts),
            "",
            f"Held out, {held_out['answer_tokens']:,} answer tokens on prompts that training never saw:",
            "",
            "| measure | value |",
            "|---|---|",
            f"| α at T=1, over the {facts['train']['num_kept']} likeliest target tokens (a lower bound) "
            f"| {held_out['alpha']:.3f} |",
            f"| the same by draft position | {_by_position(held_out['alpha_by_position'])} |",
            f"| τ at T=1, from these (positions taken as independent) | {held_out['sampled_tau']:.3f} |",
            f"| greedy agreement | {held_out['greedy_agreement']:.3f} |",
            f"| greedy τ, lookahead {held_out['lookahead']} (bonus token included) | {_tau(held_out['greedy_tau'])} |",
            "| greedy acceptance by draft position, given that the earlier ones were accepted "
            f"| {_by_position(held_out['greedy_acceptance_by_position'])} |",
            *_on_training_text(facts),
            "",
            "Learning curve (part of the held-out text; the last line is the weights that were kept, on all of it):",
            "",
            "| step | α | greedy agreement | greedy τ |",
            "|---|---|---|---|",
            *rows,
            "",
            *notes,
            *[""][: len(notes)],
        ]
    )


def _begun(facts: dict[str, Any]) -> list[str]:
    if "begun_with" not in facts:
        return []
    return [
        "",
        f"Begun with an earlier draft (`{facts['train']['begin_with']}`, weights' sha256 "
        f"`{facts['begun_with']}`): what that one was trained on counts, too.",
    ]


def _on_training_text(facts: dict[str, Any]) -> list[str]:
    """Cards made before it was measured lack it."""
    if (seen := facts.get("on_training_text")) is None:
        return []
    return [
        "",
        f"On {seen['answer_tokens']:,} answer tokens of the text it was trained on: α {seen['alpha']:.3f}, greedy τ "
        f"{_tau(seen['greedy_tau'])}. At most what that is above held-out text was learned by heart; the two samples "
        "are not mixed alike.",
    ]


def _tau(tau: float) -> str:
    """A round has its bonus token, so that less than 1 says that no answer of the sample was greedy."""
    return f"{tau:.3f}" if tau >= 1 else "—"


def _part(manifest: dict[str, Any]) -> str:
    """Where the prompts of one data folder come from, and how much text there is."""
    given = manifest["prompts"]
    prompts = "prompts of its own" if given is None else f"{given['count']:,} given prompts"
    if "of_shards" in manifest:
        prompts = f"the first {len(manifest['shards'])} of {manifest['of_shards']} shards on {prompts}"
    return f"{prompts}, {manifest['totals']['train_answer_tokens']:,} answer tokens"


def _by_position(shares: list[float | None]) -> str:
    return " / ".join("–" if share is None else f"{share:.3f}" for share in shares)
