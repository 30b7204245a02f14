"""A target cut across processes by transformers' own tensor-parallel plan: one rank per device, started by torchrun.

The plan cuts the projections of every layer (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3): a rank
computes its heads and its part of the MLP, and two all-reduces per layer leave the same hidden states on every rank.
The embedding and the LM head are cut by vocabulary and gathered. So outside the layers' projections everything is whole
on every rank: each runs the same loop on the same hidden states and logits, with a cache of its own kv heads only, and
draws the same tokens, since noise is a function of the position. What only one rank can know (how long something took)
is told by the first one.

Cost: two all-reduces per layer and pass, one for the embedding, one gathering of the logits.
"""

from __future__ import annotations

import datetime
import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from selfspec.errors import UserError
from selfspec.target.families import family_of

PATIENCE = datetime.timedelta(minutes=30)  # one rank may read its part of the weights faster than another
KEYS = ("k_proj", "query_key_value", "qkv_proj")  # the projections whose output is cached, in any family's plan

T = TypeVar("T")


def join(ranks: int) -> None:
    """Makes this process one of the `ranks` that torchrun started. UserError where it did not start so many."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise UserError(
            f"tensor_parallel={ranks}, but {started} process{'es run' if started > 1 else ' runs'}. Start as many as "
            f"the target is cut into: torchrun --nproc-per-node={ranks} ..., or leave tensor_parallel at {started}."
        )
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=PATIENCE)


def load_cut(path: str, dtype: torch.dtype, device: torch.device, ranks: int, **options: Any) -> Any:
    """This rank's part of the model at `path`. UserError for what the plan cannot cut, before any weights are read."""
    check_divisible(AutoConfig.from_pretrained(path, **options), ranks)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, distributed_config=DistributedConfig(tp_plan="auto"), **options
    )
    if model.device.type != device.type:  # transformers takes the accelerator that there is
        raise UserError(
            f"device={str(device)!r}, but transformers puts a cut target on this machine's {model.device.type}. Use "
            "device='auto'; to stay on the CPU, hide the others (CUDA_VISIBLE_DEVICES=)."
        )
    return model


def check_divisible(config: Any, ranks: int) -> None:
    """UserError unless transformers has a plan for this family, and heads and kv heads can be dealt out evenly."""
    name = config.model_type
    num_kv_heads, _ = family_of(config).heads(config)
    if not getattr(config, "base_model_tp_plan", None):
        raise UserError(
            f"transformers has no tensor-parallel plan for {name!r} (base_model_tp_plan); such a target has to fit on "
            "one device."
        )
    for what, number in (("heads", config.num_attention_heads), ("kv heads", num_kv_heads)):
        if number % ranks:
            even = [str(count) for count in range(2, num_kv_heads + 1) if num_kv_heads % count == 0]
            raise UserError(
                f"the {number} {what} of this {name!r} cannot be dealt out to {ranks} ranks. Allowed: "
                f"{' or '.join(even) or 'one'}."
            )
    if getattr(config, "use_qk_norm", False) and name == "cohere":
        raise UserError("'cohere' with use_qk_norm has norms over all heads, which transformers' plan does not cut.")


def ranks_of(model: Any) -> int:
    """How many ranks hold a part of this model; 1 for a whole one. UserError for weights that are cut otherwise."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if not meshes:
        return 1
    ranks: int = getattr(model, "_tp_size", None) or 1
    if ranks == 1 or ranks != dist.get_world_size() or any(mesh.ndim > 1 or mesh.size() != ranks for mesh in meshes):
        raise UserError(
            "the model's parameters are cut across processes, and not by transformers' tensor-parallel plan over all "
            "of them. Load it with selfspec.load_target(..., tensor_parallel=<processes>), or whole, on one device."
        )
    check_divisible(model.config, ranks)
    return ranks


def local_kv_heads(model: Any, num_kv_heads: int, ranks: int) -> int:
    """kv heads in this rank's cache: its share, or all where the plan gathers what the projections computed."""
    plan = model.tp_plan or {} if ranks > 1 else {}
    cut = any(name.rpartition(".")[2] in KEYS and style == "colwise" for name, style in plan.items())
    return num_kv_heads // ranks if cut else num_kv_heads


def local(tensor: Tensor) -> Tensor:
    """This rank's part; a whole tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is cut, gathered: every rank has to ask. A whole one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everywhere(found: list[str], ranks: int) -> list[str]:
    """What any rank has found, once each and in order: so that all of them refuse together and none waits."""
    if ranks == 1:
        return found
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    return sorted({one for part in gathered for one in part})


def told_by_first(value: T, ranks: int) -> T:
    """The first rank's value on every rank: seconds differ between them, and what is decided by seconds must not."""
    if ranks == 1:
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def check_same(what: str, value: object, ranks: int) -> None:
    """RuntimeError unless every rank has the same value: ranks that drift apart would make one text of two."""
    if ranks == 1:
        return
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    if any(other != value for other in values):
        raise RuntimeError(f"the ranks of a tensor-parallel target drew different {what}; its output is not to be used")
