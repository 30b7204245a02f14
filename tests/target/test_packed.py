"""A packed weight is the weight: what float16 holds is held in it, everything else in oneDNN's blocks or as it was."""

from __future__ import annotations

import pytest
import torch

from selfspec import decode, wrap_target
from selfspec.target import packed
from selfspec.target.fused import fuse
from selfspec.target.packed import PackedLinear, exact_in_half, packing_available
from tiny_models import prompt_ids, tiny_llama

CPU = torch.device("cpu")
PUBLISHED = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def half_available() -> bool:
    return PackedLinear(torch.eye(16), None).layout == "half"


needs_half = pytest.mark.skipif(not half_available(), reason="this CPU or torch has no product with float16 weights")


@needs_half
@pytest.mark.parametrize("scale", [1.0, 2.0**-6, 2.0**12])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 17])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 90)])
def test_float16_holds_what_was_published_in_bfloat16_and_the_product_is_float32s(scale, tokens, bias):
    """Against float64: as close as `F.linear` in float32, where products of rounded inputs would be 2^-11 off."""
    weight, x = scale * PUBLISHED[:90, :57], torch.randn(1, tokens, 57)
    linear = PackedLinear(weight, bias)
    assert linear.layout == "half" and linear.nbytes == 2 * weight.numel() + (0 if bias is None else bias.nbytes)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 2e-6 * float(exact.abs().max())
    assert (linear(x) - exact).abs().max() <= tolerance
    residual = torch.randn(1, tokens, 90)
    assert (linear.plus(x, residual) - exact - residual).abs().max() <= tolerance + 1e-6


def with_column(scale: float) -> torch.Tensor:
    weight = PUBLISHED.clone()
    weight[:, 3] *= scale
    return weight


def with_entry(value: float) -> torch.Tensor:
    weight = PUBLISHED.clone()
    weight[5, 3] = value
    return weight


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (torch.randn(96, 64), "more digits than float16 has"),
        (PUBLISHED * 2.0**20, "above its largest number"),
        (PUBLISHED * 2.0**-20, "below its smallest, where much of a row would be rounded away"),
        (PUBLISHED * 2.0**-90, "so small that a square of it is 0 in float32"),
        (torch.cat([PUBLISHED, PUBLISHED[:1] * 2.0**-20]), "one row of many"),
        (torch.cat([PUBLISHED, PUBLISHED[:1] * 2.0**-90]), "one row of many, all of it 0 in float16"),
        (with_column(2.0**-20), "one column, which may meet large inputs"),
        (with_entry(1e5), "one number too large"),
        (with_entry(1e30), "one number whose square is infinite"),
        (with_entry(float("inf")), "infinite"),
        (with_entry(float("nan")), "nothing to compare"),
        (with_entry(1 + 2.0**-12), "one number with a digit too many"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_float16_does_not_hold_stays_float32_and_as_it_was(spoilt, why):
    before = spoilt.clone()
    assert exact_in_half(PUBLISHED) and not exact_in_half(spoilt), why
    assert PackedLinear(spoilt, None).layout != "half"
    assert torch.equal(spoilt.nan_to_num(1.5), before.nan_to_num(1.5)), "FBGEMM cuts what is too large where it lies"


@pytest.mark.parametrize(("times_the_limit", "taken"), [(0.9, True), (1.1, False)])
def test_a_row_may_lose_what_float32_loses_in_summing_its_products(times_the_limit, taken):
    """2^-24 times the square root of the number of inputs, of the row's length."""
    row = torch.ones(1, 64)
    limit = 2.0**-24 * 8 * float(row.norm())
    number = 1 + times_the_limit * limit  # float16 has 1 here
    row[0, 0] = number
    weight = torch.cat([row, torch.ones(99, 64)])  # the column is as long as it need be
    assert exact_in_half(weight) == taken


def test_a_few_weights_near_zero_may_be_rounded():
    weight = PUBLISHED.clone()
    weight[:20, 0] = 2.0**-26
    assert exact_in_half(weight) and not torch.equal(weight.half().float(), weight)


def test_a_row_is_looked_at_wherever_it_lies(monkeypatch):
    monkeypatch.setattr(packed, "LOOKED_AT_ONCE", 640)
    weight = PUBLISHED.clone()
    assert exact_in_half(weight)
    weight[95] = torch.randn(64)
    assert not exact_in_half(weight)
    weight = PUBLISHED.clone()
    weight[:20, 0] = 2.0**-26
    assert exact_in_half(weight), "a column is judged as a whole, not by the rows of one piece"


@needs_half
@pytest.mark.parametrize("spoil", ["__call__", "plus"])
def test_a_product_with_float16_weights_that_came_to_mean_something_else_is_not_used(spoil, monkeypatch):
    right = getattr(packed.HalfWeights, spoil)
    monkeypatch.setattr(packed.HalfWeights, spoil, lambda self, *given: 1.01 * right(self, *given))
    assert PackedLinear(PUBLISHED, None).layout != "half"


@needs_half
def test_views_may_be_multiplied_and_nothing_given_is_changed():
    linear, wide = PackedLinear(PUBLISHED, None), torch.randn(2, 3, 128)
    x, residual = wide[..., ::2], torch.randn(3, 2, 96).transpose(0, 1)
    before = wide.clone(), residual.clone()
    expected = torch.nn.functional.linear(x, PUBLISHED)
    assert torch.allclose(linear(x), expected, atol=1e-5)
    assert torch.allclose(linear.plus(x, residual), expected + residual, atol=1e-5)
    assert torch.equal(wide, before[0]) and torch.equal(residual, before[1])


@needs_half
@pytest.mark.parametrize("tied", [True, False])
def test_a_published_model_decodes_from_half_its_bytes_to_the_tokens_of_transformers(tied):
    model = tiny_llama(tie_word_embeddings=tied).bfloat16().float()
    target, plain = wrap_target(model), wrap_target(model)
    assert fuse(target)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and (tied or "embed" not in name)]
    assert target.step_bytes == 2 * sum(p.numel() for p in matrices)
    assert target.step_weights == plain.step_weights and target.head_bytes == plain.head_bytes // 2
    ids = prompt_ids(9)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert decode(target, None, [ids], max_new_tokens=24)[0].token_ids == expected


@pytest.mark.skipif(not packing_available(torch.float32, CPU), reason="this torch has no packed products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_blocked_and_no_pass_reorders_it_again(dtype, capfd):
    """A row-major weight (`ab`) costs two tokens twice what one costs: oneDNN's own log tells the layout."""
    if not packing_available(dtype, CPU):
        pytest.skip(f"no packed {dtype} product on this machine")
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        linear = PackedLinear(torch.randn(256, 128).to(dtype), None)
        for tokens in (1, 2, 9):
            linear(torch.randn(1, tokens, 128).to(dtype))
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines() if ",exec,cpu," in line]
    products = [line for line in lines if "inner_product" in line]
    layouts = {part for line in products for part in " ".join(line).split() if part.startswith("wei:")}
    assert products and not any("ab::" in layout.replace("blocked:", "") for layout in layouts), layouts
    reorders = [line for line in lines if "reorder" in line]
    assert len(reorders) <= 1, reorders  # when it was packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48)])
def test_a_packed_linear_is_a_linear_with_its_residual(dtype, bias):
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(1, 5, 64).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    linear = PackedLinear(weight, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    tolerance = (1e-6 if dtype == torch.float32 else 2**-7) * float(expected.abs().max())  # two roundings
    assert (linear(x) - expected).abs().max() <= tolerance
    assert (linear.plus(x, x[..., :48]) - expected - x[..., :48]).abs().max() <= tolerance
    assert linear.nbytes == weight.numel() * dtype.itemsize + (0 if bias is None else bias.numel() * dtype.itemsize)


def test_without_the_private_operators_the_plain_ones_are_used_and_the_result_is_the_same(monkeypatch):
    expected = PackedLinear(torch.eye(64), None)(torch.ones(1, 1, 64))
    monkeypatch.setattr(packed.torch.ops.mkldnn, "_linear_pointwise", None)
    monkeypatch.setattr(packed.torch.ops.quantized, "linear_dynamic_fp16", None)
    assert not packing_available(torch.float32, CPU)
    assert not fuse(wrap_target(tiny_llama()))
    linear = PackedLinear(torch.eye(64), None)
    assert linear.layout == "plain"
    assert torch.equal(linear(torch.ones(1, 1, 64)), expected)
    assert torch.equal(linear.plus(torch.ones(1, 1, 64), expected), 2 * expected)


def test_an_operator_that_came_to_mean_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(packed.Blocked, "__call__", lambda self, x: 1.01 * packed.Plain.__call__(self, x))
    assert not packing_available(torch.float32, CPU)
