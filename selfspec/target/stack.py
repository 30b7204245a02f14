"""The target as a stack: embed, layers [a, b), norm, head.

Speculation from a model's own layers needs one thing transformers' `forward` does not offer: run layers [0, E), stop,
and go on later with [E, L) from the kept hidden state. `Target.run_layers(hidden, a, b, pass_)` is that, on
transformers' own layer modules (no model code is copied) and on selfspec's one cache. Running [0, E) then [E, L) is
the full forward, split.

Shape letters: B rows, T positions in this pass, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from selfspec.cache import KVCache, LayerShape, Pass
from selfspec.errors import UserError
from selfspec.sampling import Sampling
from selfspec.target.attention import IMPLEMENTATION
from selfspec.target.families import family_of, length_dependent, max_positions
from selfspec.target.hf_baseline import HFOutput, hf_generate
from selfspec.target.identity import fingerprint
from selfspec.target.packed import PackedLinear
from selfspec.target.parts import cache_argument, own_rotary, part
from selfspec.target.sublayers import thinned
from selfspec.target.tensor_parallel import local_kv_heads, ranks_of, whole
from selfspec.target.views import module_view
from selfspec.target.weights import check_weights, generation_eos_ids, matrix_elements, parameter_bytes


class Target:
    """A Hugging Face causal LM (left untouched) whose layers can be run in part. Made by `wrap_target` or
    `load_target`.
    """

    def __init__(self, model: Any, tokenizer: Any | None = None, name: str = "wrapped") -> None:
        config = model.config
        family = family_of(config)
        self._model: Any | None = model
        self.reload: Callable[[], Any] | None = None  # loads the plain model again, where its weights were packed away
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.family = family
        view = module_view(model, family.attention).eval()
        self._embed: nn.Module = part(view, family.embed)
        self.layers: list[Any] = list(part(view, family.layers))
        self._norm: nn.Module = part(view, family.norm) or nn.Identity()
        self._rotary: nn.Module | None = own_rotary(part(view, family.rotary)) if family.rotary else None
        self._head: Any = part(view, family.head)
        self._positions: Any = part(view, family.learned_positions) if family.learned_positions else None
        self._embed_scale = family.embed_scale(config)
        self.head_module: Any = self._head
        self.vocab_size: int = self.head_module.weight.shape[0]
        self.dtype: torch.dtype = self.head_module.weight.dtype
        self.device: torch.device = self.head_module.weight.device
        self.ranks = ranks_of(model)  # processes that hold a part of it each; 1: this one holds all
        self._num_kv_heads = local_kv_heads(model, family.heads(config)[0], self.ranks)
        self.windows = [family.window(config, index) for index in range(len(self.layers))]
        self._cache_argument = cache_argument(self.layers[0])
        self._rotary_tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self.weight_bytes = parameter_bytes(model)
        self.step_bytes = self.weight_bytes - (0 if self.tied else parameter_bytes(self._embed))
        self.step_weights = matrix_elements(model) - (0 if self.tied else matrix_elements(self._embed))
        self.eos_token_ids = generation_eos_ids(model, config)
        check_weights(model)
        if len(self.layers) != config.num_hidden_layers:
            raise UserError(
                f"the model has {len(self.layers)} layers, its configuration says {config.num_hidden_layers}; "
                "transformers would run fewer of them. Set config.num_hidden_layers to the number of layers."
            )

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
        self._cache_argument = "cache"  # what our own layers call it

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
        """The LM head's plain weight (an untied one that was packed away is loaded again, one that is cut gathered)."""
        if self.head_module.weight.numel() == 0:
            return self.hf_model.get_output_embeddings().weight
        return whole(self.head_module.weight)

    def head_rows(self, token_ids_V: Tensor | None = None) -> Tensor:
        """The LM head's plain weight `[V, M]`, of all tokens or these. A model that had to be loaded again for it is
        let go again: an untied target that was packed stays in memory once.
        """
        released = self._model is None
        head_VM = self.head_weight_VM.detach()
        rows_VM = head_VM if token_ids_V is None else head_VM[token_ids_V]
        if released:
            self._model = None
        return rows_VM

    @cached_property
    def fingerprint(self) -> str:
        """Names these weights: what drafts and training text made for this target are checked against."""
        return fingerprint(self.hf_model, self.vocab_size, self.num_layers, self.width)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head_module.weight is getattr(self._embed, "weight", None)

    @cached_property
    def queries_per_group(self) -> int:
        """Query heads per key/value head, folded into query rows; 1 where the layers' own attention expands them."""
        if self.family.attention != IMPLEMENTATION:
            return 1
        return self.config.num_attention_heads // self.whole_layer_shape.num_kv_heads

    @cached_property
    def layer_shapes(self) -> list[LayerShape]:
        """What the cache holds per layer: of a target that is cut, this rank's kv heads."""
        return [LayerShape(self._num_kv_heads, self.whole_layer_shape.head_dim)] * self.num_layers

    @cached_property
    def whole_layer_shape(self) -> LayerShape:
        """A layer's kv heads on all ranks together: what a draft's layer of the target's kind has."""
        return LayerShape(*self.family.heads(self.config))

    @cached_property
    def max_positions(self) -> int:
        """The longest sequence (prompt and output, in tokens) this model is decoded at."""
        return max_positions(self.config)

    def make_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(self.layer_shapes, rows, capacity, self.dtype, self.device)

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """Token ids -> their embeddings, `[B, T, M]`, scaled as the model scales them. Learned positions are added by
        layer 0's pass, which knows them.
        """
        embedded_BTM = self._embed(token_ids_BT)
        return embedded_BTM if self._embed_scale == 1.0 else embedded_BTM * self._embed_scale

    def thinned(self, skip_attention: Collection[int], skip_mlp: Collection[int]) -> list[Any | None]:
        """The layers without these sublayers, to be run by `run_layers`."""
        return thinned(self.layers, self.family, skip_attention, skip_mlp)

    def run_layers(
        self, hidden_BTM: Tensor, first: int, last: int, pass_: Pass, layers: Sequence[Any | None] | None = None
    ) -> Tensor:
        """Layers [first, last) at the positions of `pass_`, writing their keys and values into its cache.

        layers: what to run in their place, all L of them; None among them is a layer left out.
        """
        if first == 0 < last and self._positions is not None:
            hidden_BTM = hidden_BTM + self._position_embeddings(pass_)
        for index in range(first, last):
            layer = self.layers[index] if layers is None else layers[index]
            if layer is None:
                continue
            output = layer(
                hidden_BTM,
                attention_mask=pass_.mask(self.windows[index], self.queries_per_group, hidden_BTM.dtype),
                position_ids=pass_.positions_BT,
                position_embeddings=self.rotary_at(index, pass_, hidden_BTM),
                **{self._cache_argument: pass_},
                **self.family.layer_arguments,
            )
            hidden_BTM = output[0] if isinstance(output, tuple) else output
        return hidden_BTM

    def run_tapped(
        self, hidden_BTM: Tensor, first: int, last: int, pass_: Pass, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """`run_layers`, and on the way the hidden states entering the layers `taps`, `[B, T, len(taps) * M]` in their
        order; the tap `last` is what leaves. None without taps.
        """
        found, at = {}, first
        for tap in sorted(set(taps)):
            assert at <= tap <= last, f"layers [{first}, {last}) do not pass the input of layer {tap}"
            hidden_BTM, at = self.run_layers(hidden_BTM, at, tap, pass_), tap
            found[tap] = hidden_BTM
        hidden_BTM = self.run_layers(hidden_BTM, at, last, pass_)
        return hidden_BTM, torch.cat([found[tap] for tap in taps], -1) if found else None

    def norm(self, hidden_BTM: Tensor) -> Tensor:
        """The final norm."""
        return self._norm(hidden_BTM)

    def unembed(self, normed_BTM: Tensor) -> Tensor:
        """The LM head without the norm, `[B, T, V]` in the model's dtype, scaled or soft-capped as the model does."""
        return self.family.finish_logits(self._head(normed_BTM), self.config)

    def head(self, hidden_BTM: Tensor) -> Tensor:
        """Final norm and LM head, `[B, T, V]`."""
        return self.unembed(self.norm(hidden_BTM))

    @property
    def head_product(self) -> Callable[[Tensor], Tensor]:
        """The LM head as nothing but its product: not scaled, not soft-capped."""
        return self._head

    @property
    def head_bytes(self) -> int:
        """What a pass reads of the LM head (on each rank)."""
        if isinstance(self._head, PackedLinear):
            return self._head.nbytes
        return self.vocab_size * self.width * self.dtype.itemsize // self.ranks

    def reduced_unembed(self, token_ids_N: Tensor) -> ReducedUnembed:
        """The LM head of these tokens only, without the norm."""
        return ReducedUnembed(self, token_ids_N)

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

    def _position_embeddings(self, pass_: Pass) -> Tensor:
        """Learned positions `[B, T, M]`. Drafts past the end of the table are never kept, and get its last row."""
        positions_BT = pass_.positions_BT.clamp(max=self.max_positions - 1)
        return functional.embedding(positions_BT + self.family.position_offset, self._positions.weight)

    def rotary_at(self, index: int, pass_: Pass, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of each position for one layer, looked up once per pass and kind of layer."""
        if self._rotary is None:
            return None
        kind = self.config.layer_types[index] if self.family.rotary_by_layer_type else None

        def look_up() -> tuple[Tensor, Tensor]:
            cos_SD, sin_SD = self._rotary_table(kind, pass_.cache.num_slots, hidden)
            return functional.embedding(pass_.positions_BT, cos_SD), functional.embedding(pass_.positions_BT, sin_SD)

        return pass_.once(("rotary", id(self), kind), look_up)

    def _rotary_table(self, kind: str | None, num_slots: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every slot, made once by the model's own rotary module."""
        table = self._rotary_tables.get(kind)
        if table is None or table[0].shape[0] < num_slots or table[0].dtype != hidden.dtype:
            assert self._rotary is not None
            reach = torch.arange(num_slots, device=hidden.device)
            if length_dependent(self.config):  # past the end lie drafts that are never kept
                reach = reach.clamp(max=self.max_positions - 1)
            arguments = () if kind is None else (kind,)
            cos_1SD, sin_1SD = self._rotary(hidden, reach[None], *arguments)
            table = self._rotary_tables[kind] = (cos_1SD[0], sin_1SD[0])
        return table


class ReducedUnembed:
    """The LM head of some tokens only: logits `[B, T, V]`, −inf for all others.

    For drafts: q then has smaller support, which costs acceptance and never exactness.
    """

    def __init__(self, target: Target, token_ids_N: Tensor) -> None:
        bias = getattr(target.head_module, "bias", None)
        self._linear = PackedLinear(target.head_rows(token_ids_N), None if bias is None else bias[token_ids_N])
        self._target, self._token_ids_N = target, token_ids_N

    @property
    def nbytes(self) -> int:
        """Of the rows copied, and their ids."""
        return self._linear.nbytes + self._token_ids_N.nbytes

    def __call__(self, normed_BTM: Tensor) -> Tensor:
        target = self._target
        logits_BTN = target.family.finish_logits(self._linear(normed_BTM), target.config)
        return spread(logits_BTN, self._token_ids_N, target.vocab_size)


def spread(logits_BTN: Tensor, token_ids_N: Tensor, vocab_size: int) -> Tensor:
    """Logits of some tokens -> logits `[B, T, V]`, −inf for all others."""
    logits_BTV = logits_BTN.new_full((*logits_BTN.shape[:-1], vocab_size), -torch.inf)
    return logits_BTV.index_copy_(-1, token_ids_N, logits_BTN)
