"""Values on their way between processes: plain ones as JSON, tensors as their bytes. No pickle: it could run code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def dismantled(value: Any, tensors: list[Tensor]) -> Any:
    """`value` (None, numbers, texts, tensors; lists, tuples and dicts of them) as JSON; its tensors are appended."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": {name: dismantled(each, tensors) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [dismantled(each, tensors) for each in value]}
    return value


def assembled(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that was dismantled into `form` and `tensors`."""
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = form.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {name: assembled(each, tensors) for name, each in inside.items()}
    return (list if kind == "list" else tuple)(assembled(each, tensors) for each in inside)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's numbers as uint8 (n,) on the CPU, whatever their type."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def described(tensor: Tensor) -> tuple[str, list[int], str]:
    """What it takes to make a tensor of bytes again: type, shape and kind of device."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type


def from_bytes(content: Tensor, kind: str, shape: Sequence[int], device: str) -> Tensor:
    """The tensor of this description whose bytes are uint8 (n,)."""
    return content.view(getattr(torch, kind)).reshape(list(shape)).to(device)


def length_in_bytes(kind: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor of this description has."""
    return torch.empty(list(shape), dtype=getattr(torch, kind), device="meta").nbytes
