"""What decoding takes in memory, before anything is allocated: arithmetic on a model's shape, without torch.

    total = weights + keys and values + the draft's weights and state + working memory
    keys and values = 2 Σ_layers G*D * itemsize  per token  x  token slots of the storage (`selfspec.cache.storage`)
    working memory = the larger of two moments of a round, both while the drafts' q [B, K, V] is held:
        a layer:  tokens * (4M + 3I + 2D) * itemsize, one layer's gathered keys and values on blocks, and what all
                  layers share: masks, and in fused layers cosines and sines per head
        judging:  float32 buffers [B, K+1, V]; how many depends on the transforms and the rule (`vocabulary_buffers`)

The last line counts tensors that are alive at once in `selfspec.sampling`; the tests hold it against every rule.
Kernels' own scratch memory is not counted, nor Python and torch themselves.

Shape letters: B rows, T = K+1 positions, V vocabulary, M width, I width inside the MLP, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec.cache.storage import Contiguous, Paged, Storage, prompt_chunks, slots_for
from selfspec.config import SamplingConfig, TargetConfig, allowed
from selfspec.errors import UserError

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
KNOWN_LAYERS = ("llama", "mistral", "qwen2", "qwen3")  # of which the number of weights follows from the config
ARGMAX_BLOCK, ARGMAX_SMALL = 256, 4096  # on the CPU, larger vocabularies are padded to whole blocks for an argmax
NOISE_PIECE = 1 << 16  # numbers of Gumbel noise made at once on the CPU


# (rows, tokens per row) -> bytes of a draft's own weights, and of what it keeps for these rows
DraftBytes = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs to know of a model."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_layers: int
    vocab_size: int
    width: int
    intermediate_size: int
    queries_per_group: int
    head_dim: int
    itemsize: int
    num_masks: int = 1  # of attention windows that differ, where layers have some
    scored_heads: int = 0  # of a layer whose scores are soft-capped, and so kept
    rotary_width: int = 0  # numbers per token that fused layers rotate by, beyond a layer's own

    def draft_bytes(self, num_rows: int, capacity: int) -> tuple[int, int]:
        """As an independent draft model: `DraftBytes`."""
        return self.weight_bytes, num_rows * slots_for(capacity) * self.kv_bytes_per_token


@dataclass(frozen=True)
class Call:
    """What is to be decoded: the longest requests (prompt, output and one round, in tokens), and how."""

    num_rows: int
    needs: Sequence[int]
    num_drafted: int = 0
    storage: Storage = field(default_factory=Contiguous)
    rule: str = "greedy"  # the acceptance rule's name
    draws_q: bool = False  # the drafter hands over q [B, K, V]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    on_cpu: bool = True
    longest_prompt: int | None = None  # None: as long as the longest request

    @property
    def chunk(self) -> int:
        """The most tokens of a prompt that are run at once; its last one is run by the first round."""
        chunks, longest = prompt_chunks(self.on_cpu), max(self.needs)
        prompt = longest if self.longest_prompt is None else min(self.longest_prompt - 1, longest)
        return chunks.padded(min(chunks.most, prompt))


@dataclass(frozen=True)
class Estimate:
    """Bytes. `total_bytes` is the sum of all but `kv_bytes_per_token`, which `kv_bytes` holds many times."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    draft_weight_bytes: int
    draft_state_bytes: int
    row_bytes: int
    working_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """What is still to be allocated once the models are loaded."""
        return self.kv_bytes + self.draft_state_bytes + self.row_bytes + self.working_bytes

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes + self.weight_bytes + self.draft_weight_bytes


def estimate(model: ModelShape, call: Call, draft: DraftBytes | None = None) -> Estimate:
    """The memory of one decode call. draft: what the drafter takes; `small.draft_bytes` for an independent model."""
    slots = slots_for(max(call.needs))
    kv_bytes = call.storage.total_slots(call.num_rows, call.needs) * model.kv_bytes_per_token
    table = call.num_rows * slots // call.storage.block_size if isinstance(call.storage, Paged) else 0
    draft_weight_bytes, draft_state_bytes = draft(call.num_rows, max(call.needs)) if draft else (0, 0)
    return Estimate(
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_bytes=kv_bytes,
        draft_weight_bytes=draft_weight_bytes,
        draft_state_bytes=draft_state_bytes,
        row_bytes=8 * (call.num_rows * slots + 2 * slots + table),  # token ids, and positions to count with
        working_bytes=working_bytes(model, call),
    )


def working_bytes(model: ModelShape, call: Call) -> int:
    """The most that tensors of one round, or of one chunk of a prompt, take at once."""
    unit = 4 * call.num_rows * model.vocab_size  # float32 [B, V]
    held = unit * call.num_drafted if call.draws_q else 0
    verify = _layer_bytes(model, call, call.num_rows, call.num_drafted + 1) + held
    prompt = _layer_bytes(model, call, 1, call.chunk)
    judge = unit * vocabulary_buffers(call, model.vocab_size, model.itemsize)
    return int(max(verify, prompt, judge))


def _layer_bytes(model: ModelShape, call: Call, rows: int, width: int) -> int:
    """A layer at work on `width` tokens of each row beside what all layers share, or the last mask in the making."""
    slots = slots_for(max(call.needs))
    pairs = rows * width * slots
    kept = model.num_masks * pairs * model.queries_per_group + rows * width * model.rotary_width
    making = pairs * (model.itemsize + 1)  # before it is repeated, and where it hides
    inside = rows * width * (4 * model.width + 3 * model.intermediate_size + 2 * model.head_dim)
    scores = 3 * model.scored_heads * pairs
    paged = isinstance(call.storage, Paged)
    gathered = rows * slots * model.kv_bytes_per_token // model.num_layers if paged else 0
    return kept * model.itemsize + max(making, (inside + scores) * model.itemsize + gathered)


def vocabulary_buffers(call: Call, vocab_size: int, itemsize: int) -> float:
    """How many float32 [B, V] are alive at once, at most, when drafts are judged."""
    s, width = call.sampling, call.num_drafted + 1
    greedy = s.temperature == 0
    penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    edited = penalised or s.no_repeat_ngram_size > 0 or bool(s.logit_bias) or bool(s.suppress_tokens)
    tempered = edited or (not greedy and s.temperature != 1) or (itemsize < 4 and not greedy)
    warped = not greedy and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)

    transforming = 0.0
    if penalised:
        transforming = 3.5 * width  # both products, the choice between them, and marks
    if not greedy and s.top_p < 1:
        transforming = max(transforming, (3 + tempered) * width)  # sorted, running sum, ties
    elif not greedy and s.min_p > 0:
        transforming = max(transforming, (2.25 + tempered) * width)
    copied = width if tempered or warped else 0
    q = call.num_drafted if call.draws_q else 0
    judging = _judging(call, vocab_size) * (itemsize / 4 if greedy and not copied else 1)
    return width * itemsize / 4 + q + max(transforming, copied + judging)


def _judging(call: Call, vocab_size: int) -> float:
    """Beside the logits and q, in [B, V] of float32, or of the logits' dtype where they are judged as they are."""
    drafted, width = call.num_drafted, call.num_drafted + 1
    padded = 0.0
    if call.on_cpu and vocab_size >= ARGMAX_SMALL and vocab_size % ARGMAX_BLOCK:
        padded = width * (1 + (ARGMAX_BLOCK - vocab_size % ARGMAX_BLOCK) / vocab_size)
    if call.sampling.temperature == 0:
        return padded
    if call.rule == "coupled":  # noise, and its sum with the logits; or, while noise is made, 64-bit numbers
        rows = call.num_rows * width
        piece = min(rows, max(1, NOISE_PIECE // vocab_size)) if call.on_cpu else rows
        return max(2 * width + padded, (rows - piece + 5 * piece + 2) / call.num_rows)
    drawing = 7 if drafted else 5  # weights, and their running sum in 64 bits
    if call.rule == "typical":
        return width + max(5, drafted)  # p, and its entropy
    if call.rule == "block":
        return max(4 * width, width + drawing)  # p, q of all nodes, and the residual twice
    return max(width + drawing, 2 * drafted)  # p; or p and min(p, q) for α


def ways_to_fit(model: ModelShape, call: Call, limit: int, draft: DraftBytes | None = None) -> list[str]:
    """What to change so that the allocation stays within `limit`: each is the largest that does; [] if nothing does."""

    def fits(changed: Call) -> bool:
        return estimate(model, changed, draft).allocated_bytes <= limit

    storage, longest = call.storage, max(call.needs)
    if isinstance(storage, Paged) and storage.num_blocks is not None:
        now = estimate(model, call, draft)
        left = limit - now.allocated_bytes + now.kv_bytes
        blocks = left // (storage.block_size * model.kv_bytes_per_token) - 1
        return [f"num_blocks up to {blocks}"] if blocks * storage.block_size >= longest else []
    most = min(call.num_rows, limit // (longest * model.kv_bytes_per_token))
    rows = _largest(most, lambda n: fits(replace(call, num_rows=n, needs=[longest] * n)))
    length = _largest(longest, lambda n: fits(replace(call, needs=[min(need, n) for need in call.needs])))
    length -= call.num_drafted + 1
    ways = [f"max_batch_rows up to {rows}"] if rows else []
    return ways + ([f"requests of up to {length} tokens at this number of rows"] if length > 1 else [])


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..most for which `fits(n)`, which holds for all smaller ones too; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def shape_from_config(config: Mapping[str, Any], dtype: str = "float32", packed: bool = False) -> ModelShape:
    """The shape of a model from its config.json. packed: with weights packed for the CPU (`selfspec.target.fused`),
    which keeps a tied embedding beside the packed head; those that float16 holds take less (`selfspec.target.packed`).

    Raises UserError for an architecture whose number of weights is not known here, and for an unknown dtype.
    """
    family = str(config.get("model_type"))
    if family not in KNOWN_LAYERS:
        raise UserError(f"The weights of model_type={family!r} cannot be counted. {allowed(family, KNOWN_LAYERS)}")
    if dtype not in ITEMSIZE:
        raise UserError(f"dtype={dtype!r} is unknown. {allowed(dtype, ITEMSIZE)}")
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or width // heads
    num_layers = config["num_hidden_layers"]
    attention = 2 * width * heads * dim + 2 * width * groups * dim
    if config.get("attention_bias") or family == "qwen2":
        attention += (heads + 2 * groups) * dim + (width if config.get("attention_bias") and family != "qwen2" else 0)
    if family == "qwen3":
        attention += 2 * dim  # norms of queries and keys
    mlp = 3 * width * inner + (2 * inner + width if config.get("mlp_bias") else 0)
    tied = bool(config.get("tie_word_embeddings", False))
    parameters = num_layers * (attention + mlp + 2 * width) + width + vocab * width * (1 if tied and not packed else 2)
    itemsize = ITEMSIZE[dtype]
    return ModelShape(
        weight_bytes=parameters * itemsize,
        kv_bytes_per_token=2 * num_layers * groups * dim * itemsize,
        num_layers=num_layers,
        vocab_size=vocab,
        width=width,
        intermediate_size=inner,
        queries_per_group=heads // groups,
        head_dim=dim,
        itemsize=itemsize,
    )


def config_of_random(target: TargetConfig) -> dict[str, Any]:
    """What config.json would say of a conf/target with random weights."""
    shape = target.shape
    return {
        "model_type": target.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
