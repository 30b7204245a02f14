"""How good the exits of an adapted target draft for it, and how far it has moved from its base: on held-out text.

α and agreement compare an exit with the last layer of the *same* model, over the whole vocabulary. The text was written
by the base: on text the adapted target would write itself they may differ a little; decoding measures that.

Three distances to the base, of the last layer, from the base's kept distribution on its own text: the perplexity of the
text before and after (of the tokens that are among the base's kept ones, which nearly all are); how often the argmax is
the base's; KL(base || adapted) over the kept tokens and the rest (a lower bound).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.training.batches import Batch
from selfspec.training.evaluate import Validation
from selfspec.training.layerskip_stack import SkipStack
from selfspec.training.losses import CHUNK, coarse_cross_entropy
from selfspec.training.validating import LOOKAHEAD


@torch.inference_mode()
def validate_exits(
    stack: SkipStack,
    batches: Iterable[Batch],
    greedy: set[int],
    exit_layer: int,
    reported: list[int],
    token_ids: Tensor | None,
) -> Validation:
    """Quality of `exit_layer`; `also` holds that of all `reported` exits, and the distances to the base.

    token_ids: what exits can draft, None: all.
    """
    results = {layer: Validation(LOOKAHEAD) for layer in reported}
    sums = {"nll": 0.0, "base_nll": 0.0, "kept": 0.0, "kl": 0.0, "agree": 0.0}
    for batch in batches:
        num = int(batch.weight_N.sum())
        states = [state[:num] for state in stack.run(batch, [*reported, stack.num_layers])]
        measured: dict[int, tuple[list[Tensor], list[Tensor]]] = {layer: ([], []) for layer in reported}
        for part in torch.arange(num, device=batch.flat_N.device).split(CHUNK):
            logits = stack.logits(states[-1][part])
            p_NV, best_N = torch.softmax(logits, -1), logits.argmax(-1)
            for layer, state in zip(reported, states, strict=False):
                exit_logits = stack.logits(state[part], token_ids)
                reachable_NV = p_NV if token_ids is None else p_NV[:, token_ids]
                drafted_N = exit_logits.argmax(-1)
                measured[layer][0].append(torch.minimum(torch.softmax(exit_logits, -1), reachable_NV).sum(-1))
                measured[layer][1].append((drafted_N if token_ids is None else token_ids[drafted_N]) == best_N)
            ids, logp = batch.teacher_ids_NK[part], batch.teacher_logp_NK[part].float()
            written_NK = ids == batch.labels_N[part, None]  # the text's own token, where it is among the kept ones
            kept_N = written_NK.any(-1)
            sums["kept"] += float(kept_N.sum())
            sums["nll"] += float(functional.cross_entropy(logits, batch.labels_N[part], reduction="none")[kept_N].sum())
            sums["base_nll"] -= float(logp[written_NK].sum())
            sums["kl"] += float((coarse_cross_entropy(logits, ids, logp) - coarse_entropy(logp)).sum())
            sums["agree"] += float((best_N == ids[:, 0]).sum())
        documents = batch.document_N[:num].tolist()
        for layer, (alpha, agree) in measured.items():
            _add(results[layer], torch.cat(alpha).tolist(), torch.cat(agree).tolist(), documents, greedy)
    main = results[exit_layer]
    count = max(1, main.count)
    by_exit = {layer: result.summary() for layer, result in results.items()}
    main.also = {
        "base_perplexity": math.exp(sums["base_nll"] / max(1.0, sums["kept"])),
        "perplexity": math.exp(sums["nll"] / max(1.0, sums["kept"])),
        "kl_from_base": sums["kl"] / count,
        "base_top1_agreement": sums["agree"] / count,
        "by_exit": {
            str(layer): {name: found[name] for name in ("alpha", "greedy_agreement", "greedy_tau")}
            for layer, found in by_exit.items()
        },
    }
    return main


def _add(result: Validation, alpha: list[float], agree: list[bool], documents: list[int], greedy: set[int]) -> None:
    result.add_positions(alpha, agree)
    for position in range(1, LOOKAHEAD):  # an exit sees the text alone: the same wherever the round began
        result.add_alpha(position, alpha)
    by_document: dict[int, list[bool]] = {}
    for document, same in zip(documents, agree, strict=True):
        by_document.setdefault(document, []).append(same)
    for document, text in by_document.items():
        if document in greedy:
            result.add_greedy_text(text)


def coarse_entropy(logp_NK: Tensor) -> Tensor:
    """Entropy of the base's kept tokens and the rest as one cell, `[N]`."""
    p_NK = logp_NK.exp()
    rest_N = (1 - p_NK.sum(-1)).clamp(min=0)
    return torch.special.entr(p_NK).sum(-1) + torch.special.entr(rest_N)


def describe(summary: dict[str, Any], base_name: str, exit_layer: int, adapter: bool, d_vocab: int) -> list[str]:
    """What the card says beside the usual: exits, and the distance to the base."""
    form = "This folder is a LoRA adapter" if adapter else "This folder is a whole model"
    load = (
        f'target = selfspec.load_target("{base_name}", adapter="<this folder>")'
        if adapter
        else 'target = selfspec.load_target("<this folder>")'
    )
    rows = [
        f"| {layer} | {found['alpha']:.3f} | {found['greedy_agreement']:.3f} | {found['greedy_tau']:.3f} |"
        for layer, found in summary["by_exit"].items()
    ]
    return [
        "## A target of its own",
        "",
        f"{form}: {base_name} trained on, so that its early layers draft for it. It is another target than "
        f"{base_name}, and **lossless means: exactly what the adapted model would write**, not what its base would.",
        "",
        "```python",
        load,
        'drafter = selfspec.load_drafter("<this folder>", target)',
        "```",
        "",
        "How far the adapted model is from its base, on held-out text written by the base:",
        "",
        "| measure | base | adapted |",
        "|---|---|---|",
        "| perplexity of the text (its tokens among the base's kept ones) "
        f"| {summary['base_perplexity']:.3f} | {summary['perplexity']:.3f} |",
        f"| argmax is the base's | 1 | {summary['base_top1_agreement']:.3f} |",
        f"| KL(base, adapted), nats, over the base's kept tokens (a lower bound) | 0 | {summary['kl_from_base']:.4f} |",
        "",
        f"Exits, predicting among {d_vocab:,} tokens, against the adapted model's own last layer over all of its "
        f"tokens (and so is the α above; the draft exits at {exit_layer}):",
        "",
        "| exit layer | α at T=1 | greedy agreement | greedy τ |",
        "|---|---|---|---|",
        *rows,
    ]
