"""selfspec: a Hugging Face causal LM as its own draft model, token-exactly, and what that buys, honestly measured.

import selfspec
target = selfspec.load_target("smollm2-135m")
drafter = selfspec.build_drafter("early_exit", target, exit_layer=26)
outputs = selfspec.decode(target, drafter, ["Gravity is"], max_new_tokens=32, lookahead=3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.decoding import Decoder, Output, RoundEvent, decode
    from selfspec.drafters import build_drafter, load_drafter
    from selfspec.errors import UserError
    from selfspec.hf import hf_generate
    from selfspec.sampling import Sampling
    from selfspec.target import Target, load_target, wrap_target

__all__ = [
    "Decoder",
    "Output",
    "RoundEvent",
    "Sampling",
    "Target",
    "UserError",
    "build_drafter",
    "decode",
    "hf_generate",
    "load_drafter",
    "load_target",
    "wrap_target",
]
__version__ = "0.1.0"

_HOMES = {
    "Decoder": "selfspec.decoding",
    "Output": "selfspec.decoding",
    "RoundEvent": "selfspec.decoding",
    "decode": "selfspec.decoding",
    "build_drafter": "selfspec.drafters",
    "load_drafter": "selfspec.drafters",
    "UserError": "selfspec.errors",
    "hf_generate": "selfspec.hf",
    "Sampling": "selfspec.sampling",
    "Target": "selfspec.target",
    "load_target": "selfspec.target",
    "wrap_target": "selfspec.target",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `selfspec.report` does not pull in torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
