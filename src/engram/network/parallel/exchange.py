"""What processes tell each other: what the first did once for all, and what each has a part of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from engram import errors
from engram.errors import EngramError, UsageError
from engram.network.parallel.messages import as_bytes, assembled, described, dismantled, from_bytes, length_in_bytes
from engram.network.parallel.ranks import is_distributed, is_main, place, world_size

Value = TypeVar("Value")


def broadcast(compute: Callable[[], Value]) -> Value:
    """What `compute` gives, done by the first process alone; all have it then, to the last bit.

    A value is made of None, numbers, texts, tensors, and lists, tuples and dicts of them. An `EngramError` is raised in
    all. Nothing that is done in there may wait for the other processes: they wait for it, however long it takes.
    """
    if not is_distributed():
        return compute()
    return cast(Value, _from_first(*_attempt(compute)))


def on_main(act: Callable[[], Value]) -> Value | None:
    """As `broadcast`, for what is to stay with the first process, such as an open folder; the others get None."""
    if not is_distributed():
        return act()
    value, error = _attempt(act)
    _from_first(None, error)
    return value


def main_first(act: Callable[[], Value]) -> Value:
    """What `act` gives, in every process; where they share a machine, the others begin when the first has done it.

    What it leaves on the disk, such as files that were downloaded, is so there for them.
    """
    here = place() if is_distributed() else None
    if here is None:
        return act()
    if here.local_rank:
        barrier()
        return act()
    value = act()
    barrier()
    return value


def all_gather(own: Tensor) -> Tensor:
    """The rows (n, ...) of all processes in their order, the same in every one, on the CPU; `own` may be none."""
    if not is_distributed():
        return own
    lengths = _gathered(torch.tensor([len(own)]))
    longest = max(int(length) for length in lengths)
    padded = own.new_zeros(longest, *own.shape[1:], device="cpu")  # all_gather wants equal shapes
    padded[: len(own)] = own
    return torch.cat([rows[: int(length)] for rows, length in zip(_gathered(padded), lengths, strict=True)])


def mean(value: Tensor) -> Tensor:
    """The mean over the processes of a number that each has, the same in all; nothing is learned through it."""
    if not is_distributed():
        return value
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / world_size()


def mean_weight(selected: Tensor) -> float:
    """What a mean over the selected rows (bool, (n,)) of a share is to count for, to be one over those of the batch.

    A share's loss counts for as many rows as it has, which need not be the part of the selected ones that are in it.
    """
    if not is_distributed():
        return 1.0
    own = torch.stack([selected.sum(), torch.tensor(len(selected), device=selected.device)]).double()
    batch = own.clone()
    distributed.all_reduce(batch)
    return float((own[0] / own[1]) / (batch[0] / batch[1])) if own[0] else 0.0


def broadcast_module(module: nn.Module) -> None:
    """Make all processes' copies of a module equal to the first one's, to the last bit."""
    if is_distributed():
        module.load_state_dict(broadcast(module.state_dict))


def check_same(value: Any, what: str) -> None:
    """Refuse to go on where `value` (plain, as JSON has it) is not the same in all processes; `what` it is."""
    if not is_distributed():
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)[None]  # (1, 32)
    found = torch.cat(_gathered(own))  # (processes, 32)
    if bool((found != found[0]).any()):
        others = ", ".join(str(number + 1) for number in (found != found[0]).any(1).nonzero().squeeze(1).tolist())
        raise UsageError(
            f"The processes of this run do not agree on {what}: of {world_size()}, process {others} has something else than "
            "the first. Give all machines the same files, the same command and the same version."
        )


def barrier() -> None:
    """Wait until all processes are here."""
    distributed.all_reduce(torch.zeros(1))


def _attempt(compute: Callable[[], Value]) -> tuple[Value | None, EngramError | None]:
    """What the first process makes of it; the others do nothing."""
    try:
        return (compute() if is_main() else None), None
    except EngramError as error:
        return None, error


def _from_first(value: Any, error: EngramError | None) -> Any:
    """Send a value, or an error, from the first process to all."""
    tensors: list[Tensor] = []
    form = dismantled(value, tensors)
    why = None if error is None else (type(error).__name__, str(error))
    why, form, descriptions = json.loads(_text(json.dumps((why, form, [described(each) for each in tensors]))))
    if why is not None:
        kind, message = why
        raise error or getattr(errors, kind, EngramError)(message)
    received = []
    for number, (kind, shape, device) in enumerate(descriptions):
        empty = torch.empty(length_in_bytes(kind, shape), dtype=torch.uint8)
        received.append(from_bytes(_broadcast(as_bytes(tensors[number]) if is_main() else empty), kind, shape, device))
    return value if is_main() else assembled(form, received)


def _gathered(own: Tensor) -> list[Tensor]:
    """The tensors of all processes, which are of one shape."""
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(gathered, own)
    return gathered


def _text(own: str) -> str:
    """The first process's text, in all."""
    content = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    length = int(_broadcast(torch.tensor([len(content)])))
    return bytes(_broadcast(content if is_main() else torch.empty(length, dtype=torch.uint8)).tolist()).decode()


def _broadcast(tensor: Tensor) -> Tensor:
    if tensor.numel():
        distributed.broadcast(tensor, src=0)
    return tensor
