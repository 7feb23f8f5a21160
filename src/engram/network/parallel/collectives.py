"""Ranks, and the collective operations between them. Values travel as JSON and safetensors, never as pickles."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from engram import errors
from engram.errors import EngramError, UsageError
from engram.storage import parse_tensors, serialise_tensors

Value = TypeVar("Value")

TENSOR = " tensor"  # the key, in JSON, of the name of a tensor that is sent separately


def world_size() -> int:
    """The number of processes; 1 outside of a `process_group`."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if world_size() > 1 else 0


def is_distributed() -> bool:
    """Whether this process is one of several."""
    return world_size() > 1


def is_main() -> bool:
    """Whether this is rank 0, which alone writes files and reports progress."""
    return rank() == 0


def part(count: int) -> slice:
    """The rows of this rank out of `count`: contiguous, in rank order, sizes equal within one."""
    size, remainder = divmod(count, world_size())
    start = rank() * size + min(rank(), remainder)
    return slice(start, start + size + (rank() < remainder))


class Share(NamedTuple):
    """A rank's rows of a batch, and the weight that turns per-rank means into the mean over the global batch."""

    rows: slice
    weight: float


def share(count: int) -> Share:
    """This rank's share of a batch of `count` rows. If there are fewer rows than ranks, every rank takes all rows."""
    if count < world_size():
        return Share(slice(0, count), 1.0)
    rows = part(count)
    return Share(rows, (rows.stop - rows.start) * world_size() / count)


def broadcast(compute: Callable[[], Value]) -> Value:
    """The value that rank 0 computes, on all ranks; an `EngramError` is raised on all ranks.

    A value consists of None, numbers, strings, tensors (received on the CPU), and lists, tuples (received as lists) and
    dicts of these. `compute` runs on rank 0 alone, so it must not call a collective operation; it may take any time.
    """
    if not is_distributed():
        return compute()
    value, error = None, None
    try:
        value = compute() if is_main() else None
    except EngramError as raised:
        error = raised
    failure = None if error is None else (type(error).__name__, str(error))
    tensors: dict[str, Tensor] = {}

    def pack(tensor: Tensor) -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = tensor
        return {TENSOR: name}

    text = _broadcast_bytes(json.dumps((failure, value), default=pack).encode())
    received = parse_tensors(_broadcast_bytes(serialise_tensors(tensors)), "A broadcast value")
    failure, copy = json.loads(text, object_hook=lambda each: received[each[TENSOR]] if TENSOR in each else each)
    if failure is not None:
        raise error or getattr(errors, failure[0], EngramError)(failure[1])
    return cast(Value, value if is_main() else copy)


def on_main(act: Callable[[], Value]) -> Value | None:
    """Call `act` on rank 0 alone and return its result there, for instance an open file; None on other ranks.

    An `EngramError` is raised on all ranks.
    """
    results: list[Value] = []
    broadcast(lambda: results.append(act()))
    return results[0] if results else None


def main_first(act: Callable[[], Value]) -> Value:
    """Call `act` on every rank: first on local rank 0 of each machine, which may download files, then on the others."""
    waits = is_distributed() and os.environ.get("LOCAL_RANK", "0") != "0"
    if waits:
        barrier()
    value = act()
    if is_distributed() and not waits:
        barrier()
    return value


def all_gather(own: Tensor) -> Tensor:
    """The rows (n, ...) of all ranks in rank order, on the CPU; n may differ between ranks and be 0."""
    if not is_distributed():
        return own
    lengths = [int(length) for length in _all_gather_equal(torch.tensor([len(own)]))]
    padded = own.new_zeros(max(lengths), *own.shape[1:], device="cpu")  # torch's all_gather needs equal shapes
    padded[: len(own)] = own
    return torch.cat([rows[:length] for rows, length in zip(_all_gather_equal(padded), lengths, strict=True)])


def mean(value: Tensor) -> Tensor:
    """The mean of a scalar over the ranks, without a gradient."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / world_size()


def mean_weight(selected: Tensor) -> float:
    """Weight that turns a mean over this rank's selected rows (bool, (n,)) into one over those of the global batch.

    It corrects `Share.weight`, which counts all rows of a rank.
    """
    if not is_distributed():
        return 1.0
    own = torch.stack([selected.sum(), torch.tensor(len(selected), device=selected.device)]).double()
    batch = own.clone()
    distributed.all_reduce(batch)
    return float((own[0] / own[1]) / (batch[0] / batch[1])) if own[0] else 0.0


def broadcast_module(module: nn.Module) -> None:
    """Copy the state dict of rank 0 to all ranks."""
    if is_distributed():
        module.load_state_dict(broadcast(module.state_dict))


def check_same(value: Any, name: str) -> None:
    """Raise an error on all ranks if `value` (JSON) differs between them; `name` says what it is."""
    if not is_distributed():
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    digests = all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None])  # (ranks, 32)
    differing = (digests != digests[0]).any(1).nonzero().squeeze(1).tolist()
    if differing:
        processes = ", ".join(str(number + 1) for number in differing)
        raise UsageError(
            f"The processes of this run do not agree on {name}: process {processes} of {world_size()} differs from the "
            "first. Give all machines the same files, command and versions."
        )


def barrier() -> None:
    """Wait until all ranks are here."""
    distributed.all_reduce(torch.zeros(1))  # on the CPU, where `distributed.barrier` may choose a GPU


def _all_gather_equal(own: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(gathered, own)
    return gathered


def _broadcast_bytes(content: bytes) -> bytes:
    """The bytes of rank 0 on all ranks."""
    size = torch.tensor([len(content)])
    distributed.broadcast(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if is_main():
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    distributed.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()
