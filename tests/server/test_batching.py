"""Images of several requests are predicted in one batch per model."""

from __future__ import annotations

import asyncio

import torch
from models_made import TULIP
from server_made import image_bytes

from engram.data.images import decode
from engram.model import Answer, ModelFolder, load, rename
from engram.server import Config
from engram.server.inference import Batcher, LoadedModel


def test_each_image_is_predicted_by_its_own_model_in_few_batches(model: ModelFolder) -> None:
    old = LoadedModel(2, load(model, device="cpu"), 16)
    rename(model, TULIP, "tulip")
    new = LoadedModel(3, load(model, device="cpu"), 16)
    image = decode(image_bytes(TULIP), size=16)
    passes: list[int] = []

    async def ask() -> list[Answer]:
        batcher = Batcher(Config(batch_seconds=0.05), passes.append)
        try:
            return list(await asyncio.gather(*(batcher.predict(each, image, 3) for each in (old, new) * 4)))
        finally:
            batcher.close()

    answers = asyncio.run(ask())
    assert passes == [4, 4]
    expected = [set(old.model.names), set(new.model.names)] * 4
    assert [{each.name for each in answer.top} for answer in answers] == expected
    alone = old.model.probabilities(image[None]).max()
    assert torch.isclose(alone, torch.tensor(answers[0].top[0].probability), atol=1e-4)


def test_images_of_clients_that_left_do_not_hold_up_others(model: ModelFolder) -> None:
    loaded = LoadedModel(2, load(model, device="cpu"), 16)
    image = decode(image_bytes(TULIP), size=16)

    async def ask() -> Answer:
        batcher = Batcher(Config(batch_size=2))
        try:
            left = [asyncio.create_task(batcher.predict(loaded, image, 3)) for _ in range(9)]
            await asyncio.sleep(0)
            for task in left:
                task.cancel()
            return await asyncio.wait_for(batcher.predict(loaded, image, 3), 10)
        finally:
            batcher.close()

    assert len(asyncio.run(ask()).top) == 3
