"""A decoder in thirty lines, for tests of sampling alone: table models, every row its own request, no cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from selfspec.sampling import NoiseKey, Prefix, Rule, Sampling, Transforms, raise_for

Model = Callable[[Tensor, Tensor], Tensor]  # tokens [B, S], index of the last token [B] -> logits [B, V]


def table_model(vocab_size: int, seed: int, scale: float = 1.5) -> Model:
    """Logits that depend on the last two tokens."""
    generator = torch.Generator().manual_seed(seed)
    last_VV, before_VV = (torch.randn(vocab_size, vocab_size, generator=generator) * scale for _ in range(2))

    def model(tokens_BS: Tensor, index_B: Tensor) -> Tensor:
        last_B = tokens_BS.gather(1, index_B[:, None])[:, 0]
        before_B = tokens_BS.gather(1, (index_B[:, None] - 1).clamp_min(0))[:, 0]
        return last_VV[last_B] + before_VV[before_B]

    return model


def toy_decode(
    target: Model,
    draft: Model | None,
    transforms: Transforms,
    rule: Rule,
    *,
    prompt: list[int],
    num_drafts: int,
    max_new_tokens: int,
    requests: Tensor,
    seed: int = 0,
    certain_drafts: bool = False,
    num_drafted_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """New tokens [B, max_new_tokens] of one row per request. `num_drafted_of(lengths [B])` varies K."""
    B, P = requests.shape[0], len(prompt)
    K = num_drafts if draft is not None else 0
    idle = P + max_new_tokens + K + 1  # where finished rows scribble
    tokens_BS = torch.zeros(B, idle + K + 1, dtype=torch.int64)
    tokens_BS[:, :P] = torch.tensor(prompt)
    lengths_B = torch.full((B,), P)
    prompt_lens_B = torch.full((B,), P)
    while int(lengths_B.min()) < P + max_new_tokens:
        running_B = lengths_B < P + max_new_tokens
        start_B = torch.where(running_B, lengths_B, idle)
        drafted, qs = [], []
        for k in range(K):
            logits_BV = draft(tokens_BS, start_B + k - 1)
            prefix = Prefix(tokens_BS, (start_B + k)[:, None], prompt_lens_B)
            token_B, q_BV = rule.draw(
                transforms(logits_BV[:, None], prefix)[:, 0], NoiseKey(seed, requests, start_B, step=k)
            )
            if certain_drafts:
                token_B, q_BV = logits_BV.argmax(-1), None
            drafted.append(token_B)
            qs.append(q_BV)
            tokens_BS = tokens_BS.scatter(1, (start_B + k)[:, None], token_B[:, None])
        offsets = torch.arange(K + 1)
        logits_BTV = torch.stack([target(tokens_BS, start_B + t - 1) for t in range(K + 1)], dim=1)
        logits_BTV = transforms(logits_BTV, Prefix(tokens_BS, start_B[:, None] + offsets, prompt_lens_B))
        drafted_BK = torch.stack(drafted, dim=1) if K else tokens_BS[:, :0]
        num_drafted_B = torch.full((B,), K) if num_drafted_of is None else num_drafted_of(start_B).clamp(max=K)
        q_BKV = torch.stack(qs, dim=1) if K and qs[0] is not None else None
        verdict = rule.accept(drafted_BK, q_BKV, num_drafted_B, logits_BTV, NoiseKey(seed, requests, start_B))
        for row in verdict.error_B.nonzero()[:, 0].tolist():
            raise_for(int(verdict.error_B[row]), row=row, position=int(start_B[row]))
        end_B = start_B + verdict.num_accepted_B
        tokens_BS = tokens_BS.scatter(1, end_B[:, None], verdict.next_token_B[:, None])
        lengths_B = torch.where(running_B, end_B + 1, lengths_B)
    return tokens_BS[:, P : P + max_new_tokens]


def exact_probabilities(
    target: Model, transforms: Transforms, prompt: list[int], vocab_size: int, num_tokens: int
) -> Tensor:
    """float64 [V ** num_tokens]: the probability of every continuation under autoregressive sampling."""
    outputs = torch.tensor(list(itertools.product(range(vocab_size), repeat=num_tokens)))
    N, P = len(outputs), len(prompt)
    tokens = torch.cat([torch.tensor(prompt).expand(N, P), outputs], dim=1)
    total = torch.ones(N, dtype=torch.float64)
    for t in range(num_tokens):
        ends = torch.full((N, 1), P + t)
        logits = target(tokens, torch.full((N,), P + t - 1))[:, None].double()
        p = transforms(logits, Prefix(tokens, ends, torch.full((N,), P)))[:, 0].softmax(-1)
        total *= torch.nan_to_num(p).gather(1, outputs[:, t : t + 1])[:, 0]
    return total


def outcome_index(new_tokens: Tensor, vocab_size: int) -> Tensor:
    powers = vocab_size ** torch.arange(new_tokens.shape[1] - 1, -1, -1)
    return (new_tokens * powers).sum(1)


V = 5
ALPHA = 1e-6  # false-alarm rate of each statistical test of whole outputs
TRANSFORMS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=1.2, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.15),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4, no_repeat_ngram_size=2
    ),
    "bias": Sampling(temperature=1.0, logit_bias={1: 1.0}, suppress_tokens=(3,)),
}


def chi2_pvalue(tokens: Tensor, expected: Tensor) -> float:
    """Goodness of fit of outcomes to exact probabilities; rare outcomes (expected below 5) are pooled."""
    counts = torch.bincount(outcome_index(tokens, V), minlength=len(expected)).double()
    expected = expected * len(tokens)
    assert counts[expected == 0].sum() == 0, "an impossible output came out"
    rare = expected < 5
    f_obs = torch.cat([counts[~rare], counts[rare].sum()[None]])
    f_exp = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = f_exp > 0
    return float(stats.chisquare(f_obs[keep].numpy(), f_exp[keep].numpy(), sum_check=False).pvalue)
