"""Routes that measure the model: evidence from its stored features, and evaluation on uploaded images."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from engram.data.scanning import SkippedFile
from engram.model import Answer, Evidence, UnknownClass, evaluate_scores, evidence
from engram.server.api import (
    CLASS_NAME,
    FILE,
    Server,
    Services,
    UnreadableFile,
    form_description,
    labelled_files,
    predict_file,
    read_form,
    require_model,
    while_connected,
)
from engram.server.connections import address_of
from engram.server.inference import LoadedModel
from engram.server.problems import Problem

measures = APIRouter(prefix="/api", dependencies=[Depends(require_model)])


_known: WeakKeyDictionary[LoadedModel, Evidence] = WeakKeyDictionary()
_lock = threading.Lock()  # one computation at a time


class VersionEvidence(BaseModel):
    """The evidence about one version."""

    generation: int
    evidence: Evidence


def current_evidence(server: Services) -> VersionEvidence:
    """The evidence about the version in use."""
    loaded = server.loader.current()
    with _lock:
        if loaded not in _known:
            _known[loaded] = evidence(loaded.model)
        return VersionEvidence(generation=loaded.generation, evidence=_known[loaded])


@measures.get("/evidence")
def get_evidence(server: Server) -> VersionEvidence:
    """How well each class is recognised, what it is confused with, and whether more images would help."""
    return current_evidence(server)


class EvaluatedClass(BaseModel):
    """A class in an evaluation."""

    name: str
    images: int
    accuracy: float | None = Field(description="The share of its images that was recognised; null without images.")
    precision: float | None = Field(description="The share of predictions of it that was correct.")


class EvaluatedImage(BaseModel):
    """An image that was predicted as another class."""

    index: int = Field(description="Its position among the files.")
    name: str
    predicted: str
    probability: float


class EvaluationResponse(BaseModel):
    """The accuracy of one version on the uploaded images, none of which is stored."""

    generation: int
    images: int
    accuracy: float
    interval: tuple[float, float]
    mean_accuracy: float
    classes: list[EvaluatedClass]
    confusion: list[list[int]]
    unknown: list[UnknownClass] = Field(description="Classes that the model does not know; not part of the accuracy.")
    calibration_error: float
    wrong: list[EvaluatedImage] = Field(description="Wrong predictions, the most confident first.")
    skipped: list[UnreadableFile]


@measures.post("/evaluate", openapi_extra=form_description(files=FILE, classes=CLASS_NAME))
async def evaluate_images(request: Request, server: Server) -> EvaluationResponse:
    """Classify labelled images and compare. The model does not change, and nothing is stored."""
    async with read_form(request, server.config) as form:
        files, classes = labelled_files(form, server.config)
        loaded = await run_in_threadpool(server.loader.current)
        names = loaded.model.names
        known = [place for place, name in enumerate(classes) if name in names]
        if not known:
            raise Problem(422, "The model knows none of these classes. Use the names that it knows.")
        client = address_of(request.scope)
        answers = await while_connected(
            request, [predict_file(server, loaded, files[place], len(names), client) for place in known]
        )
    return await run_in_threadpool(_evaluation, loaded, classes, dict(zip(known, answers, strict=True)))


def _evaluation(
    loaded: LoadedModel, classes: list[str], answers: dict[int, Answer | UnreadableFile]
) -> EvaluationResponse:
    model = loaded.model
    unreadable = [each for each in answers.values() if isinstance(each, UnreadableFile)]
    read = {place: each for place, each in answers.items() if not isinstance(each, UnreadableFile)}
    if not read:
        raise Problem(422, f"No image can be read. {unreadable[0].problem}")
    class_indices = torch.tensor([model.class_index(classes[place]) for place in read])
    scores = torch.stack([_scores(loaded, each) for each in read.values()])
    unknown = Counter(name for name in classes if name not in model.names)
    evaluation = evaluate_scores(
        model,
        scores,
        class_indices,
        tuple(SkippedFile(Path(each.name), each.problem) for each in unreadable),
        tuple(UnknownClass(name, count) for name, count in unknown.items()),
    )
    wrong = [
        EvaluatedImage(
            index=place, name=classes[place], predicted=each.top[0].name, probability=each.top[0].probability
        )
        for place, each in read.items()
        if each.top[0].name != classes[place]
    ]
    numbers = {**evaluation.to_json(), "unknown": evaluation.unknown, "skipped": unreadable}
    return EvaluationResponse(
        generation=loaded.generation, wrong=sorted(wrong, key=lambda each: -each.probability), **numbers
    )


def _scores(loaded: LoadedModel, answer: Answer) -> Tensor:
    """Scores (K,) from the probabilities of all classes, up to a constant."""
    model, probabilities = loaded.model, {each.name: each.probability for each in answer.top}
    values = torch.tensor([probabilities[name] for name in model.names]).clamp(min=torch.finfo(torch.float32).tiny)
    return model.metadata.calibration.temperature * values.log()
