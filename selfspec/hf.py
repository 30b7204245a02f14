"""The bridge into transformers: `model.generate(..., custom_generate=selfspec.hf_generate, drafter=...)`.

`generate` prepares everything (config, processors, criteria, mask) and calls `hf_generate` in place of its own loop.
The two lists it prepared, `logits_processor` and `stopping_criteria`, are authoritative: whatever the config asks for
is in them, in HF's order, so nothing is applied twice or dropped. Only a tail of plain warpers (temperature, top-k,
top-p, min-p) moves into `Sampling`, which does the same without a host read; `selfspec.decoding.lockstep` shows the
rest what HF's loop would show them. What cannot be honoured raises a UserError that names it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.decoding.lockstep import PaddedProcessors, RecordingSampler, Replay
from selfspec.decoding.loop import run_requests
from selfspec.decoding.reach import capacity_for, drafts_trees, lookahead_for
from selfspec.decoding.requests import Request, check_length, encode_prompt
from selfspec.decoding.rows import Rows
from selfspec.drafters import Drafter, NoDraft, build_drafter
from selfspec.errors import UserError
from selfspec.lookahead import Lookahead
from selfspec.sampling import Sampling, build_rule
from selfspec.target import Target, wrap_target

# What of a generation config cannot be honoured, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_beam_groups": (None, 1), "diversity_penalty": (None, 0.0), "constraints": (None,),
    "force_words_ids": (None,), "penalty_alpha": (None, 0.0), "dola_layers": (None,), "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,), "assistant_early_exit": (None,), "is_assistant": (None, False),
    "guidance_scale": (None, 1), "watermarking_config": (None,), "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False), "output_hidden_states": (None, False),
}  # fmt: skip
CACHE_NAMES = ("cache", "past_key_values")  # what transformers 5.24 calls it, and what it was called before
READ_INPUTS = ("attention_mask", "position_ids", "logits_to_keep", "use_cache", *CACHE_NAMES)
WARPERS: dict[type, str] = {  # HF's, in HF's order; what `Sampling` calls them
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def hf_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | str | Mapping[str, Any] | None = None,
    lookahead: int | str | dict[str, Any] | Lookahead = 4,
    acceptance: str = "auto",
    seed: int | None = None,
    streamer: Any | None = None,
    tokenizer: Any | None = None,
    stop_strings: str | list[str] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns, decoded speculatively. Given to `generate` as `custom_generate`.

    drafter: a built one, a conf/drafter name, a mapping with `kind`, or None (autoregressive). lookahead, acceptance:
    as in `selfspec.decode`. seed: None draws one from torch's global generator. Greedy tokens are `generate`'s own,
    sampled ones follow the same distribution. With return_dict_in_generate the cache is returned as `generate` would
    (its padding slots hold anything). Raises UserError, naming it, for whatever cannot be honoured.
    """
    taken = _taken_by_generate()
    if not len(input_ids):
        raise UserError("input_ids has no rows: there is no prompt to go on from. Give at least one.")
    _refuse(generation_config, model_kwargs, taken, num_rows=len(input_ids))
    pads = _left_padding(input_ids, model_kwargs)
    criteria = StoppingCriteriaList(stopping_criteria)
    if stop_strings is not None and not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(_stop_string_criterion(stop_strings, tokenizer or taken.get("tokenizer")))
    sampling, processors = _split(logits_processor, bool(generation_config.do_sample))
    rule = build_rule(acceptance, sampling)
    if rule.lossy:
        warnings.warn(
            f"acceptance={acceptance!r} is lossy: tokens do not follow the model's distribution.", stacklevel=2
        )

    target, chosen = _target_and_drafter(model, drafter)
    policy = lookahead_for(target, chosen, lookahead)
    if drafts_trees(policy):
        raise UserError("Inside `generate` drafts are chains. Use selfspec.decode for trees, or another lookahead.")
    requests = _requests(target, input_ids, pads, generation_config, criteria)
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise UserError(f"seed={seed!r} is not possible: allowed is a whole number, or None.")
    if seed is None:
        seed = 0 if sampling.greedy else int(torch.randint(2**62, ()))
    padding = [input_ids[row, :pad] for row, pad in enumerate(pads)]
    as_dict = bool(generation_config.return_dict_in_generate)
    sampler = RecordingSampler(
        PaddedProcessors(processors, sampling, padding),
        rule,
        seed,
        keep_logits=as_dict and bool(generation_config.output_logits),
        keep_scores=as_dict and bool(generation_config.output_scores),
    )

    if streamer is None:
        streamer = taken.get("streamer")  # it has the prompt already
    elif streamer is not taken.get("streamer"):
        streamer.put(input_ids.cpu())
    replay = Replay(input_ids, criteria, _pad_token(criteria, generation_config), streamer, sampler)
    rows = Rows(target, len(requests), capacity_for(chosen, policy, requests))  # row b is request b to the end
    rows.set_eos([i for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.flatten().tolist()])
    chosen.start(rows)
    # eager: while one thread captures a CUDA graph, another one's plain `generate` may fail
    run_requests(chosen, rows, policy, sampler, replay, requests, mode="eager")
    if streamer is not None:
        streamer.end()
    if not as_dict:
        return replay.sequences
    fields = _filled_cache(model_kwargs, rows, pads, replay.sequences.shape[1] - 1)
    fields["scores"] = replay.recorded(sampler.scores) if sampler.keep_scores else None
    fields["logits"] = replay.recorded(sampler.logits) if sampler.keep_logits else None
    return GenerateDecoderOnlyOutput(sequences=replay.sequences, **fields)  # type: ignore[arg-type]


def _taken_by_generate() -> dict[str, Any]:
    """What `generate` takes from its caller and does not hand on to a callable (transformers 5.17 to 5.24): streamer,
    assistant_model, synced_gpus, tokenizer. Found in its frame, as nothing else holds them; {} outside `generate`.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    if not callable(frame.f_locals.get("custom_generate")):  # called from within a plain generate, not by it
        return {}
    taken = {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
    outer = frame.f_back.f_locals if frame.f_back is not None else {}
    return {**taken, "tokenizer": dict(outer.get("kwargs") or {}).get("tokenizer")}  # torch.no_grad's wrapper has it


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any], taken: Mapping[str, Any], num_rows: int) -> None:
    """UserError naming the first thing that was asked for and cannot be honoured."""
    asked = {name: getattr(config, name, None) for name, nothing in REFUSED.items()}
    asked = {name: value for name, value in asked.items() if value not in REFUSED[name]}
    asked |= {name: taken[name] for name in ("assistant_model", "synced_gpus") if taken.get(name) not in (None, False)}
    for name, value in model_kwargs.items():
        of_the_caller = name not in READ_INPUTS and value is not None and value is not False
        if name in CACHE_NAMES and value is not None:  # `generate` makes an empty one
            of_the_caller = getattr(value, "_is_user_defined", False) or value.get_seq_length() > 0
        if of_the_caller:
            asked[name] = value
    if config.return_dict_in_generate and num_rows > 1:  # HF's hold what the model says after a row has ended
        asked |= {name: True for name in ("output_scores", "output_logits") if getattr(config, name)}
    for name, value in asked.items():
        given = value if isinstance(value, str | bool | int | float) else type(value).__name__
        limit = " for more than one sequence" if name in ("output_scores", "output_logits") else ""
        raise UserError(
            f"{name}={given} cannot be honoured by selfspec's hf_generate{limit}. Leave it out, or call generate "
            "without custom_generate."
        )


def _left_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """How many ids in front of each row are padding. UserError for any mask or positions but those of left padding."""
    mask_BT = model_kwargs.get("attention_mask")
    if mask_BT is None:
        mask_BT = torch.ones_like(input_ids)
    if mask_BT.shape != input_ids.shape:
        raise UserError(f"attention_mask has shape {tuple(mask_BT.shape)}; allowed is {tuple(input_ids.shape)}.")
    pads_B1 = (mask_BT == 0).sum(1, keepdim=True)
    places_T = torch.arange(input_ids.shape[1], device=mask_BT.device)
    ends_in_padding = bool((mask_BT[:, -1:] == 0).any())
    if ends_in_padding or not torch.equal(mask_BT.long(), (places_T >= pads_B1).long()):
        kind = "right padding" if ends_in_padding else "holes or values other than 0 and 1"
        raise UserError(
            f"attention_mask has {kind}; allowed is left padding: zeros in front of a row, then ones. Set tokenizer."
            "padding_side='left'. (Where no mask is given, generate makes one from pad_token_id in the prompt.)"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and bool(((positions != places_T - pads_B1) & (mask_BT != 0)).any()):
        raise UserError("position_ids other than 0, 1, 2, ... from a row's first token on cannot be honoured.")
    return [int(pad) for pad in pads_B1[:, 0].tolist()]


def _stop_string_criterion(stop_strings: str | list[str], tokenizer: Any | None) -> StopStringCriteria:
    if tokenizer is None:
        raise UserError("stop_strings need tokenizer=...: pass it to generate beside stop_strings.")
    if not stop_strings or not all([stop_strings] if isinstance(stop_strings, str) else stop_strings):
        raise UserError(f"stop_strings={stop_strings!r}: allowed are non-empty texts.")
    return StopStringCriteria(tokenizer, stop_strings)


def _split(prepared: Sequence[Any], do_sample: bool) -> tuple[Sampling, list[Any]]:
    """The longest tail of warpers that `Sampling` can do, in its order; and the processors before it."""
    if not do_sample:
        return Sampling(), list(prepared)
    settings: dict[str, Any] = {"temperature": 1.0}
    order, rest = list(WARPERS), list(prepared)
    while rest and type(rest[-1]) in order:
        warper = rest[-1]
        plain = (
            getattr(warper, "filter_value", -torch.inf) == -torch.inf and getattr(warper, "min_tokens_to_keep", 1) == 1
        )
        if not plain:
            break
        settings[WARPERS[type(warper)]] = getattr(warper, WARPERS[type(warper)])
        order = order[: order.index(type(warper))]
        rest.pop()
    return Sampling(**settings), rest


def _pad_token(criteria: StoppingCriteriaList, config: GenerationConfig) -> int | None:
    """What finished rows are filled with; None, as in HF, if no criterion knows an EOS."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return None
    if config._pad_token_tensor is None:
        raise UserError("Rows that end at an EOS are filled with pad_token_id, which is not set: pass pad_token_id.")
    return int(config._pad_token_tensor)


def _requests(
    target: Target, input_ids: Tensor, pads: Sequence[int], config: GenerationConfig, criteria: StoppingCriteriaList
) -> list[Request]:
    max_lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    max_new_tokens = max(min(max_lengths, default=config.max_length) - input_ids.shape[1], 1)
    prompts = [encode_prompt(target, ids[pad:]) for ids, pad in zip(input_ids.tolist(), pads, strict=True)]
    for prompt_ids in prompts:
        check_length(target, len(prompt_ids), max_new_tokens)
    return [Request(row, prompt_ids, max_new_tokens, noise_id=row) for row, prompt_ids in enumerate(prompts)]


def _filled_cache(model_kwargs: Mapping[str, Any], rows: Rows, pads: Sequence[int], width: int) -> dict[str, Any]:
    """The cache that `generate` made, holding the first `width` slots of the padded rows; {} if it made none."""
    name = next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
    if name is None:
        return {}
    pads_B1 = torch.tensor(pads, device=rows.device)[:, None]
    slots_BT = (torch.arange(width, device=rows.device) - pads_B1).clamp(min=0)
    rows_B1 = torch.arange(rows.num_rows, device=rows.device)[:, None]
    for layer in range(rows.target.num_layers):
        visible = rows.cache.visible(layer, slice(None), rows.cache.num_slots)  # keys, values: [B, G, S, D]
        model_kwargs[name].update(*(buffer[rows_B1, :, slots_BT].transpose(1, 2) for buffer in visible), layer)
    return {name: model_kwargs[name]}


@dataclass
class _Wrapped:
    """What is kept per model, as long as the model lives: its target, and the drafters asked for by name."""

    state: tuple[Any, ...]
    target: Target
    drafters: dict[str, Drafter] = field(default_factory=dict)


_WRAPPED: WeakKeyDictionary[Any, _Wrapped] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _target_and_drafter(model: Any, drafter: Any) -> tuple[Target, Drafter]:
    """The model as a target, wrapped anew only if its modules, config, dtype or device changed; and the drafter."""
    layout = {(parameter.dtype, parameter.device) for parameter in model.parameters()}
    state = (list(model.modules())[1:], model.config.to_dict(), layout)
    with _LOCK:
        wrapped = _WRAPPED.get(model)
        if wrapped is None or wrapped.state != state:
            target, itself = wrap_target(model), proxy(model)
            target.release_model(lambda: itself)  # or the entry would keep the model alive
            wrapped = _WRAPPED[model] = _Wrapped(state, target)
        if isinstance(drafter, str):
            if drafter not in wrapped.drafters:
                wrapped.drafters[drafter] = build_drafter(drafter, wrapped.target)
            return wrapped.target, wrapped.drafters[drafter]
    if drafter is None or isinstance(drafter, Mapping):
        return wrapped.target, NoDraft() if drafter is None else build_drafter(drafter, wrapped.target)
    if not hasattr(drafter, "propose"):
        raise UserError(
            f"drafter is a {type(drafter).__name__}; allowed are a built drafter, a conf/drafter name, a mapping with "
            "'kind', and None. A draft model is {'kind': 'independent', 'model': selfspec.wrap_target(model)}."
        )
    own = getattr(drafter, "target", None)
    if isinstance(own, Target) and (own.reload is not None or own.hf_model is not model or own.dtype != model.dtype):
        raise UserError(
            f"The drafter {drafter.name!r} was built for another model object, for packed weights, or before the model "
            "was converted. Build it with build_drafter(name, selfspec.wrap_target(model), ...)."
        )
    return wrapped.target, drafter
