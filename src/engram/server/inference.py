"""The model in use: loading it when it changes, and predicting in batches."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from engram.errors import DataError, EngramError
from engram.model import (
    Answer,
    Evidence,
    Model,
    ModelFolder,
    Rejection,
    answers,
    evidence,
    inconsistencies,
    load_version,
)
from engram.server.config import Config
from engram.server.problems import NO_MODEL, Problem

POLL_SECONDS = 0.2  # between two looks at which version is in use
RETRY_SECONDS = 5.0  # before a version that could not be loaded is tried again
RETRY_SHARE = 0.1  # of the time, at most, is spent on that
DAMAGED = "The model is damaged. Run 'engram verify' on the server."

log = logging.getLogger("engram.server")
ACCEPT_ALL = Rejection()


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A verified version of the model."""

    version: int
    model: Model
    image_size: int

    @cached_property
    def evidence(self) -> Evidence:
        """How well each class is recognised. This takes seconds at first."""
        return evidence(self.model)


class ModelLoader:
    """The model of a folder. A thread of low priority loads each version that comes into use; requests do not wait."""

    def __init__(self, folder: ModelFolder, config: Config, on_deleted: Callable[[], None]) -> None:
        self.folder, self.device, self.on_deleted = folder, config.device, on_deleted
        self._thread = ThreadPoolExecutor(1, "model", _lower_priority, (config.nice,))  # it alone changes what follows
        self._seen: tuple[int, str | None] | None = None  # the version last tried, and its checksum
        self._retry = math.inf  # when to try the same version again
        self._loaded: LoadedModel | None = None
        self._problem = NO_MODEL  # why nothing is loaded

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    @property
    def version(self) -> int | None:
        """The version that answers; None without a model."""
        loaded = self._loaded
        return None if loaded is None else loaded.version

    @property
    def damaged(self) -> int | None:
        """The version that should answer but is damaged; -1 if even its number is unreadable."""
        seen = self._seen
        return None if seen is None or seen[0] == self.version else seen[0]

    def current(self) -> LoadedModel:
        """The version that answers. One that was deleted does not: this waits for the next."""
        loaded = self._loaded
        if loaded is None or self.is_deleted(loaded):
            self.refresh()
            loaded = self._loaded
        if loaded is None:
            raise Problem(503, self._problem)
        return loaded

    def is_deleted(self, loaded: LoadedModel) -> bool:
        """Whether the folder no longer has this version, because one of its classes was forgotten, for example."""
        with suppress(DataError):
            return not self.folder.exists() or loaded.version not in self.folder.pointer().versions
        return False  # which versions a damaged folder has is unknown

    def refresh(self) -> None:
        """Load the version in use, unless it is loaded. A damaged version never replaces an intact one."""
        self._thread.submit(self._refresh).result()

    async def watch(self) -> None:
        """Load what other processes change."""
        while True:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._refresh)
            await asyncio.sleep(POLL_SECONDS)

    def _refresh(self) -> None:
        before, seen = self._loaded, self._in_use()
        if seen is None:
            self._loaded, self._seen, self._problem = None, None, NO_MODEL
        elif seen != self._seen or time.monotonic() >= self._retry:
            self._replace(seen)
        if before is not None and self.is_deleted(before):
            if self._loaded is before:  # the next one is damaged
                self._loaded = None
            self.on_deleted()

    def _in_use(self) -> tuple[int, str | None] | None:
        """The version in use and its checksum, without reading it."""
        try:
            pointer = self.folder.pointer() if self.folder.exists() else None
        except DataError:
            return (-1, None)
        if pointer is None or pointer.current is None:
            return None
        return pointer.current, pointer.versions.get(pointer.current)

    def _replace(self, seen: tuple[int, str | None]) -> None:
        begin = time.monotonic()
        try:
            self._loaded = self._load()
        except Exception as error:  # a damaged state may cause any error
            if seen != self._seen:  # log it once, not at every retry
                log.error("The model was not replaced: %s", error, exc_info=not isinstance(error, EngramError))
            self._problem = error.detail if isinstance(error, Problem) else DAMAGED
            now = time.monotonic()
            self._seen, self._retry = seen, now + max(RETRY_SECONDS, (now - begin) / RETRY_SHARE)
        else:
            # If yet another version came into use since, it is seen as new at the next look.
            self._seen, self._retry = (seen if self._loaded.version == seen[0] else None), math.inf

    def _load(self) -> LoadedModel:
        manifest, model = load_version(self.folder, device=self.device)
        if problems := list(inconsistencies(model)):
            raise DataError(" ".join(problems))
        if model.image_size is None:
            raise Problem(503, "This model takes vectors, not images. Use it from Python.")
        return LoadedModel(manifest.version, model, model.image_size)


def _lower_priority(nice: int) -> None:
    if sys.platform == "linux":  # elsewhere, threads have the priority of their process
        os.nice(nice)


@dataclass(frozen=True, eq=False)
class _Request:
    loaded: LoadedModel
    image: Tensor
    top: int
    rejection: Rejection
    answer: asyncio.Future[Answer]


class Batcher:
    """Predicts images that arrive at about the same time in one forward pass."""

    def __init__(self, config: Config, on_batch: Callable[[int], None] = lambda size: None) -> None:
        self.config, self.on_batch = config, on_batch
        self._waiting: dict[_Request, None] = {}  # oldest first
        self._turn = asyncio.Lock()  # one forward pass at a time; images that arrive meanwhile form the next batch
        self._thread = ThreadPoolExecutor(1, "forward")  # each thread that runs torch has its own OpenMP threads

    async def predict(self, loaded: LoadedModel, image: Tensor, top: int, rejection: Rejection = ACCEPT_ALL) -> Answer:
        """At least the `top` most probable classes of an image, and its similarity if the rejection needs it."""
        request = _Request(loaded, image, top, rejection, asyncio.get_running_loop().create_future())
        self._waiting[request] = None
        try:
            async with self._turn:
                if not request.answer.done():
                    await asyncio.sleep(self.config.batch_seconds)
                    await asyncio.shield(self._run_batch())
            return await request.answer
        finally:
            self._waiting.pop(request, None)  # the client has left

    def close(self) -> None:
        self._thread.shutdown()

    async def _run_batch(self) -> None:
        batch = list(islice(self._waiting, self.config.batch_size))
        for request in batch:
            del self._waiting[request]
        for loaded in dict.fromkeys(request.loaded for request in batch):
            await self._forward(loaded, [request for request in batch if request.loaded is loaded])

    async def _forward(self, loaded: LoadedModel, batch: list[_Request]) -> None:
        self.on_batch(len(batch))
        try:
            images = torch.stack([request.image for request in batch])
            top = max(request.top for request in batch)
            loop = asyncio.get_running_loop()
            rejections = [request.rejection for request in batch]
            results = await loop.run_in_executor(self._thread, answers, loaded.model, images, top, rejections)
        except Exception as error:
            for request in batch:
                if not request.answer.done():  # it may be cancelled
                    request.answer.set_exception(error)
        else:
            for request, result in zip(batch, results, strict=True):
                if not request.answer.done():
                    request.answer.set_result(result)
