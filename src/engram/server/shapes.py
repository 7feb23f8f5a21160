"""What answers look like: the part of the OpenAPI document that says what comes back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engram.model import (
    Adaptation,
    ByteCounts,
    Calibration,
    ClassAccuracy,
    ClassProbability,
    ClassSummary,
    HeldOutCounts,
)

Share = Annotated[float, Field(ge=0, le=1)]


class Alive(BaseModel):
    """The server runs."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """The generation that answers, and a newer one that is damaged and therefore does not."""

    generation: int
    damaged: int | None = None


class Candidate(BaseModel):
    """A class, and how likely it is."""

    name: str = Field(serialization_alias="class")
    probability: Share


class Predicted(BaseModel):
    """What the model says of a picture, likeliest first."""

    name: str = Field(description="The name that the file was sent with.")
    top: list[Candidate]
    rejected: bool = Field(description="Its likeliest class is less likely than was asked for.")

    @classmethod
    def of(cls, name: str, answers: tuple[ClassProbability, ...], top: int, reject: float) -> Predicted:
        """The likeliest of these answers."""
        best = [Candidate(name=each.name, probability=min(each.probability, 1.0)) for each in answers[:top]]
        return cls(name=name, top=best, rejected=answers[0].probability < reject)


class Unreadable(BaseModel):
    """Why nothing can be said of a file."""

    name: str
    problem: str


class Predictions(BaseModel):
    """What one generation says of the files, in the order they were sent."""

    generation: int
    calibrated: bool = Field(description="Whether probabilities were calibrated on held-out pictures.")
    predictions: list[Predicted | Unreadable]


class SkippedFile(BaseModel):
    """A file that was not learned from, and why."""

    name: str
    reason: str


class Outcome(BaseModel):
    """What was learned, as `engram learn --json` tells it."""

    generation: int
    new: dict[str, int] = Field(description="Pictures of each class that was not known before.")
    more: dict[str, int] = Field(description="Pictures of each class that was.")
    classes: int
    memory_bytes: int
    seen_bytes: int
    seconds: float
    accuracy: Share | None = Field(description="On held-out pictures; null where none were held out.")
    interval: tuple[Share, Share] | None = Field(description="The 95 % interval of accuracy.")
    held_out: int = Field(description="Pictures that accuracy was measured on, and below their classes.")
    held_out_classes: int
    estimated: bool = Field(description="The network has changed since some of them were seen.")
    class_accuracies: list[ClassAccuracy]
    calibration: Calibration
    adaptation: Adaptation | None
    network: str
    tuned: bool
    tuning: str
    classifier: str
    warnings: list[str]
    skipped: list[SkippedFile]


class Standing(BaseModel):
    """How far a phase of a lesson is."""

    phase: str
    done: int
    of: int | None
    seconds_left: float | None


class Lesson(BaseModel):
    """A lesson, and what became of it."""

    id: str
    state: Literal["queued", "learning", "done", "failed", "cancelled"]
    created: str
    classes: dict[str, int]
    progress: Standing | None
    result: Outcome | None
    problem: str | None


class Lessons(BaseModel):
    """All lessons that are remembered, oldest first."""

    jobs: list[Lesson]


class Generation(BaseModel):
    """How a generation came about, and whether it can be gone back to."""

    generation: int
    created: str
    action: str
    details: dict[str, Any]
    kept: bool
    in_use: bool
    learned: dict[str, int]


class Inventory(BaseModel):
    """What the model knows and keeps, as `engram inspect --json` tells it."""

    generation: int
    created: str
    engram: str
    method: str
    network: str
    image_size: int | None
    classes: list[ClassSummary]
    bytes: ByteCounts
    budget: int | None
    features_per_class: int | None
    codec: str
    settings: dict[str, Any]
    defaults: dict[str, Any]
    changed: dict[str, Any]
    classifier: str
    held_out_counts: HeldOutCounts
    accuracy: Share | None
    interval: tuple[Share, Share] | None
    calibration: Calibration
    adaptation: Adaptation | None
    history: list[Generation]


class Edited(BaseModel, extra="allow"):
    """The model after a change, and what was done."""

    action: str
    generation: int
    classes: list[str]


class Session(BaseModel):
    """Whether this browser is signed in, and whether it has to be."""

    authenticated: bool
    token_required: bool
