"""The export as its readers see it: loaded by `speculators` itself, in an environment of its own, and run.

`make test-speculators` makes that environment (the package wants an older transformers) and runs this file; elsewhere
it is skipped. Chained steps are compared, each reading its own hidden state back, so that a wrong norm, residual,
position or vocabulary order shows.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_drafts import RANKED, eagle3_draft, small_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.target import Target, wrap_target
from selfspec.training.eagle3 import Eagle3Trainee
from selfspec.training.export.jobs import export_draft
from selfspec.training.rounds import Slots
from selfspec.training.unrolled import unroll

ROOT = Path(__file__).parent.parent.parent
PYTHON = Path(os.environ.get("SPECULATORS_PYTHON", ROOT / ".venv-speculators" / "bin" / "python"))
LENGTH = 128  # the package's block masks come in blocks of it
CASES = {  # family of the target, draft vocabulary, norm_before_residual
    "reduced": ("llama", len(RANKED), False),
    "full": ("llama", None, False),
    "heads wider than the model": ("qwen3", len(RANKED), False),
    "normed residual": ("llama", len(RANKED), True),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make test-speculators` makes"),
]


def export(folder: Path, family: str, d_vocab: int | None, normed: bool) -> tuple[Target, Eagle3Trainee]:
    """A draft and its export, with a target as it lies on disk, where the loader looks for it."""
    made = small_target(family).hf_model
    embedding = made.get_input_embeddings().weight
    embedding.data = embedding.data.bfloat16().float()  # as the export keeps it
    made.save_pretrained(folder / "verifier")
    target = wrap_target(made, None, "verifier")
    trainee = eagle3_draft(target, folder / "draft", d_vocab)
    trainee.head.shape = replace(trainee.head.shape, norm_before_residual=normed)  # no option of training
    trainee.save(folder / "draft")
    export_draft(target, str(folder / "draft"), "speculators", str(folder / "out"), str(folder / "verifier"))
    generator = torch.Generator().manual_seed(1)
    features_TF = torch.randn(LENGTH, 3 * target.width, generator=generator)
    token_ids_T = torch.randint(3, target.vocab_size, (LENGTH,), generator=generator)  # the token after each position
    save_file({"features_TF": features_TF, "token_ids_T": token_ids_T}, folder / "inputs.safetensors")
    return target, trainee


def our_logits(target: Target, trainee: Eagle3Trainee, folder: Path) -> list[Tensor]:
    given = load_file(folder / "inputs.safetensors")
    steps = [torch.nn.functional.pad(given["token_ids_T"][j:], (0, j)) for j in range(trainee.options.num_steps)]
    embedded = [target.embed(ids_T)[None].float() for ids_T in steps]
    causal_1TT = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    slots = Slots(torch.arange(LENGTH)[None])  # everywhere
    features_1TM = trainee.head.fc(given["features_TF"][None])
    states = unroll(trainee.unrollable, features_1TM, embedded, torch.arange(LENGTH)[None], causal_1TT, slots)
    return [trainee.head.lm_head(trainee.head.norm(hidden_1TM[0])) for hidden_1TM in states]


@torch.no_grad()
def test_speculators_own_loader_computes_our_logits(tmp_path: Path):
    made = {name: export(tmp_path / name, *case) for name, case in CASES.items()}
    script = str(Path(__file__).with_name("speculators_forward.py"))
    done = subprocess.run(
        [str(PYTHON), script, *(str(tmp_path / name) for name in CASES)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (target, trainee) in made.items():
        theirs = load_file(tmp_path / name / "outputs.safetensors")
        facts = json.loads((tmp_path / name / "facts.json").read_text())
        assert facts["class"] == "Eagle3DraftModel" and facts["layers"] == [1, 3, 5] and facts["nan"] == []
        order = torch.arange(target.vocab_size)
        if trainee.token_ids is not None:  # draft ids ascend in the export
            sorted_ids, order = trainee.token_ids.sort()
            assert torch.equal(theirs["d2t"] + torch.arange(len(order)), sorted_ids)
            assert torch.equal(theirs["t2d"].nonzero().flatten(), sorted_ids)
        ours = our_logits(target, trainee, tmp_path / name)
        differences = [
            float((theirs[f"logits_{j}"] - logits_TV[:, order]).abs().max() / logits_TV.abs().max())
            for j, logits_TV in enumerate(ours)
        ]
        print(f"{name}: largest difference over largest logit, by step: {differences}; {facts}")
        assert max(differences) < 1e-4  # float32 rounding grows from step to step; a fault is of the order of one
        assert float((ours[1] - ours[0]).abs().max()) > 0.1  # or agreeing on all steps would say little
