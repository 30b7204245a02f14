"""The trainer: it learns, a resumed run equals one never stopped, and nothing half-written remains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import selfspec.training.checkpoints as checkpoints_module
import selfspec.training.trainer as trainer_module
import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, load_target, wrap_target
from selfspec.training.batches import Batches, pack
from selfspec.training.checkpoints import BEST, STATE
from selfspec.training.evaluate import Validation
from selfspec.training.job import train_draft
from selfspec.training.losses import head_loss
from selfspec.training.optimizers import learning_rate
from selfspec.training.trainee import build_trainee
from selfspec.training.trainer import TrainConfig

DRAFT = dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
CONFIG = TrainConfig(
    steps=12,
    batch_rows=2,
    row_tokens=48,
    learning_rate=1e-2,
    warmup_steps=2,
    autocast=False,
    num_kept=8,
    log_every=1,
    validate_every=4,
    checkpoint_every=5,
)


def quiet(_: dict[str, Any]) -> None:
    pass


def test_training_lowers_the_loss_and_leaves_a_loadable_draft_with_its_card(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    out = tmp_path / "draft"
    config = replace(CONFIG, steps=60, validate_every=30)
    summary = train_draft(chat_target, "independent", DRAFT, config, data_folder(), out, "the command", quiet)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
    made = {"README.md", "config.json", "generation_config.json", "log.jsonl", "model.safetensors", "training.json"}
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in out.iterdir()} == made | tokenizer
    facts = json.loads((out / "training.json").read_text())
    assert facts["held_out"] == summary and facts["target"]["name"] == "tiny-chat"
    card = (out / "README.md").read_text()
    assert "the command" in card
    seen = facts["on_training_text"]
    assert seen["alpha"] > summary["alpha"], "a few chats read many times are learned by heart"
    assert f"of the text it was trained on: α {seen['alpha']:.3f}, greedy τ {seen['greedy_tau']:.3f}" in card
    draft = tiny_models.LlamaForCausalLM.from_pretrained(out)
    assert draft.config.vocab_size == chat_target.vocab_size
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(out / "model.safetensors").values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("when", ["between", "while_saving"])
def test_killed_and_resumed_training_equals_uninterrupted_training(
    chat_target: Target,
    data_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    optimizer: str,
):
    data = data_folder()
    args = (chat_target, "independent", DRAFT, replace(CONFIG, optimizer=optimizer), data)
    train_draft(*args, tmp_path / "whole", "c", quiet)

    class Killed(BaseException):
        pass

    if when == "between":

        def dies_at_step_8(record: dict[str, Any]) -> None:
            if record.get("step") == 8:
                raise Killed

        with pytest.raises(Killed):
            train_draft(*args, tmp_path / "cut", "c", dies_at_step_8)
    else:
        real = checkpoints_module.save_file

        def dies_in_second_save(tensors, path, metadata):
            if json.loads(metadata.get("standing", "{}")).get("step") == 10:
                Path(path).write_bytes(b"half a file")
                raise Killed
            real(tensors, path, metadata=metadata)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints_module, "save_file", dies_in_second_save)
            patch.setattr(Path, "unlink", lambda *_, **__: None)  # kill -9 cleans nothing up
            with pytest.raises(Killed):
                train_draft(*args, tmp_path / "cut", "c", quiet)
        assert list((tmp_path / "cut").glob(".*partial"))
    assert (tmp_path / "cut" / STATE).exists()
    train_draft(*args, tmp_path / "cut", "c", quiet)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)

    def lines(name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in record.items() if k != "answer_tokens_per_s"} for record in records]

    assert lines("whole") == lines("cut")
    assert not list((tmp_path / "cut").glob(".*partial"))


def test_accumulated_steps_equal_one_large_batch(chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path):
    data = data_folder()
    large = replace(CONFIG, batch_rows=4, row_tokens=24, steps=3)
    small = replace(large, batch_rows=2, accumulate=2)
    for name, config in (("large", large), ("small", small)):
        train_draft(chat_target, "independent", DRAFT, config, data, tmp_path / name, "c", quiet)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("large", "small")]
    losses = [[json.loads(line)["loss"] for line in lines if '"loss"' in line] for lines in logs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("large", "small")]
    for name in weights[0]:  # bfloat16
        torch.testing.assert_close(weights[0][name].float(), weights[1][name].float(), rtol=1e-2, atol=1e-3)


def checks_that_say(taus: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out checks of a run: the first before training, the last after it, on all of the text."""
    waiting = list(taus)

    def summary(_: Validation) -> dict[str, Any]:
        tau = waiting.pop(0)
        same = {"alpha_by_position": [0.5], "greedy_acceptance_by_position": [0.5], "lookahead": 1, "answer_tokens": 9}
        return {
            **same,
            "alpha": 0.5,
            "sampled_tau": 1.5,
            "greedy_agreement": 0.5,
            "greedy_tau": tau,
            "expected_tau": tau,
        }

    monkeypatch.setattr(Validation, "summary", summary)


def test_training_stops_when_checks_get_no_better_and_keeps_the_best_weights(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = data_folder()
    train_draft(
        chat_target, "independent", DRAFT, replace(CONFIG, validate_every=2), data, tmp_path / "all", "c", quiet
    )
    kept: dict[int, dict[str, torch.Tensor]] = {}
    real = trainer_module.write_best

    def remembers(folder: Path, named: dict[str, torch.Tensor], step: int) -> None:
        kept[step] = {name: tensor.detach().clone() for name, tensor in named.items()}
        real(folder, named, step)

    monkeypatch.setattr(trainer_module, "write_best", remembers)
    checks_that_say([1.7, 1.2, 1.5, 1.4, 1.5, 9.9, 8.8], monkeypatch)  # the last two: all held-out text, training text
    config = replace(CONFIG, validate_every=2, patience=2)
    summary = train_draft(chat_target, "independent", DRAFT, config, data, tmp_path / "o", "c", quiet)
    assert summary["stopped_early"] and summary["kept_step"] == 4 and sorted(kept) == [2, 4]
    log = [json.loads(line) for line in (tmp_path / "o" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log if "held_out_alpha" in record] == [0, 2, 4, 6, 8, 8]
    assert log[-1]["kept_step"] == 4 and log[-1]["held_out_greedy_tau"] == 9.9
    assert "8 steps; these are the weights of step 4" in (tmp_path / "o" / "README.md").read_text()
    saved = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(kept[4][name].bfloat16(), tensor) for name, tensor in saved.items())
    assert not any((tmp_path / "o" / name).exists() for name in (STATE, BEST))


def test_patience_is_counted_across_a_kill(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = data_folder()
    config = replace(CONFIG, validate_every=2, patience=3, checkpoint_every=1)
    args = (chat_target, "independent", DRAFT, config, data, tmp_path / "o", "c")

    class Killed(BaseException):
        pass

    def dies(record: dict[str, Any]) -> None:
        if record.get("step") == 7:
            raise Killed

    checks_that_say([1.0, 1.5, 1.4, 1.3], monkeypatch)
    with pytest.raises(Killed):
        train_draft(*args, dies)
    checks_that_say([1.2, 2.0, 2.1], monkeypatch)  # step 8, the third without a better; all of the text; training text
    assert train_draft(*args, quiet)["kept_step"] == 2


def test_a_finished_run_is_not_repeated_and_not_overwritten(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data, out = data_folder(), tmp_path / "o"
    config = replace(CONFIG, steps=3)
    first = train_draft(chat_target, "independent", DRAFT, config, data, out, "c", quiet)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    said: list[dict[str, Any]] = []
    often = replace(config, log_every=2)
    assert train_draft(chat_target, "independent", DRAFT, often, data, out, "c", said.append) == first
    assert "Remove it to train it again" in said[0]["doing"]
    with pytest.raises(UserError, match="holds a finished draft of another run"):
        train_draft(chat_target, "independent", DRAFT, replace(config, loss="tv"), data, out, "c", quiet)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_checkpoint_of_another_run_is_refused(chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path):
    data = data_folder()

    class Killed(BaseException):
        pass

    def dies(record: dict[str, Any]) -> None:
        if record.get("step") == 6:
            raise Killed

    with pytest.raises(Killed):
        train_draft(chat_target, "independent", DRAFT, CONFIG, data, tmp_path / "o", "c", dies)
    with pytest.raises(UserError, match="another training run"):
        train_draft(
            chat_target, "independent", DRAFT, replace(CONFIG, learning_rate=1e-3), data, tmp_path / "o", "c", quiet
        )


def test_data_of_another_target_or_template_is_refused(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder()
    other = tiny_models.tiny_llama(vocab_size=258, num_layers=2, max_positions=128, seed=5)
    with pytest.raises(UserError, match="fingerprint"):
        train_draft(
            wrap_target(other, chat_target.tokenizer), "independent", DRAFT, CONFIG, data, tmp_path / "o", "c", quiet
        )
    template = chat_target.tokenizer.chat_template
    chat_target.tokenizer.chat_template = template.replace("<s>a", "<s>b")
    try:
        with pytest.raises(UserError, match="template"):
            train_draft(chat_target, "independent", DRAFT, CONFIG, data, tmp_path / "o", "c", quiet)
    finally:
        chat_target.tokenizer.chat_template = template
    assert not (tmp_path / "o").exists() and not list(data.glob("*/"))  # nor was the wrong target run over the text


def test_bad_drafts_and_settings_are_user_errors(chat_target: Target):
    with pytest.raises(UserError, match=r"cannot be trained. Allowed: .*independent"):
        build_trainee("ngram", chat_target, {})
    with pytest.raises(UserError, match="no option of independent"):
        build_trainee("independent", chat_target, {"hiden_size": 3})
    with pytest.raises(UserError, match="multiple"):
        build_trainee("independent", chat_target, {"hidden_size": 30, "num_heads": 4})
    numbers = (dict(steps=0), dict(learning_rate=0.0), dict(warmup_steps=99, steps=5), dict(patience=-1))
    for bad in (*numbers, dict(validate_every=0), dict(loss="kl"), dict(optimizer="sgd")):
        with pytest.raises(UserError):
            TrainConfig(**bad)
    with pytest.raises(UserError, match="row_tokens to at least 30"):
        pack([30, 5], [0, 1], 20)


def test_all_masked_samples_are_a_user_error():
    from selfspec.training.data import Sample

    with pytest.raises(UserError, match="nothing to learn"):
        Batches([Sample(0, [5, 6, 7], 3, 0.0, False)], [], batch_rows=1, row_tokens=8, seed=0)


def test_divergence_stops_with_the_last_checkpoint_intact(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = [0]

    def turns_nan(*args):
        calls[0] += 1
        return head_loss(*args) * (float("nan") if calls[0] == 8 else 1.0)

    monkeypatch.setattr(trainer_module, "head_loss_named", lambda _: turns_nan)
    with pytest.raises(UserError, match="diverged at step 7"):
        train_draft(chat_target, "independent", DRAFT, CONFIG, data_folder(), tmp_path / "o", "c", quiet)
    weights = load_file(tmp_path / "o" / STATE)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_every_epoch_visits_every_sample_once():
    import numpy as np

    from selfspec.training.batches import Teacher
    from selfspec.training.data import Sample

    samples = [Sample(i, [i + 1] * (4 + i % 5), 2, 0.0, False) for i in range(23)]
    teachers = [
        Teacher(np.zeros((s.answer_len, 2), np.int32), np.full((s.answer_len, 2), -1, np.float16)) for s in samples
    ]
    batches = Batches(samples, teachers, batch_rows=2, row_tokens=16, seed=3)
    seen: dict[int, list[int]] = {}
    orders: dict[int, list[int]] = {}
    for step in range(40):
        documents = [d for d in batches.at(step).document_BT.unique().tolist() if d >= 0]
        seen.setdefault(batches.epoch(step), []).extend(documents)
        orders.setdefault(batches.epoch(step), []).append(documents[0])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(23))
    assert orders[0] != orders[1]


def test_rounds_over_known_agreements():
    result = Validation(lookahead=2)
    # rounds: [T T]+bonus, [F]+correction, [T F]+correction, [T] and the text ends
    result.add_greedy_text([True, True, True, False, True, False, True])
    assert (result.rounds, result.emitted) == (4, 7)
    assert result.tested == [4, 2] and result.accepted == [3, 1]
    result.add_positions([0.5, 0.25], [True, False])
    result.add_alpha(1, [0.5, 0.5])
    summary = result.summary()
    assert summary["alpha"] == 0.375 and summary["greedy_tau"] == summary["expected_tau"] == 7 / 4
    assert summary["alpha_by_position"] == [0.375, 0.5] and summary["sampled_tau"] == 1 + 0.375 + 0.375 * 0.5


def test_without_greedy_text_the_expected_tau_is_estimated():
    result = Validation(lookahead=3)
    result.add_positions([0.5], [False])
    summary = result.summary()  # later positions were not looked at
    assert summary["expected_tau"] == summary["sampled_tau"] == 1.5
    assert summary["alpha_by_position"] == [0.5, None, None]


def test_learning_rate_warms_up_and_decays():
    config = replace(CONFIG, steps=100, warmup_steps=10, learning_rate=1.0, final_lr_share=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[99] < 0.102


def test_independent_starts_from_the_targets_embedding(chat_target: Target):
    from selfspec.training.independent import reduced_embedding

    weight = chat_target.head_weight_VM.detach()
    reduced = reduced_embedding(weight, 32)  # full width: distances are kept but for the scale
    centred = weight - weight.mean(0)
    ratio = torch.pdist(reduced[:50]) / torch.pdist(centred[:50])
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio[0])), rtol=1e-3, atol=0)
    assert reduced_embedding(weight, 8).shape == (258, 8) and reduced_embedding(weight, 40).shape == (258, 40)


def test_trained_draft_loads_as_a_target(chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path):
    train_draft(chat_target, "independent", DRAFT, replace(CONFIG, steps=3), data_folder(), tmp_path / "o", "c", quiet)
    draft = load_target(str(tmp_path / "o"), dtype="float32", device="cpu")
    assert draft.eos_token_ids == (257,)
