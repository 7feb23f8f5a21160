"""Entering and leaving the world of processes that torchrun has started."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from engram.errors import EngramWarning, LostError, UsageError
from engram.network.parallel.exchange import barrier, check_same
from engram.network.parallel.lifeline import Lifeline, Terminated
from engram.network.parallel.ranks import Place, place

# The first process may work alone for hours, while the others wait. Of deaths they know by the lifeline.
WAITING = timedelta(days=30)
CONNECTING = timedelta(minutes=5)
ANSWERING = timedelta(seconds=10)  # of the lifeline's store


@contextmanager
def process_group(device: str = "auto") -> Iterator[None]:
    """Inside, the processes that torchrun has started work as one; a lone process, or one inside already, as it did.

    Numbers on the CPU go by gloo and those on a GPU by nccl; each process of a machine has a GPU of its own. An error
    in one ends all: it is raised where it happened, and in the others an `ElsewhereError`. So does a death: `LostError`
    in one of those that are left.
    """
    here = place()
    if here is None or not distributed.is_available() or distributed.is_initialized():
        yield
        return
    store = _store(CONNECTING)
    # A second world of the same processes must not find what the first one left in the store.
    number = store.add(f"engram/{here.rank}", 1)
    with (
        _own_threads(here),
        _warned_once(here),
        _interrupted_by_sigterm(),
        Lifeline(_prefixed(_store(ANSWERING), number, "lifeline"), here.rank, here.world_size) as lifeline,
    ):
        try:
            on_gpu = _takes_gpu(device, here)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=_prefixed(store, number, "groups"),
                rank=here.rank,
                world_size=here.world_size,
                timeout=WAITING,
            )
            check_same([torch.__version__, on_gpu], "torch's version, or on having a GPU")
            yield
            barrier()
            lifeline.leave()
            barrier()  # now no one looks for signs of life, nor into the store, which may end with the first process
        except BaseException as error:
            _turn_deaf()
            verdict = lifeline.verdict(error)
            atexit.register(_exit, lifeline.exit_code)
            if verdict is error:
                raise
            raise verdict from error
        distributed.destroy_process_group()


def refuse_torchrun(command: str) -> None:
    """Refuse a command that several processes would each carry out on their own, in one another's way."""
    if place() is not None:
        with process_group("cpu"):  # so that it is said once
            raise UsageError(f"`{command}` works in one process. Leave out torchrun, which is for `engram run`.")


def _exit(exit_code: int) -> None:
    """End at once: an ordinary exit waits for messages under way, which may be to processes that wait likewise."""
    with suppress(OSError, ValueError):  # whoever read it may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _store(timeout: timedelta) -> Store:
    """A connection of its own to the store that torchrun keeps; without torchrun, the first process keeps it."""
    try:
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostError(f"The first machine of the run, at {address}, cannot be reached: {error}") from error
    return store


def _prefixed(store: Store, number: int, purpose: str) -> Store:
    return PrefixStore(f"engram/{number}/{purpose}", store)


def _takes_gpu(device: str, here: Place) -> bool:
    """Whether to compute on GPUs; this process then takes its own."""
    if device == "mps":
        raise UsageError("Several processes work together on cpu or cuda, not on mps. Leave out torchrun or --device.")
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    if here.local_size > torch.cuda.device_count():
        raise UsageError(
            f"There are {torch.cuda.device_count()} GPUs here for {here.local_size} processes. "
            "Start as many processes as there are GPUs, or compute with --device cpu."
        )
    torch.cuda.set_device(here.local_rank)
    return True


@contextmanager
def _own_threads(here: Place) -> Iterator[None]:
    """Each process of a machine computes with its share of the cores; torchrun itself would give it one."""
    before = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # anything else was asked for
        torch.set_num_threads(max(1, _cores() // here.local_size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


@contextmanager
def _warned_once(here: Place) -> Iterator[None]:
    """What all processes notice, the first one notes."""
    with warnings.catch_warnings():
        if here.rank:
            warnings.simplefilter("ignore", EngramWarning)
        yield


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM as an interrupt, to leave in good order when torchrun ends this process because another has died."""
    if threading.current_thread() is not threading.main_thread():  # only there can it be
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)  # not after an error: see below


def _turn_deaf() -> None:
    """No interrupt from here on: the end is under way, and what is to be said of it must not be cut short."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
