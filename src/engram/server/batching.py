"""Pictures that arrive at about the same time go through the network together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.model import ClassProbability, top_classes
from engram.server.config import Config
from engram.server.snapshot import Snapshot

Answers = tuple[ClassProbability, ...]


@dataclass(frozen=True, eq=False)
class _Asked:
    snapshot: Snapshot
    image: Tensor
    top: int
    answered: asyncio.Future[Answers]


class Batches:
    """Collects single pictures, and answers each by the snapshot that its request began with."""

    def __init__(self, config: Config, tell: Callable[[int], None] = lambda size: None) -> None:
        self.config, self.tell = config, tell
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "forward")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the loop that is running."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown()

    async def ask(self, snapshot: Snapshot, image: Tensor, top: int) -> Answers:
        """At least the `top` likeliest classes with their probabilities, likeliest first."""
        answered: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        await self._waiting.put(_Asked(snapshot, image, top, answered))
        return await answered

    async def _run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(self.config.batch_seconds)
            while len(batch) < self.config.batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            for snapshot in dict.fromkeys(asked.snapshot for asked in batch):
                await self._forward(snapshot, [asked for asked in batch if asked.snapshot is snapshot])

    async def _forward(self, snapshot: Snapshot, batch: list[_Asked]) -> None:
        self.tell(len(batch))
        images = torch.stack([asked.image for asked in batch])
        top = max(asked.top for asked in batch)
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, top_classes, snapshot.model, images, top)
        except Exception as error:
            for asked in batch:
                if not asked.answered.done():
                    asked.answered.set_exception(error)
            return
        for asked, each in zip(batch, answers, strict=True):
            if not asked.answered.done():
                asked.answered.set_result(each)
