"""The caller's model is left as it was: after calls, after exceptions, while other threads use it, and in memory."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref

import pytest
import torch
from hf_calls import PROMPT, VOCAB, ParityOfPrefix, drafters, left_padded, model, ours, plain

import selfspec
from selfspec import UserError, build_drafter, wrap_target
from selfspec import hf as hf_module
from tiny_models import prompt_ids, tiny_llama


def state_of(subject):
    """Everything of a model that a call could change: weights, buffers, configs, and what hangs on its modules."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**subject.state_dict(), **dict(subject.named_buffers())}.items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    modules = [
        (
            name,
            id(child),
            child.training,
            sorted(child.__dict__),
            len(child._forward_hooks),
            len(child._forward_pre_hooks),
        )
        for name, child in subject.named_modules()
    ]
    config = (subject.config.to_dict(), subject.config._attn_implementation, subject.generation_config.to_dict())
    return digest.hexdigest(), modules, config


class Breaks:
    """Fails at its second use, as a processor, a criterion, a streamer or a drafter."""

    name, max_drafted = "breaks", None

    def __init__(self):
        self.uses = 0

    def __call__(self, input_ids, scores):
        self.uses += 1
        if self.uses > 1:
            raise KeyError("broken on purpose")
        return scores if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self(value, value)

    def start(self, rows):
        pass

    def prefill(self, rows, seen):
        pass

    def propose(self, rows, drafting):
        self(rows, rows)
        return drafters()["always_right"].propose(rows, drafting)


def test_the_model_is_unmodified_after_calls_and_after_exceptions():
    before = state_of(model())
    expected = ours()
    ours(do_sample=True, seed=1, **left_padded())
    assert state_of(model()) == before
    for broken in (
        lambda: dict(logits_processor=[Breaks()]),
        lambda: dict(stopping_criteria=[Breaks()]),
        lambda: dict(streamer=Breaks()),
        lambda: dict(drafter=Breaks()),
    ):
        with pytest.raises((KeyError, AssertionError)):
            ours(**broken())
        assert state_of(model()) == before
        assert torch.equal(ours(), expected) and torch.equal(plain(), expected)


def test_the_model_is_wrapped_once_and_again_when_it_changed():
    subject = tiny_llama(vocab_size=VOCAB, seed=3)
    options = dict(max_new_tokens=12, eos_token_id=None)

    def check(prompt=PROMPT):
        result = subject.generate(prompt, custom_generate=selfspec.hf_generate, drafter="ngram", **options)
        assert torch.equal(result, subject.generate(prompt, **options))
        return hf_module._WRAPPED[subject].target, result

    first, tokens = check()
    assert check()[0] is first
    with torch.no_grad():
        subject.model.layers[1].mlp.up_proj.weight.mul_(-1)  # in place: the same target sees it
    same, changed = check()
    assert same is first and not torch.equal(changed, tokens)
    subject.to(torch.float64)
    assert check()[0].dtype == torch.float64
    subject.to(torch.float32).resize_token_embeddings(VOCAB + 3)
    assert check()[0].vocab_size == VOCAB + 3
    subject.lm_head = torch.nn.Linear(32, VOCAB + 3, bias=False)
    second = check()[0]
    subject.model.layers[0], subject.model.layers[1] = subject.model.layers[1], subject.model.layers[0]
    for index, layer in enumerate(subject.model.layers):
        layer.self_attn.layer_idx = index
    assert check()[0] is not second


def test_a_model_nobody_else_holds_is_freed():
    subject = tiny_llama(vocab_size=VOCAB, seed=4)
    subject.generate(PROMPT, custom_generate=selfspec.hf_generate, drafter="ngram", max_new_tokens=3)
    alive = weakref.ref(subject)
    del subject
    gc.collect()
    assert alive() is None


def test_a_drafter_built_before_a_conversion_is_refused():
    subject = tiny_llama(vocab_size=VOCAB, seed=4)
    drafter = build_drafter("early_exit", wrap_target(subject), exit_layer=1)
    subject.to(torch.float64)
    with pytest.raises(UserError, match="before the model was converted"):
        subject.generate(PROMPT, custom_generate=selfspec.hf_generate, drafter=drafter)


def test_threads_on_one_model_do_not_disturb_each_other():
    """Plain generate, greedy and sampled hf_generate with one shared drafter, and a failing call, all at once."""
    shared = drafters()["first_layer"]
    prompts = [torch.tensor([prompt_ids(length, seed=length, vocab_size=VOCAB)]) for length in (3, 70, 9)]
    jobs = {
        "plain": lambda: [plain(ids).tolist() for ids in prompts],
        "greedy": lambda: [ours(ids, drafter=shared).tolist() for ids in prompts],
        "sampled": lambda: [ours(ids, drafter=shared, do_sample=True, seed=4).tolist() for ids in prompts],
        "batched": lambda: ours(**left_padded(), drafter=shared, logits_processor=[ParityOfPrefix()]).tolist(),
    }
    expected = {name: job() for name, job in jobs.items()}
    assert expected["plain"] == expected["greedy"]
    before = state_of(model())
    barrier, wrong = threading.Barrier(len(jobs) + 1), []

    def repeat(name, job):
        barrier.wait()
        for _ in range(6):
            try:
                if job() != expected[name]:
                    wrong.append(name)
            except Exception as error:
                wrong.append((name, error))

    def fail():
        barrier.wait()
        for _ in range(12):
            with pytest.raises(KeyError):
                ours(logits_processor=[Breaks()])

    threads = [threading.Thread(target=repeat, args=item) for item in jobs.items()] + [threading.Thread(target=fail)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert state_of(model()) == before
