"""Training in several processes, one per rank, as torchrun starts them; only this module asks for the rank.

All ranks execute the same code and call these functions in the same order. Each rank trains on its share of every
batch and extracts features of its share of the samples. In a single process, every function is a plain call. Values
travel as JSON and safetensors, never as pickles.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from engram import errors
from engram.errors import EngramError, EngramWarning, LostError, UsageError
from engram.network.heartbeat import Heartbeat, Terminated
from engram.storage import parse_tensors, serialise_tensors

Value = TypeVar("Value")
Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor, float], Tensor]  # (inputs, class indices, weight of the share) -> scalar loss

TENSOR = " tensor"  # the key, in JSON, of the name of a tensor that is sent separately
COLLECTIVE_TIMEOUT = timedelta(days=30)  # rank 0 may work alone for hours; the heartbeat notices deaths
CONNECT_TIMEOUT = timedelta(minutes=5)
STORE_TIMEOUT = timedelta(seconds=10)


# Ranks, and the operations between them


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
    value, error, failure = None, None, None
    try:
        value = compute() if is_main() else None
    except EngramError as raised:
        error, failure = raised, (type(raised).__name__, str(raised))
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
    """The result of `act`, which only rank 0 calls, on rank 0, and None on the others; errors as in `broadcast`."""
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
    if differing := (digests != digests[0]).any(1).nonzero().squeeze(1).tolist():
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
    buffer = torch.frombuffer(bytearray(content if is_main() else int(size)), dtype=torch.uint8)
    distributed.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The process group of a run under torchrun


def _variable(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def _is_launched() -> bool:
    """Whether torchrun, or anything that sets the same variables, has started this process as one of several."""
    return {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and _variable("WORLD_SIZE") > 1


@contextmanager
def process_group(device: str = "auto") -> Iterator[None]:
    """Inside, the processes that torchrun started are ranks of one group; nothing changes in a single process.

    CPU tensors are exchanged by gloo, GPU tensors by nccl with one GPU per rank. An error on one rank ends all: it is
    raised there, and `ElsewhereError` on the others. If a rank dies, one of the others raises `LostError`.
    """
    if not _is_launched() or not distributed.is_available() or distributed.is_initialized():
        yield
        return
    # Imported while a group exists, as by DistributedDataParallel, its default arguments would keep that group and its
    # threads alive, and such a thread can abort the process at exit.
    importlib.import_module("torch.distributed.nn.functional")
    store = _connect(CONNECT_TIMEOUT)
    rank, world_size = _variable("RANK"), _variable("WORLD_SIZE")
    number = store.add(f"engram/{rank}", 1)  # a second group of the same processes needs other names
    beats = PrefixStore(f"engram/{number}/heartbeat", _connect(STORE_TIMEOUT))
    with _rank_settings(rank), Heartbeat(beats, rank, world_size) as heartbeat:
        try:
            on_gpu = _takes_gpu(device)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=PrefixStore(f"engram/{number}/groups", store),
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            check_same([torch.__version__, on_gpu], "torch's version, or on having a GPU")
            yield
            barrier()
            heartbeat.stop()
            barrier()  # after it no rank uses the store, which may end with rank 0
        except BaseException as error:
            _ignore_signals()  # the error must be reported completely
            reported = heartbeat.resolve(error)
            atexit.register(_exit, heartbeat.exit_code)
            if reported is error:
                raise
            raise reported from error
        distributed.destroy_process_group()


def refuse_torchrun(command: str) -> None:
    """Raise an error, once for all ranks, under torchrun: each process would execute the command on its own."""
    if _is_launched():
        with process_group("cpu"):
            raise UsageError(f"`{command}` works in one process. Leave out torchrun, which is for `engram run`.")


def _exit(exit_code: int) -> None:
    """Exit without waiting for pending messages between ranks, which might never arrive."""
    with suppress(OSError, ValueError):  # nobody may read them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _connect(timeout: timedelta) -> Store:
    """A new connection to torchrun's store; without torchrun, rank 0 serves it."""
    try:
        return next(rendezvous("env://", timeout=timeout))[0]  # type: ignore[no-any-return]
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostError(f"The first machine of the run, at {address}, cannot be reached: {error}") from error


def _takes_gpu(device: str) -> bool:
    """Whether ranks compute on GPUs; if so, this one takes its own."""
    if device == "mps":
        raise UsageError("Several processes can use cpu or cuda, not mps. Leave out torchrun or --device.")
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    processes = _variable("LOCAL_WORLD_SIZE", 1)
    if processes > torch.cuda.device_count():
        raise UsageError(
            f"There are {torch.cuda.device_count()} GPUs for {processes} processes on this machine. "
            "Start one process per GPU, or use --device cpu."
        )
    torch.cuda.set_device(_variable("LOCAL_RANK"))
    return True


@contextmanager
def _rank_settings(rank: int) -> Iterator[None]:
    """Each rank uses its share of the cores, rank 0 alone shows warnings, and SIGTERM raises `Terminated`."""
    count = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's default; any other value is the user's
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = max(1, cores // _variable("LOCAL_WORLD_SIZE", 1))
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere signals cannot be handled
    handler = signal.signal(signal.SIGTERM, _raise_terminated) if in_main_thread else None
    with threads(count), warnings.catch_warnings():
        if rank:
            warnings.simplefilter("ignore", EngramWarning)
        yield
    if in_main_thread:
        signal.signal(signal.SIGTERM, handler)  # not after an error: see `_ignore_signals`


def _raise_terminated(*_: object) -> None:
    raise Terminated


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


# Data-parallel training by DistributedDataParallel, with synchronised batch norms also on the CPU


@contextmanager
def distributed_step(network: nn.Module, loss: Loss) -> Iterator[Step]:
    """A function that gives the loss of one rank's share; its `backward` averages gradients over all ranks.

    `loss` is a mean over its inputs. It may use all or part of `network`, any number of times.
    """
    if not is_distributed():
        yield lambda inputs, class_indices, weight: loss(inputs, class_indices)
        return
    from torch.nn.parallel import DistributedDataParallel  # imports torch's compiler, which takes seconds

    broadcast_module(network)
    with synchronised(network):
        yield DistributedDataParallel(_LossModule(network, loss), find_unused_parameters=True)


class _LossModule(nn.Module):
    """The loss as a module for DistributedDataParallel. It has no buffers: batch norms synchronise their own."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.trainable = nn.ParameterList(trainable)
        # torch warns if it looks for unused parameters and finds none, so there is always one.
        self.unused = nn.Parameter(torch.zeros((), device=trainable[0].device))
        self.loss = loss

    def forward(self, inputs: Tensor, class_indices: Tensor, weight: float) -> Tensor:
        return weight * self.loss(inputs, class_indices)


@contextmanager
def synchronised(network: nn.Module) -> Iterator[None]:
    """Inside, the batch norms of a network take their statistics over all ranks; their tensors stay the same."""
    kinds = {module: type(module) for module in network.modules() if isinstance(module, _BatchNorm)}
    for norm in kinds:
        on_gpu = any(tensor.is_cuda for tensor in (*norm.parameters(), *norm.buffers()))
        norm.__class__ = nn.SyncBatchNorm if on_gpu else SynchronisedBatchNorm  # torch's own works on GPUs only
        norm.process_group = None  # type: ignore[assignment]  # that of all ranks
    try:
        yield
    finally:
        for norm, kind in kinds.items():
            norm.__class__ = kind


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over all ranks for CPU tensors (n, c, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        # In float32 also under autocast, because it sums over a batch.
        output, mean, var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input.float(), self.weight, self.bias, self.eps
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(var * (count / (count - 1)), alpha=momentum)
        return output.to(input.dtype)  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any: the norm that this one replaces was made for it."""


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(var + ε) · weight + bias per channel, with mean and variance of the global batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = (own.double() for own in torch.batch_norm_update_stats(x, None, None, 0.0))  # (c,), of this rank
        own = x.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
        sums = torch.cat([own, own * mean, own * (var + mean.square())])
        distributed.all_reduce(sums)
        count, (mean, square) = sums[0], (sums[1:] / sums[0]).chunk(2)
        var = (square - mean.square()).clamp(min=0)  # float64, since this difference cancels digits
        mean, var, count = mean.float(), var.float(), count.float()
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, count)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """dx = w / σ · (dy − mean of dy − x̂ · mean of dy x̂). torch takes the means of this rank; they are corrected."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        slope = inverse if weight is None else weight * inverse  # (c,): w / σ
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        sums = torch.stack([db, dw])  # (2, c): of dy and of dy x̂
        means = sums.double()
        distributed.all_reduce(means)
        off_dy, off_dyx = sums / (x.numel() // x.shape[1]) - (means / count).float()  # (c,) each
        by_x = slope * off_dyx * inverse  # the correction is linear in x
        shape = (1, -1, *[1] * (x.ndim - 2))
        dx.addcmul_(x, by_x.view(shape)).add_((slope * off_dy - by_x * mean).view(shape))
        return dx, (dw if ctx.needs_input_grad[1] else None), (db if ctx.needs_input_grad[2] else None), None
