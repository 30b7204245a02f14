"""The parts of a transformers causal LM, as the stack finds them: by the paths its family names, and what their calls
are like in the transformers version that is installed.
"""

from __future__ import annotations

import copy
import inspect
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from selfspec.errors import UserError


def part(view: nn.Module, path: str) -> Any:
    """The submodule at `path`; UserError for a model that is not a causal LM of its family."""
    try:
        return attrgetter(path)(view)
    except AttributeError as error:
        raise UserError(
            f"{type(view).__name__} has no {path!r}: it is not the causal LM of its model type. Wrap a "
            "...ForCausalLM (or GPT2LMHeadModel), without adapters or wrappers around it."
        ) from error


def own_rotary(rotary: nn.Module) -> nn.Module:
    """A copy, since a length-dependent rotary module rewrites its frequencies as it is used, and as it was made."""
    own: Any = copy.deepcopy(rotary)
    if isinstance(getattr(own, "original_inv_freq", None), Tensor):
        own.inv_freq = own.original_inv_freq.clone()
        own.max_seq_len_cached = getattr(own, "original_max_seq_len", getattr(own, "max_seq_len_cached", None))
    return own


def cache_argument(layer: nn.Module) -> str:
    """transformers 5.24 renamed the layers' `past_key_values` to `cache`; ask the signature once."""
    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    for name in ("cache", "past_key_values", "layer_past"):
        if name in parameters:
            return name
    raise UserError(
        f"{type(layer).__name__}.forward takes no cache argument; this transformers version is not supported"
    )
