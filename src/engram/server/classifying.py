"""Routes that classify uploaded images: predictions, and the evaluation of labelled images. Nothing is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs it below Python 3.12

from engram.data.images import UnreadableImage
from engram.data.scanning import SkippedFile
from engram.errors import UsageError
from engram.model import Answer, DoubtfulImage, Rejection, UnknownClass, evaluate_scores, rejection
from engram.server.connections import address_of
from engram.server.decoding import COSTLY_IMAGES
from engram.server.inference import ACCEPT_ALL, LoadedModel
from engram.server.problems import Problem, too_many
from engram.server.services import Server, Services, require_model
from engram.server.uploads import (
    CLASS_NAME,
    FILE,
    file_name,
    form_description,
    labelled_files,
    read_form,
    uploaded_files,
)

Result = TypeVar("Result")
Reject = Annotated[
    Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^(auto|[0-9]{1,2}(\.[0-9]{1,6})?%)$")],
    Query(),
]

classifying = APIRouter(prefix="/api")

PredictedClass = TypedDict("PredictedClass", {"class": str, "probability": Annotated[float, Field(ge=0, le=1)]})


class ImagePrediction(BaseModel):
    """The most probable classes of an image, most probable first."""

    name: str = Field(description="The name of the uploaded file.")
    top: list[PredictedClass]
    rejected: bool = Field(description="It is probably of none of the classes, by `reject`.")


class UnreadableFile(BaseModel):
    """Why a file could not be classified."""

    name: str
    problem: str


class Predictions(BaseModel):
    """Predictions of one version, in the order of the files."""

    version: int
    calibrated: bool = Field(description="Whether probabilities were calibrated on held-out images.")
    predictions: list[ImagePrediction | UnreadableFile]


@classifying.post("/classify", openapi_extra=form_description(files=FILE))
async def classify(
    request: Request,
    server: Server,
    top: Annotated[int, Query(ge=1, le=100)] = 5,
    reject: Reject = 0.0,
) -> Predictions:
    """Predict the classes of images.

    `reject` is a probability, below which the most probable class is not accepted, or `auto` or a rate such as `5%`:
    about this share of images of unknown classes is accepted.
    """
    await run_in_threadpool(server.loader.current)  # without a model, do not read the upload
    async with read_form(request, server.config) as form:
        files = uploaded_files(form, server.config)
        loaded = await run_in_threadpool(server.loader.current)
        try:
            rejected = await run_in_threadpool(rejection, loaded.model, reject or None)
        except UsageError as error:  # the value is valid: it is the model that cannot reject by it
            raise Problem(409, str(error)) from error
        answers = await _answers(request, server, loaded, files, top, rejected)
    predictions = [
        _prediction(file_name(file), answer, top, rejected) for file, answer in zip(files, answers, strict=True)
    ]
    found = Predictions(version=loaded.version, calibrated=loaded.model.is_calibrated, predictions=predictions)
    server.webhook.send("classified", **found.model_dump(mode="json"))
    return found


def _prediction(
    name: str, answer: Answer | UnreadableImage, top: int, rejected: Rejection
) -> ImagePrediction | UnreadableFile:
    if isinstance(answer, UnreadableImage):
        return UnreadableFile(name=name, problem=str(answer))
    return ImagePrediction(
        name=name,
        top=[{"class": each.name, "probability": min(each.probability, 1.0)} for each in answer.top[:top]],
        rejected=rejected.rejects(answer.top[0].probability, answer.similarity),
    )


async def _answers(
    request: Request,
    server: Services,
    loaded: LoadedModel,
    files: Sequence[UploadFile],
    top: int,
    rejected: Rejection = ACCEPT_ALL,
) -> list[Answer | UnreadableImage]:
    """For each image at least the `top` most probable classes, or why it cannot be read."""
    client = address_of(request.scope)
    answers = await _while_connected(request, [_answer(server, loaded, file, top, rejected, client) for file in files])
    if await run_in_threadpool(server.loader.is_deleted, loaded):
        raise Problem(503, "The model has changed meanwhile. Send the images again.", {"Retry-After": "1"})
    return answers


async def _answer(
    server: Services, loaded: LoadedModel, file: UploadFile, top: int, rejected: Rejection, client: str
) -> Answer | UnreadableImage:
    decoders = server.decoders
    try:
        async with decoders.turn(client):
            if wait := decoders.seconds_to_wait(client):
                raise too_many(COSTLY_IMAGES, wait)
            content, size = await file.read(), loaded.image_size
            loop = asyncio.get_running_loop()
            image = await loop.run_in_executor(decoders.threads, decoders.decode, content, size, client)
    except UnreadableImage as error:
        server.metrics.images.labels("unreadable").inc()
        return error
    answer = await server.batcher.predict(loaded, image, top, rejected)
    server.metrics.images.labels("answered").inc()
    return answer


async def _while_connected(request: Request, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order. An error, or the end of the connection, cancels what is left."""
    tasks = [asyncio.create_task(each) for each in work]
    results = asyncio.create_task(_gather(tasks))
    end = asyncio.ensure_future(request.receive())  # the body is read: it is the end
    try:
        await asyncio.wait((results, end), return_when=asyncio.FIRST_COMPLETED)
        if results.done():
            return results.result()
        raise Problem(400, "The connection was closed.")
    finally:
        for task in (results, *tasks, end):
            task.cancel()


async def _gather(tasks: Sequence[asyncio.Task[Result]]) -> list[Result]:
    return await asyncio.gather(*tasks)  # in a task: a cancelled future of `gather` would be logged as an error


class EvaluatedClass(BaseModel):
    """A class in an evaluation."""

    name: str
    images: int
    accuracy: float | None = Field(description="The share of its images that was recognised; null without images.")
    precision: float | None = Field(description="The share of predictions of it that was correct.")


class EvaluationResponse(BaseModel):
    """The accuracy of one version on the uploaded images, as `engram evaluate --json` prints it."""

    version: int
    images: int
    accuracy: float
    interval: tuple[float, float]
    mean_accuracy: float
    classes: list[EvaluatedClass]
    confusion: list[list[int]]
    unknown: list[UnknownClass] = Field(description="Classes that the model does not know; not part of the accuracy.")
    calibration_error: float
    calibration_error_uncalibrated: float
    wrong: list[DoubtfulImage] = Field(description="Wrong predictions, the most confident first, by file.")
    skipped: list[SkippedFile]


@classifying.post(
    "/evaluate", openapi_extra=form_description(files=FILE, classes=CLASS_NAME), dependencies=[Depends(require_model)]
)
async def evaluate_images(request: Request, server: Server) -> EvaluationResponse:
    """Classify labelled images and compare. The model does not change, and nothing is stored."""
    async with read_form(request, server.config) as form:
        files, classes = labelled_files(form, server.config)
        loaded = await run_in_threadpool(server.loader.current)
        names = loaded.model.names
        known = [index for index, name in enumerate(classes) if name in names]
        if not known:
            raise Problem(422, "The model knows none of these classes. Use the names that it knows.")
        answers = await _answers(request, server, loaded, [files[index] for index in known], len(names))
    skipped, read = [], {}
    for index, answer in zip(known, answers, strict=True):
        if isinstance(answer, UnreadableImage):
            skipped.append(SkippedFile(Path(file_name(files[index])), str(answer)))
        else:
            read[index] = answer
    if not read:
        raise Problem(422, f"No image can be read. {skipped[0].reason}")
    return await run_in_threadpool(_evaluation, loaded, classes, read, tuple(skipped))


def _evaluation(
    loaded: LoadedModel, classes: list[str], read: dict[int, Answer], skipped: tuple[SkippedFile, ...]
) -> EvaluationResponse:
    model = loaded.model
    class_indices = torch.tensor([model.class_index(classes[index]) for index in read])
    scores = torch.stack([_scores(loaded, each) for each in read.values()])
    unknown = Counter(name for name in classes if name not in model.names)
    evaluation = evaluate_scores(
        model, scores, class_indices, skipped, tuple(UnknownClass(name, count) for name, count in unknown.items())
    )
    wrong = [
        DoubtfulImage(index=index, name=classes[index], predicted=best.name, probability=best.probability)
        for index, (best, *_) in ((index, each.top) for index, each in read.items())
        if best.name != classes[index]
    ]
    wrong.sort(key=lambda each: -each.probability)
    return EvaluationResponse(version=loaded.version, wrong=wrong, **evaluation.to_json())


def _scores(loaded: LoadedModel, answer: Answer) -> Tensor:
    """Scores (K,) from the probabilities of all classes, up to a constant."""
    model, probabilities = loaded.model, {each.name: each.probability for each in answer.top}
    values = torch.tensor([probabilities[name] for name in model.names]).clamp(min=torch.finfo(torch.float32).tiny)
    return model.metadata.calibration.temperature * values.log()
