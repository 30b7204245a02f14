"""Logits to distribution, position-keyed noise, acceptance rules, and the exact reference they are checked against.

    transforms = build_transforms(sampling, processors, vocab_size)
    rule = build_rule("auto", sampling)
    token_B, q_BV = rule.draw(transforms(draft_logits, prefix)[:, 0], NoiseKey(seed, request_B, position_B, step=i))
    verdict = rule.accept(drafted_BK, q_BKV, num_drafted_B, transforms(target_logits, prefix), NoiseKey(...))

Nothing here reads the host; `raise_for` turns a verdict's error code into a message once the decoder has read it.
"""

from __future__ import annotations

from selfspec.sampling.acceptance import Rule, Verdict, build_rule
from selfspec.sampling.faults import raise_for
from selfspec.sampling.noise import NoiseKey, gumbel, uniforms
from selfspec.sampling.transforms import Prefix, Sampling, Transforms, build_transforms

__all__ = [
    "NoiseKey",
    "Prefix",
    "Rule",
    "Sampling",
    "Transforms",
    "Verdict",
    "build_rule",
    "build_transforms",
    "gumbel",
    "raise_for",
    "uniforms",
]
