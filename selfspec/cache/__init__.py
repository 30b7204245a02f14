"""The one KV cache: a single allocation, written by draft and verify alike, rolled back by writing one length."""

from selfspec.cache.contiguous import KVCache, LayerShape, Pass, kv_bytes_per_slot

__all__ = ["KVCache", "LayerShape", "Pass", "kv_bytes_per_slot"]
