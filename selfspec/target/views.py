"""A private view of a loaded model: the same parameters, its own configuration object.

selfspec needs its own attention function inside transformers' layers, but the caller's model must stay exactly as it
was, also for other threads and after exceptions. So the modules are copied shallowly (microseconds, no weights) and
only the copies see a configuration that names another attention.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def module_view(module: nn.Module, attention: str, _configs: dict[int, Any] | None = None) -> nn.Module:
    """A module tree that shares every parameter and buffer of `module` but dispatches to `attention`."""
    configs = {} if _configs is None else _configs
    view = copy.copy(module)
    view._modules = {
        name: None if child is None else module_view(child, attention, configs)
        for name, child in module._modules.items()
    }
    config = view.__dict__.get("config")
    if config is not None and hasattr(config, "_attn_implementation"):
        if id(config) not in configs:
            ours = copy.copy(config)
            ours._attn_implementation_internal = attention
            configs[id(config)] = ours
        view.config = configs[id(config)]
    return view
