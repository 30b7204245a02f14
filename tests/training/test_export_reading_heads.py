"""Published Medusa and Hydra heads, as their authors' own modules save them, give the same logits as ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_drafts import edit, read
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import silu

import selfspec
import tiny_models
from selfspec.drafters.hydra import HydraHeads
from selfspec.drafters.medusa import MedusaHeads
from selfspec.errors import UserError
from selfspec.target import Target, wrap_target
from selfspec.training.export.jobs import import_draft

WIDTH, HEADS, VOCAB = 32, 3, tiny_models.VOCAB_SIZE


@pytest.fixture(scope="module")
def target() -> Target:
    return wrap_target(tiny_models.tiny_llama(), None, "small")


class Block(nn.Module):
    """A published head's block; `conditions` embeddings beside the hidden state make it wider."""

    def __init__(self, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear((conditions + 1) * WIDTH, WIDTH)
        if conditions:
            self.res_connection = nn.Linear((conditions + 1) * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        straight: Tensor = self.res_connection(x) if hasattr(self, "res_connection") else x
        return straight + silu(self.linear(x))


def save(folder: Path, config: dict[str, Any], module: nn.Module) -> Path:
    """Weights that bfloat16 holds exactly; modules that occur twice are written twice, as torch.save does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.2).bfloat16())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "some/base"}))
    save_file({name: tensor.clone() for name, tensor in module.state_dict().items()}, folder / "model.safetensors")
    return folder


def medusa(folder: Path, own: bool, blocks: int = 1) -> nn.ModuleList:
    """Blocks are one module repeated, as published."""
    ends = [[nn.Linear(WIDTH, VOCAB, bias=False)] if own else [] for _ in range(HEADS)]
    heads = nn.ModuleList(nn.Sequential(*([Block()] * blocks), *end) for end in ends)
    version = {} if own else {"version": "2"}
    save(folder, {"medusa_num_heads": HEADS, "medusa_num_layers": blocks, **version}, heads)
    return heads


def hydra(folder: Path, blocks: int = 1, dropout: bool = False) -> nn.ModuleDict:
    def with_dropout(*modules: nn.Module) -> nn.Sequential:
        return nn.Sequential(
            *(each for module in modules for each in (nn.Dropout(0.0), module) if dropout or each is module)
        )

    mlp = [with_dropout(Block(head + 1), *([Block()] * (blocks - 1))) for head in range(HEADS)]
    outputs = [nn.Linear(WIDTH, VOCAB) for _ in range(HEADS)]
    named = nn.ModuleDict(
        {
            "hydra_mlp": nn.ModuleList(mlp),
            "hydra_lm_head": nn.ModuleList([with_dropout(matrix) for matrix in outputs] if dropout else outputs),
        }
    )
    config = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0, "hydra_num_heads": HEADS}
    save(folder, {**config, "hydra_num_layers": blocks}, named)
    return named


@torch.no_grad()
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own", [True, False], ids=["own heads", "tied"])
def test_both_medusa_layouts_are_read_tensor_by_tensor(target: Target, tmp_path: Path, own: bool, blocks: int):
    theirs = medusa(tmp_path / "theirs", own, blocks)
    config = import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    written, tensors = read(tmp_path / "ours")
    assert written == config and all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert (config["num_heads"], config["num_blocks"], config["own_head"], config["d_vocab"]) == (
        HEADS,
        blocks,
        own,
        None,
    )
    published = theirs.state_dict()
    for head in range(HEADS):
        for block in range(blocks):
            for part in ("weight", "bias"):
                name = f"blocks.{head}.{block}.{part}"
                assert torch.equal(tensors.pop(name).float(), published.pop(f"{head}.{block}.linear.{part}")), name
        if own:
            assert torch.equal(tensors.pop(f"lm_head.{head}.weight").float(), published.pop(f"{head}.{blocks}.weight"))
    assert not tensors and not published

    ours = MedusaHeads(WIDTH, HEADS, blocks, VOCAB if own else 0)
    ours.load_state_dict({name: tensor.float() for name, tensor in read(tmp_path / "ours")[1].items()})
    hidden = torch.randn(5, WIDTH)
    for head, state in enumerate(ours.states(hidden)):
        logits = ours.lm_head[head](state) if own else target.unembed(state)
        torch.testing.assert_close(logits, theirs[head](hidden) if own else target.unembed(theirs[head](hidden)))


@torch.no_grad()
@pytest.mark.parametrize(("blocks", "dropout"), [(1, False), (3, False), (3, True)])
def test_hydras_layout_is_read_tensor_by_tensor(target: Target, tmp_path: Path, blocks: int, dropout: bool):
    theirs = hydra(tmp_path / "theirs", blocks, dropout)
    config = import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    tensors = {name: tensor.float() for name, tensor in read(tmp_path / "ours")[1].items()}
    assert (config["num_heads"], config["num_blocks"], config["own_head"], config["own_bias"]) == (
        HEADS,
        blocks,
        True,
        True,
    )
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(t.numel() for t in theirs.state_dict().values())
    ours = HydraHeads(WIDTH, HEADS, blocks, VOCAB, own_bias=True)
    ours.load_state_dict(tensors)
    for head in range(HEADS):
        reads = torch.randn(5, (head + 2) * WIDTH)
        expected = theirs["hydra_lm_head"][head](theirs["hydra_mlp"][head](reads))
        torch.testing.assert_close(ours.lm_head[head](ours.state(head, reads)), expected)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_file_that_holds_a_repeated_block_once_is_read_whole(target: Target, tmp_path: Path, kind: str):
    once = medusa(tmp_path / "once", own=True, blocks=3) if kind == "medusa" else hydra(tmp_path / "once", blocks=3)
    assert len(once.state_dict()) > len(dict(once.named_parameters()))  # which safetensors' save_model would keep
    import_draft(target, str(tmp_path / "once"), str(tmp_path / "whole"))

    def drop_copies(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in set(tensors) - set(dict(once.named_parameters())):
            del tensors[name]

    edit(tmp_path / "once", drop_copies)
    import_draft(target, str(tmp_path / "once"), str(tmp_path / "ours"))
    (_, whole), (_, ours) = read(tmp_path / "whole"), read(tmp_path / "ours")
    assert set(whole) == set(ours) and all(torch.equal(whole[name], ours[name]) for name in whole)


def test_the_prefix_of_a_whole_models_names_is_no_obstacle(target: Target, tmp_path: Path):
    medusa(tmp_path / "theirs", own=True)
    plain = read(tmp_path / "theirs")[1]

    def prefix(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update({f"medusa_head.{name}": tensor for name, tensor in plain.items()})

    edit(tmp_path / "theirs", prefix)
    assert import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))["num_heads"] == HEADS


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_what_was_read_decodes_the_targets_own_tokens(target: Target, tmp_path: Path, kind: str):
    medusa(tmp_path / "theirs", own=False) if kind == "medusa" else hydra(tmp_path / "theirs", blocks=2)
    import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    drafter = selfspec.load_drafter(tmp_path / "ours", target)
    prompts = [tiny_models.prompt_ids(7)]
    spoken = selfspec.decode(target, drafter, prompts, max_new_tokens=12, lookahead=3, ignore_eos=True)
    alone = selfspec.decode(target, None, prompts, max_new_tokens=12, ignore_eos=True)
    assert spoken[0].token_ids == alone[0].token_ids


def set_config(**changes: Any) -> Callable[..., None]:
    return lambda config, _: config.update(changes)


REFUSED = {
    "fewer heads than weights": ("medusa", set_config(medusa_num_heads=2), "blocks.2.0.bias .* has no place"),
    "more heads than weights": ("medusa", set_config(medusa_num_heads=5), "blocks.3.0.bias is missing"),
    "no number of heads": ("medusa", lambda c, _: c.pop("medusa_num_heads"), "medusa_num_heads=None"),
    "a layer miscounted": ("medusa", set_config(medusa_num_layers=2), "no place"),
    "another vocabulary": ("medusa", lambda _, t: t.update({"1.1.weight": torch.zeros(98, WIDTH)}), r"\[98, 32\]"),
    "a half of the heads' matrices": ("medusa", lambda _, t: t.pop("1.1.weight"), "lm_head.1.weight is missing"),
    "the base beside it": ("medusa", lambda _, t: t.update({"lm_head.weight": torch.zeros(2)}), "has no place"),
    "attention in front": ("hydra", set_config(hydra_head_arch="prefix-mlp"), "hydra_head_arch='prefix-mlp'"),
    "blind heads": ("hydra", set_config(grounded_heads=False), "grounded_heads=False"),
    "an earlier state": ("hydra", set_config(hidden_state_offset=1), "hidden_state_offset=1"),
    "no residual": ("hydra", lambda _, t: t.pop("hydra_mlp.0.0.res_connection.weight"), "residual.0.weight is missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_heads_that_do_not_fit_are_refused(target: Target, tmp_path: Path, what: str):
    kind, change, match = REFUSED[what]
    medusa(tmp_path / "theirs", own=True) if kind == "medusa" else hydra(tmp_path / "theirs")
    edit(tmp_path / "theirs", change)
    with pytest.raises(UserError, match=match):
        import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_tied_heads_want_a_target_whose_logits_are_a_plain_product(tmp_path: Path):
    capped = wrap_target(tiny_models.tiny_model("gemma2"), None, "capped")
    medusa(tmp_path / "theirs", own=False)
    with pytest.raises(UserError, match="scales or caps its logits"):
        import_draft(capped, str(tmp_path / "theirs"), str(tmp_path / "ours"))


def test_feature_layers_are_eagles(target: Target, tmp_path: Path):
    medusa(tmp_path / "theirs", own=True)
    with pytest.raises(UserError, match="feature_layers is for EAGLE-3"):
        import_draft(target, str(tmp_path / "theirs"), str(tmp_path / "ours"), [1, 2, 3])
