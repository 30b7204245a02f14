"""Facts about a loaded model's weights: their size, what they must have in common, where generation stops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from selfspec.errors import UserError
from selfspec.target.tensor_parallel import everywhere, local, ranks_of


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters that this process holds, tied ones once."""
    return sum(local(parameter).numel() * parameter.dtype.itemsize for parameter in model.parameters())


def matrix_elements(model: nn.Module) -> int:
    """How many numbers its matrices hold: what each token of a pass is multiplied with, but for tables of positions and
    for experts that a token is not sent to. Norms and biases are not counted.
    """
    return sum(local(parameter).numel() for parameter in model.parameters() if parameter.dim() > 1)


def generation_eos_ids(model: Any, config: Any) -> tuple[int, ...]:
    """What `model.generate` would stop at: the generation config's ids, else the config's."""
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        given = getattr(config, "eos_token_id", None)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)


def check_weights(model: Any) -> None:
    """One device, one floating dtype, no fp16 on CPU, all finite: what the engine's single cache and its kernels rely
    on. Reads every weight once.
    """
    devices = {str(parameter.device) for parameter in model.parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(devices) > 1:
        raise UserError(
            f"the model's parameters lie on {sorted(devices)}; a target spread over devices (device_map) is not "
            "supported: move it to one device with model.to(...), or cut its layers across processes with "
            "load_target(..., tensor_parallel=<processes>)"
        )
    if devices == {"meta"}:
        raise UserError("the model's parameters lie on the meta device: its weights were never loaded")
    if len(dtypes) > 1:
        raise UserError(
            f"the model's parameters have dtypes {sorted(map(str, dtypes))}; convert it with model.to(dtype)"
        )
    if dtypes == {torch.float16} and devices == {"cpu"}:
        raise UserError("float16 on a CPU is not supported; use dtype='float32' or dtype='bfloat16'")
    if broken := everywhere(not_finite(model), ranks_of(model)):
        raise UserError(
            f"{len(broken)} of the model's parameters hold NaN or infinite values, the first is {broken[0]}; "
            "the checkpoint is damaged or was converted to a dtype too small for it"
        )


@torch.inference_mode()
def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters whose part on this process holds a NaN or infinite value, found by their extremes (NaN
    wins both); one host read.
    """
    parts = ((name, local(parameter)) for name, parameter in model.named_parameters())
    named = [(name, part) for name, part in parts if part.numel()]
    extremes = torch.stack([torch.stack(part.aminmax()).float() for _, part in named])
    finite = torch.isfinite(extremes).all(1).tolist()
    return [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
