"""What the shared cache is for: with an early exit, no layer below E ever processes a token twice, prompt included."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from selfspec import build_drafter, decode, wrap_target
from tiny_models import prompt_ids, tiny_llama

PROMPT, NEW, EXIT = prompt_ids(70), 30, 2


class LayerWork:
    """Counts, per layer, how often each (position, token) pair was run."""

    def __init__(self, target):
        self.seen = [Counter() for _ in range(target.num_layers)]
        run_layers, embed, self.token_of = target.run_layers, target.embed, {}

        def counting_embed(token_ids_BT):
            hidden = embed(token_ids_BT)
            for token, vector in zip(
                token_ids_BT.reshape(-1).tolist(), hidden.reshape(-1, hidden.shape[-1]), strict=True
            ):
                self.token_of[vector.numpy().tobytes()] = token
            return hidden

        def counting_run_layers(hidden_BTM, first, last, pass_):
            live = (pass_.slots_N % pass_.cache.num_slots) != pass_.cache.num_slots - 1  # not padding
            for position in pass_.positions_BT.reshape(-1)[live].tolist():
                for layer in range(first, last):
                    self.seen[layer][position] += 1
            return run_layers(hidden_BTM, first, last, pass_)

        target.run_layers, target.embed = counting_run_layers, counting_embed


@pytest.mark.parametrize("num_drafted", [1, 3, 5])
def test_layers_below_the_exit_run_each_token_once_and_layers_above_only_in_verification(num_drafted):
    target = wrap_target(tiny_llama())
    drafter = build_drafter("early_exit", target, exit_layer=EXIT)
    work = LayerWork(target)
    output = decode(target, drafter, [PROMPT], max_new_tokens=NEW, lookahead=num_drafted, ignore_eos=True)[0]
    num_rounds = len(output.rounds)
    prompt_slots = range(len(PROMPT) - 1)
    for layer in range(target.num_layers):
        assert all(work.seen[layer][position] == 1 for position in prompt_slots), (
            "the prompt is processed once per layer"
        )
        # every round runs the pending token and K drafts, once per layer: below E while drafting, above in verification
        assert work.seen[layer].total() == len(PROMPT) - 1 + num_rounds * (num_drafted + 1)


def test_each_token_that_stays_is_run_exactly_once_per_layer_when_every_draft_is_accepted():
    """A target whose layers from E on change nothing drafts perfectly: then no position is ever visited twice."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers[EXIT:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = wrap_target(model)
    drafter = build_drafter("early_exit", target, exit_layer=EXIT)
    work = LayerWork(target)
    output = decode(target, drafter, [PROMPT], max_new_tokens=NEW, lookahead=4, ignore_eos=True)[0]
    assert all(record.num_accepted == 4 for record in output.rounds)
    for layer in range(target.num_layers):
        assert set(work.seen[layer].values()) == {1}


def test_the_counter_notices_a_draft_that_does_not_share():
    """Negative control: a draft that throws its hidden states away makes verification run [0, E) again."""
    target = wrap_target(tiny_llama())
    drafter = build_drafter("early_exit", target, exit_layer=EXIT)
    propose = drafter.propose

    def forgetful(rows, drafting):
        draft = propose(rows, drafting)
        draft.hidden_BTM, draft.first_layer = None, 0
        return draft

    drafter.propose = forgetful
    work = LayerWork(target)
    output = decode(target, drafter, [PROMPT], max_new_tokens=NEW, lookahead=3, ignore_eos=True)[0]
    assert work.seen[0].total() > len(PROMPT) - 1 + len(output.rounds) * 4
