"""Trained networks, their features and adapters, shared by all runs that differ only in what comes after training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from engram import __version__, storage
from engram.experiments.identity import identifying
from engram.methods import Learner
from engram.methods.learner import choose_device
from engram.network import Network, TensorCache, caching, parallel, restore_network


class Trainings:
    """A folder of networks, each under the hash of all that its training depended on, engram's version included.

    Of several processes the first alone looks into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        parallel.on_main(self._open)

    def _open(self) -> None:
        storage.make_folder(self.folder)
        storage.sweep_old(self.folder)

    def path(self, learner: Learner, tasks: list[str]) -> Path:
        """Where the network of `learner` is, trained up to the last of these tasks (by their fingerprints)."""
        key = json.dumps([__version__, identifying(learner.training_settings(len(tasks) - 1)), tasks], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def caching(self, learner: Learner) -> AbstractContextManager[None]:
        """Inside, features and adapters of its networks are kept for others, and read where others have kept them."""
        return caching(TensorCache(self.folder / "cache" / __version__) if _shares(learner) else None)

    @contextmanager
    def held(self, learner: Learner, tasks: list[str]) -> Iterator[None]:
        """Wait until no one else trains this network, and let no one else begin."""
        if not _shares(learner):
            yield
            return
        lock = self.folder / f".{self.path(learner, tasks).stem}.lock"
        with ExitStack() as held:
            parallel.on_main(lambda: held.enter_context(storage.waiting(lock)))
            yield

    def load(self, learner: Learner, tasks: list[str], shape: tuple[int, ...]) -> Network | None:
        """The network, if it was trained before."""
        if not _shares(learner):
            return None
        path = self.path(learner, tasks)
        tensors = parallel.broadcast(lambda: storage.load_tensors(path) if path.exists() else None)
        if tensors is None:
            return None
        network = restore_network(
            learner.network, learner.head, shape, tensors, last_relu=learner.last_relu, side=learner.training.crop
        )
        return network.requires_grad_(False).to(choose_device(learner.device))

    def save(self, learner: Learner, tasks: list[str], network: Network) -> None:
        """Keep a network for others."""
        if _shares(learner):
            parallel.on_main(lambda: storage.save_tensors(self.path(learner, tasks), network.state_dict()))


def _shares(learner: Learner) -> bool:
    """Whether the settings say all about the training: not of a module of one's own, nor of weights from a file."""
    return learner.shares_training and isinstance(learner.network, str) and learner.weights is None
