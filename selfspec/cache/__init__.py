"""The one KV cache: a single allocation, written by draft and verify alike, rolled back by writing one length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfspec.cache.storage import Contiguous, LayerShape, Paged, Storage, kv_bytes_per_slot, storage_for

if TYPE_CHECKING:
    from selfspec.cache.contiguous import KVCache, Pass
    from selfspec.cache.interface import Cache
    from selfspec.cache.paged import PagedKVCache, make_cache

__all__ = [
    "Cache",
    "Contiguous",
    "KVCache",
    "LayerShape",
    "Paged",
    "PagedKVCache",
    "Pass",
    "Storage",
    "kv_bytes_per_slot",
    "make_cache",
    "storage_for",
]

_WITH_TORCH = {
    "Cache": "selfspec.cache.interface",
    "KVCache": "selfspec.cache.contiguous",
    "PagedKVCache": "selfspec.cache.paged",
    "Pass": "selfspec.cache.contiguous",
    "make_cache": "selfspec.cache.paged",
}


def __getattr__(name: str) -> Any:
    """What holds tensors is imported when first used: the arithmetic needs no torch."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'selfspec.cache' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WITH_TORCH[name]), name)
