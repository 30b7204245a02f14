"""A copy where the text repeats itself, the learned draft elsewhere: exact whatever is chosen, the choice recorded."""

from __future__ import annotations

import pytest
import torch

from selfspec import Sampling, UserError, build_drafter, decode, wrap_target
from selfspec.decoding.drafting import Drafting
from selfspec.decoding.rows import Rows
from selfspec.drafters.hybrid import COPIED, LEARNED, Hybrid
from selfspec.lookahead import Plan
from tiny_models import prompt_ids, tiny_llama

pytestmark = pytest.mark.usefixtures("small_chunks")

TARGET = wrap_target(tiny_llama())
EXIT = {"kind": "early_exit", "exit_layer": 2}


class Follows:
    """Reads features, drafts token 5, and keeps which positions it was shown."""

    name, max_drafted, feature_layers = "follows", 2, (TARGET.num_layers,)

    def __init__(self):
        self.shown = []

    def start(self, rows):
        rows.draft_state = None

    def prefill(self, rows, seen):
        assert seen.features_BTF is not None
        count = int(seen.last_B[0]) + 1
        self.shown += seen.positions_BT[0, :count].tolist()

    def refresh(self, rows, seen):
        raise AssertionError("a hybrid shows what was committed as if it were prompt")

    def propose(self, rows, drafting):
        for _ in drafting:
            logits = torch.zeros(rows.num_rows, TARGET.vocab_size)
            logits[:, 5] = 9.0
            drafting.draw(logits)
        return drafting.draft()


def hybrid(**options):
    return build_drafter({"kind": "hybrid", "learned": EXIT, **options}, TARGET)


REPEATS = [7, 8, 9, 10] * 6


@pytest.mark.parametrize("max_batch_rows", [1, 3])
@pytest.mark.parametrize("acceptance", ["greedy", "rejection", "coupled"])
def test_both_sources_are_used_recorded_and_exact(acceptance, max_batch_rows):
    prompts = [REPEATS, prompt_ids(9), prompt_ids(70, seed=3), REPEATS[:-1]]
    options = dict(max_new_tokens=40, ignore_eos=True)
    if acceptance != "greedy":
        options |= dict(sampling=Sampling(temperature=0.8), acceptance=acceptance, seed=3)
    outputs = decode(TARGET, hybrid(min_match=1), prompts, lookahead=5, max_batch_rows=max_batch_rows, **options)
    sources = {record.source for output in outputs for record in output.rounds}
    assert sources == {LEARNED, COPIED}
    if acceptance != "rejection":
        expected = decode(TARGET, None, prompts, **options)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_copy_may_be_longer_than_what_the_learned_draft_makes():
    outputs = decode(
        TARGET, hybrid(min_match=2, learned_drafted=1), [REPEATS, prompt_ids(9)], lookahead=6, max_new_tokens=30
    )
    drafted = {source: set() for source in (LEARNED, COPIED)}
    for output in outputs:
        for record in output.rounds:
            drafted[record.source].add(record.num_drafted)
    assert drafted[LEARNED] == {1} and max(drafted[COPIED]) > 1


def test_the_learned_draft_is_shown_every_committed_token_once():
    learned = Follows()
    prompt = REPEATS
    (output,) = decode(TARGET, Hybrid(TARGET, learned, min_match=1), [prompt], lookahead=4, max_new_tokens=30)
    assert {record.source for record in output.rounds} == {LEARNED, COPIED}
    num_run = len(prompt) + sum(record.num_accepted + 1 for record in output.rounds) - 1
    assert learned.shown == list(range(num_run))


@torch.inference_mode()
def test_rows_that_differ_take_their_own_draft():
    drafter = hybrid(min_match=2)
    rows = Rows(TARGET, 2, 100)
    drafter.start(rows)
    for row, ids in enumerate([REPEATS, prompt_ids(9)]):
        rows.place(row, ids, 20, row)
    from selfspec.decoding.sampler import Sampler
    from selfspec.sampling import build_rule, build_transforms

    sampling = Sampling(temperature=1.0)
    sampler = Sampler(build_transforms(sampling, None, TARGET.vocab_size), build_rule("auto", sampling))
    draft = drafter.propose(rows, Drafting(rows, Plan(3), sampler, may_look=True))
    assert draft.source_B.tolist() == [COPIED, LEARNED]
    assert draft.tokens_BK[0].tolist() == [7, 8, 9] == rows.window(1, 3)[0].tolist()
    assert draft.tokens_BK[1].tolist() == rows.window(1, 3)[1].tolist()
    q_x = draft.q_BKV.gather(-1, draft.tokens_BK[..., None])[..., 0]
    assert q_x[0].tolist() == [1, 1, 1] and (q_x[1] < 1).all()
    torch.testing.assert_close(draft.q_BKV.sum(-1), torch.ones(2, 3))
    assert draft.first_layer == 0 and draft.hidden_BTM is None


def test_drafts_that_could_not_catch_up_are_refused():
    model = wrap_target(tiny_llama(seed=5, num_layers=2))
    with pytest.raises(UserError, match="cannot be made with 'independent': it keeps a state of its own"):
        Hybrid(TARGET, build_drafter("independent", TARGET, model=model))
    with pytest.raises(UserError, match="cannot be made with 'clasp'"):
        Hybrid(TARGET, build_drafter("clasp", TARGET, num_skipped=1))
    with pytest.raises(UserError, match="needs `learned`"):
        build_drafter({"kind": "hybrid"}, TARGET)
    with pytest.raises(UserError, match="learned_drafted=0 is not possible"):
        hybrid(learned_drafted=0)
    with pytest.raises(UserError, match="1 <= min_match <= max_match"):
        hybrid(min_match=5, max_match=2)
