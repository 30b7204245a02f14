"""LayerSkip training: the loss is the published sum, dropout skips layers per sample, the base stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import selfspec
import tiny_models
from selfspec.errors import UserError
from selfspec.target import Target, load_target, wrap_target
from selfspec.target.byte_tokenizer import byte_tokenizer
from selfspec.training.batches import Batch, Batches
from selfspec.training.data import Sample
from selfspec.training.draft_vocab import count_draft_vocab
from selfspec.training.job import train_draft
from selfspec.training.layerskip import LayerSkipTrainee, build_layerskip
from selfspec.training.layerskip_schedule import exit_scales
from selfspec.training.losses import coarse_cross_entropy
from selfspec.training.teacher import distributions
from selfspec.training.trainer import TrainConfig

CONFIG = TrainConfig(
    steps=12,
    batch_rows=2,
    row_tokens=48,
    learning_rate=1e-2,
    warmup_steps=2,
    autocast=False,
    num_kept=8,
    log_every=1,
    validate_every=6,
    checkpoint_every=5,
)
SAMPLES = [Sample(i, list(range(20 + i, 40 + 2 * i)), 6 + i, 0.0, False) for i in range(4)]
PROMPTS = [tiny_models.prompt_ids(6, vocab_size=250), tiny_models.prompt_ids(9, seed=1, vocab_size=250)]


@pytest.fixture
def four_layers() -> Target:
    return wrap_target(tiny_models.tiny_llama(vocab_size=258, max_positions=128), byte_tokenizer(), "four")


def one_batch(target: Target) -> Batch:
    return Batches(SAMPLES, distributions(target, SAMPLES, 8), batch_rows=2, row_tokens=48, seed=0).at(0)


def train_a_little(trainee: LayerSkipTrainee, batch: Batch, steps: int = 12) -> None:
    optimizer = torch.optim.Adam(trainee.module.parameters(), lr=2e-2)
    for step in range(steps):
        trainee.at_step(step, steps)
        trainee.loss(batch).div(batch.weight_N.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def sample_logits(target: Target, exits: list[int]) -> list[torch.Tensor]:
    """Logits of the unpacked samples at their supervised positions, by exit: transformers' own forward pass."""
    model = target.hf_model
    by_exit: list[list[torch.Tensor]] = [[] for _ in exits]
    for sample in SAMPLES:
        with torch.no_grad():
            states = model.model(torch.tensor([sample.token_ids]), output_hidden_states=True)
        for found, layer in zip(by_exit, exits, strict=True):
            last = layer == target.num_layers  # transformers' last hidden state is normed already
            hidden = states.last_hidden_state if last else model.model.norm(states.hidden_states[layer])
            found.append(model.lm_head(hidden)[0, sample.prompt_len - 1 : -1].detach())
    return [torch.cat(found) for found in by_exit]


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("lora_rank", [2, None])
def test_the_loss_is_the_weighted_sum_over_the_exits_that_are_on(
    four_layers: Target, labels: str, lora_rank: int | None
):
    options = {"max_dropout": 0.0, "labels": labels, "rotation": 3, "lora_rank": lora_rank}
    trainee = build_layerskip(four_layers, options)
    batch = one_batch(four_layers)
    trainee.at_step(1, 10)  # layers l = 1 of 0, 1, 2, 3, and the last
    e = exit_scales(4, 1.0)
    teachers = distributions(four_layers, SAMPLES, 8)
    ids = torch.from_numpy(np.concatenate([t.ids_AK for t in teachers])).long()
    logp = torch.from_numpy(np.concatenate([t.logp_AK for t in teachers])).float()
    tokens = torch.tensor([token for s in SAMPLES for token in s.token_ids[s.prompt_len :]])
    expected = 0.0
    weights = (e[1] / (e[1] + e[3]), e[3] / (e[1] + e[3]))
    for logits, weight in zip(sample_logits(four_layers, [2, 4]), weights, strict=True):
        soft, hard = coarse_cross_entropy(logits, ids, logp), functional.cross_entropy(logits, tokens, reduction="none")
        expected += weight * float((soft if labels == "soft" else hard).sum())
    assert float(trainee.loss(batch).detach()) == pytest.approx(expected, rel=1e-4)


def test_a_dropped_layer_is_skipped_for_its_sample_alone(four_layers: Target):
    trainee = build_layerskip(four_layers, {"lora_rank": 2})
    batch = one_batch(four_layers)
    skip = np.array([False, True, False, True])
    (whole,) = trainee.stack.run(batch, [4])
    (some,) = trainee.stack.run(batch, [4], {1: skip})
    of_sample_1 = (batch.document_N == 1) & (batch.weight_N > 0)
    others = (batch.document_N != 1) & (batch.weight_N > 0)
    assert torch.equal(whole[others], some[others])
    shallow = tiny_models.tiny_llama(vocab_size=258, max_positions=128)
    shallow.model.layers = torch.nn.ModuleList([shallow.model.layers[0], shallow.model.layers[2]])
    shallow.config.num_hidden_layers = 2
    with torch.no_grad():
        state = shallow.model(torch.tensor([SAMPLES[1].token_ids]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(some[of_sample_1], state[SAMPLES[1].prompt_len - 1 : -1], rtol=1e-4, atol=1e-4)


def test_gradients_reach_what_is_below_the_exits_that_are_on_and_only_answers_give_any(four_layers: Target):
    trainee = build_layerskip(
        four_layers, {"exits": [2], "exit_layer": 2, "rotation": 2, "last_always": False, "max_dropout": 0.0}
    )
    batch = one_batch(four_layers)
    seen = {}
    for step in (0, 1):  # the exit alone, then the last layer alone
        trainee.at_step(step, 2)
        trainee.module.zero_grad(set_to_none=True)
        trainee.loss(batch).backward()
        seen[step] = {
            name.split("/layers/")[1][0] for name, p in trainee.module.named_parameters() if p.grad is not None
        }
    assert seen == {0: {"0", "1"}, 1: {"0", "1", "2", "3"}}
    supervised = batch.flat_N[batch.weight_N > 0].tolist()
    flat = batch.document_BT.flatten()
    first_of_0 = int((flat == 0).nonzero()[0])
    assert first_of_0 + SAMPLES[0].prompt_len - 1 in supervised  # the first answer token is learnt
    assert not set(range(first_of_0, first_of_0 + SAMPLES[0].prompt_len - 1)) & set(supervised)  # the prompt is not


def test_training_makes_the_exit_draft_and_leaves_the_base_alone(four_layers: Target):
    before = {name: (p.clone(), p.requires_grad) for name, p in four_layers.hf_model.named_parameters()}
    batch = one_batch(four_layers)
    trainee = build_layerskip(
        four_layers, {"exit_layer": 2, "exits": [2], "scale": "uniform", "rotation": 1, "max_dropout": 0.0}
    )
    start = trainee.validate([batch], {0, 1, 2, 3}).summary()
    assert start["base_top1_agreement"] == 1 and start["kl_from_base"] == pytest.approx(0, abs=1e-4)
    assert start["perplexity"] == pytest.approx(start["base_perplexity"], rel=1e-3)
    train_a_little(trainee, batch, 60)
    end = trainee.validate([batch], {0, 1, 2, 3}).summary()
    assert end["greedy_agreement"] > start["greedy_agreement"] + 0.3
    assert end["greedy_tau"] > start["greedy_tau"] and end["kl_from_base"] > 0
    assert end["by_exit"]["2"]["alpha"] == end["alpha"]
    for name, parameter in four_layers.hf_model.named_parameters():
        assert torch.equal(before[name][0], parameter) and parameter.requires_grad == before[name][1]


def test_a_last_layer_held_by_the_bases_own_distribution_begins_without_gradient(four_layers: Target):
    batch = one_batch(four_layers)
    norms = {}
    for labels in ("soft", "hard"):
        options = {"labels": labels, "exits": [1], "exit_layer": 1, "rotation": 2, "last_always": False}
        trainee = build_layerskip(four_layers, {**options, "max_dropout": 0.0})
        trainee.at_step(1, 2)  # the last layer's turn
        trainee.loss(batch).backward()
        norms[labels] = sum(float(p.grad.norm()) for p in trainee.module.parameters() if p.grad is not None)
    assert norms["soft"] < 0.02 * norms["hard"]


def test_killed_and_resumed_training_equals_uninterrupted_training(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path
):
    data = data_folder()
    options = {"exit_layer": 1, "lora_rank": 2, "max_dropout": 0.5, "rotation": 2}
    args = (chat_target, "layerskip", options, CONFIG, data)

    class Killed(BaseException):
        pass

    def dies_at_step_8(record: dict) -> None:
        if record.get("step") == 8:
            raise Killed

    train_draft(*args, tmp_path / "whole", "c", lambda _: None)
    with pytest.raises(Killed):
        train_draft(*args, tmp_path / "cut", "c", dies_at_step_8)
    train_draft(*args, tmp_path / "cut", "c", lambda _: None)
    whole, cut = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.parametrize("lora_rank, d_vocab", [(2, None), (2, 60), (None, None), (None, 60)])
def test_what_is_saved_is_a_target_of_its_own_whose_exit_drafts_losslessly(
    chat_target: Target, data_folder: Callable[..., Path], tmp_path: Path, lora_rank: int | None, d_vocab: int | None
):
    base_folder, out = tmp_path / "base", tmp_path / "trained"
    chat_target.hf_model.save_pretrained(base_folder)
    chat_target.tokenizer.save_pretrained(base_folder)
    options, data = {"exit_layer": 1, "lora_rank": lora_rank}, data_folder()
    if d_vocab is not None:
        count_draft_vocab(chat_target, data, tmp_path / "vocab.safetensors", num_kept=8)
        options |= {"draft_vocab": str(tmp_path / "vocab.safetensors"), "d_vocab": d_vocab}
    train_draft(chat_target, "layerskip", options, CONFIG, data, out, "the command", lambda _: None)
    card = (out / "README.md").read_text()
    assert "exactly what the adapted model would write" in card and "perplexity of the text" in card
    assert ("adapter=" in card) == (lora_rank is not None)
    facts = json.loads((out / "config.json").read_text())
    assert (facts["kind"], facts["exit_layer"], facts["base"]["fingerprint"]) == (
        "layerskip",
        1,
        chat_target.fingerprint,
    )

    if lora_rank is None:
        target = load_target(out, dtype="float32", device="cpu")
    else:
        target = load_target(base_folder, dtype="float32", device="cpu", adapter=out)
    drafter = selfspec.load_drafter(out, target)
    assert drafter.name == "early_exit" and drafter.exit_layer == 1
    expected = selfspec.decode(target, None, PROMPTS, max_new_tokens=24, ignore_eos=True)
    drafted = selfspec.decode(target, drafter, PROMPTS, max_new_tokens=24, ignore_eos=True, lookahead=3)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in expected]
    assert sum(r.num_accepted for o in drafted for r in o.rounds) > 0
    assert facts["d_vocab"] == d_vocab and (drafter.draft_bytes(1, 1)[0] > 0) == (d_vocab is not None)
    base = load_target(base_folder, dtype="float32", device="cpu")
    assert [o.token_ids for o in selfspec.decode(base, None, PROMPTS, max_new_tokens=24, ignore_eos=True)] != [
        o.token_ids for o in expected
    ]
    with pytest.raises(UserError, match="base model, not trained for drafting.*The right target: load_target"):
        selfspec.load_drafter(out, base)


def test_impossible_options_are_user_errors(four_layers: Target):
    for options, match in (
        ({"exit_layer": 4}, "Allowed: 1 to 3"),
        ({"exits": [0]}, "Allowed: 1 to 3"),
        ({"exits": [1, 2], "exit_layer": 3}, "would not be trained"),
        ({"exitlayer": 1}, "no option of layerskip.*Did you mean 'exit_layer'"),
        ({"curriculum": "random"}, "Allowed: all, gradual, rotational"),
        ({"labels": "firm"}, "Allowed: hard, soft"),
        ({"max_dropout": 1.0}, r"lie in \[0, 1\)"),
        ({"lora_rank": 0}, "at least 1"),
        ({"exits": [1], "exit_layer": 1, "rotation": 3, "last_always": False}, "leaves steps without"),
    ):
        with pytest.raises(UserError, match=match):
            build_layerskip(four_layers, options)
    with pytest.raises(UserError, match="Allowed: llama"):
        build_layerskip(wrap_target(tiny_models.ALL_FAMILIES["gpt2"](), None, "gpt2"), {})
