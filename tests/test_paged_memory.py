"""The paged-memory table: its simulation takes the blocks that real decoding takes, its arithmetic holds."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from experiments.paged_memory import PagedMemoryConfig, prompt_of, report, serve, typed
from selfspec import Decoder, UserError, build_drafter, wrap_target
from selfspec.cache import Paged
from selfspec.config import conf_dir
from selfspec.measure.load import Length
from tiny_models import tiny_llama

LENGTHS = [Length(30, 9), Length(5, 40), Length(17, 1), Length(1, 22), Length(64, 30), Length(16, 16), Length(3, 5)]


def config(**options):
    plain = dict(lengths={}, rows=[2], shared_tokens=[0], block_size=4)
    return PagedMemoryConfig(**{**plain, **options})


@pytest.mark.parametrize("shared_tokens", [0, 10])
@pytest.mark.parametrize("num_blocks", [200, 30])
@pytest.mark.parametrize("num_drafted, accept_rate", [(0, 0.0), (4, 1.0), (4, 0.0)])
def test_the_simulation_takes_the_blocks_that_decoding_takes(shared_tokens, num_blocks, num_drafted, accept_rate):
    """With every draft right, or every one wrong, real rows grow as simulated ones do."""
    target = wrap_target(tiny_llama())
    drafter = build_drafter("synthetic", target, accept_rate=accept_rate) if num_drafted else None
    decoder = Decoder(target, drafter, max_batch_rows=3, cache=Paged(4, num_blocks))
    prompts = [prompt_of(index, one, shared_tokens) for index, one in enumerate(LENGTHS)]
    in_use: list[int] = []
    decoder.decode(
        prompts,
        max_new_tokens=[one.output_tokens for one in LENGTHS],
        lookahead=max(num_drafted, 1),
        ignore_eos=True,
        interleave_prefill=False,
        on_round=lambda event: in_use.append(decoder.rows.cache.blocks.num_in_use),
    )
    settings = config(num_drafted=num_drafted, accept_rate=accept_rate)
    use = serve(LENGTHS, 3, num_blocks, shared_tokens, settings)
    assert use.peak_blocks == decoder.rows.cache.blocks.peak_in_use


def test_equal_requests_leave_nothing_to_save_but_the_rounding():
    use = serve([Length(32, 32)] * 20, 4, 1000, 0, config(num_drafted=0))
    assert use.peak_blocks == 4 * 16 and use.mean_rows == 4 and use.mean_saved == 0


def test_a_shared_prompt_is_stored_once_and_only_whole_blocks_of_it():
    alone = serve([Length(4, 8)] * 30, 6, 1000, 0, config(num_drafted=0))
    shared = serve([Length(4, 8)] * 30, 6, 1000, 18, config(num_drafted=0))
    assert shared.peak_blocks <= alone.peak_blocks + 18 // 4 + 6, "four blocks once, and an unshared rest per row"
    assert shared.mean_saved == pytest.approx(5 * 4, rel=0.1)


def test_fewer_blocks_let_fewer_rows_run_and_nobody_starve():
    use = serve([Length(30, 30)] * 12, 8, 34, 0, config(num_drafted=0))
    assert use.mean_rows == 2 and use.peak_blocks <= 34


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(UserError, match="needs 16 blocks of 4; there are 15"):
        serve([Length(30, 30)], 1, 15, 0, config(num_drafted=0))


def test_the_report_names_its_command_and_what_it_follows_from():
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("paged_memory", ["lengths=tiny", "rows=[1,4]", "num_requests=40", "target=random-tiny"])
    text = report(typed(composed), ["lengths=tiny"])
    assert text.startswith("`python experiments/paged_memory.py lengths=tiny`")
    assert "prompt_median 24" in text and "bytes of keys and values per token (random-tiny" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| 1 ", "| 4 "))]
    assert len(rows) == 4, "two numbers of rows, with and without a shared prompt"
    for _, contiguous, peak, saved, _, used, at_once in rows:
        assert float(peak) <= float(contiguous) and saved.strip().endswith("%")
        assert int(used.split("→")[1].strip().rstrip("%")) <= 100 and float(at_once) >= 1


@pytest.mark.parametrize(
    "override, message",
    [("rows=[0]", "rows=\\[0\\]"), ("accept_rate=1.5", "accept_rate=1.5"), ("block_size=24", "block_size=24")],
)
def test_what_is_not_possible_is_refused(override, message):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("paged_memory", [override])
    with pytest.raises(UserError, match=message):
        typed(composed)
