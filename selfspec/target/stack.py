"""The target as a stack: embed, layers [a, b), norm, head.

Speculation from a model's own layers needs one thing transformers' `forward` does not offer: run layers [0, E), stop,
and go on later with [E, L) from the kept hidden state. `Target.run_layers(hidden, a, b, pass_)` is that, on
transformers' own layer modules (no model code is copied) and on selfspec's one cache. Running [0, E) then [E, L) is
the full forward, split.

Shape letters: B rows, T positions in this pass, M model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache, LayerShape, Pass
from selfspec.errors import UserError
from selfspec.sampling import Sampling
from selfspec.target.families import family_of, layer_windows
from selfspec.target.hf_baseline import HFOutput, hf_generate
from selfspec.target.views import module_view
from selfspec.target.weights import check_weights, generation_eos_ids, parameter_bytes

# rotary tables that depend on the length of the sequence so far: exact only while the first table is in use
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Target:
    """A Hugging Face causal LM (left untouched) whose layers can be run in part. Made by `wrap_target` or
    `load_target`.
    """

    def __init__(self, model: Any, tokenizer: Any | None = None, name: str = "wrapped") -> None:
        config = model.config.get_text_config()
        family = family_of(config)
        self._model: Any | None = model
        self.reload: Callable[[], Any] | None = None  # loads the plain model again, where its weights were packed away
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        view = module_view(model).eval()
        self._embed: Callable[[Tensor], Tensor] = attrgetter(family.embed)(view)
        self.layers: list[Any] = list(attrgetter(family.layers)(view))
        self._norm: nn.Module = attrgetter(family.norm)(view)
        self._rotary: nn.Module = attrgetter(family.rotary)(view)
        self._head: Any = attrgetter(family.head)(view)
        self.head_module: Any = self._head
        self.vocab_size: int = self.head_weight_VM.shape[0]
        self.dtype: torch.dtype = self.head_weight_VM.dtype
        self.device: torch.device = self.head_weight_VM.device
        self.windows = layer_windows(config, len(self.layers))
        self._cache_argument = _cache_argument(self.layers[0])
        self._rotary_table: tuple[Tensor, Tensor] | None = None
        self.weight_bytes = parameter_bytes(model)
        self.step_bytes = self.weight_bytes - (0 if self.tied else parameter_bytes(attrgetter(family.embed)(view)))
        self.eos_token_ids = generation_eos_ids(model, config)
        check_weights(model)

    @property
    def hf_model(self) -> Any:
        """The transformers model; loaded again (a second copy of the weights) if packing released it."""
        if self._model is None:
            assert self.reload is not None, "a released model can be loaded again"
            self._model = self.reload()
        return self._model

    def set_layers(self, layers: Sequence[Any], head: Any, weight_bytes: int, step_bytes: int) -> None:
        """Run these callables instead of transformers' layers and head: same arguments, same results.

        weight_bytes: what is held in memory; step_bytes: what one decoding step reads of it.
        """
        assert len(layers) == self.num_layers
        self.layers, self._head = list(layers), head
        self.weight_bytes, self.step_bytes = weight_bytes, step_bytes

    def release_model(self, reload: Callable[[], Any]) -> None:
        """Forget the transformers model: its weights live on in packed layers."""
        self._model, self.reload = None, reload

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def head_weight_VM(self) -> Tensor:
        """The LM head's plain weight (an untied one that was packed away is loaded again)."""
        if self.head_module.weight.numel() == 0:
            return self.hf_model.get_output_embeddings().weight
        return self.head_module.weight

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head_module.weight is getattr(self._embed, "weight", None)

    @cached_property
    def queries_per_group(self) -> int:
        """Query heads per key/value head."""
        return self.config.num_attention_heads // self.layer_shapes[0].num_kv_heads

    @cached_property
    def layer_shapes(self) -> list[LayerShape]:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return [LayerShape(num_kv_heads, head_dim)] * self.num_layers

    @cached_property
    def max_positions(self) -> int:
        """The longest sequence (prompt and output, in tokens) this model is decoded at."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            return rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
        return self.config.max_position_embeddings

    def make_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self.layer_shapes, rows, capacity, self.dtype, self.device)

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """Token ids -> the hidden states that enter layer 0, `[B, T, M]`."""
        return self._embed(token_ids_BT)

    def run_layers(self, hidden_BTM: Tensor, first: int, last: int, pass_: Pass) -> Tensor:
        """Layers [first, last) at the positions of `pass_`, writing their keys and values into its cache."""
        rotary = self._rotary_at(pass_.positions_BT, pass_.cache.num_slots, hidden_BTM)
        for index in range(first, last):
            hidden_BTM = self.layers[index](
                hidden_BTM,
                attention_mask=pass_.mask(self.windows[index], self.queries_per_group, hidden_BTM.dtype),
                position_ids=pass_.positions_BT,
                position_embeddings=rotary,
                **{self._cache_argument: pass_},
            )
        return hidden_BTM

    def head(self, hidden_BTM: Tensor) -> Tensor:
        """Final norm and LM head, `[B, T, V]` in the model's dtype."""
        return self._head(self._norm(hidden_BTM))

    def hf_generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> HFOutput:
        """Plain `generate` of the wrapped model, timed: see `selfspec.target.hf_baseline`."""
        return hf_generate(self, prompt_ids, max_new_tokens, sampling, eos_token_ids, seed)

    def _rotary_at(self, positions_BT: Tensor, num_slots: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each position, indexed from a table made once by the model's own rotary module."""
        table = self._rotary_table
        if table is None or table[0].shape[0] < num_slots or table[0].dtype != hidden.dtype:
            reach = torch.arange(num_slots, device=hidden.device)
            if self.max_positions < num_slots and self.config.rope_parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
                reach = reach.clamp(max=self.max_positions - 1)
            cos_1SD, sin_1SD = self._rotary(hidden, reach[None])
            table = self._rotary_table = (cos_1SD[0], sin_1SD[0])
        return table[0][positions_BT], table[1][positions_BT]


def _cache_argument(layer: nn.Module) -> str:
    """transformers 5.24 renamed the layers' `past_key_values` to `cache`; ask the signature once."""
    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    for name in ("cache", "past_key_values", "layer_past"):
        if name in parameters:
            return name
    raise UserError(
        f"{type(layer).__name__}.forward takes no cache argument; this transformers version is not supported"
    )
