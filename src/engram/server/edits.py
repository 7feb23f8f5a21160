"""Changes of what a model knows: classes forgotten, renamed, joined; an earlier generation in use again."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from engram.model import EditResult, ModelFolder, forget, merge, rename, rollback
from engram.server import shapes
from engram.server.jobs import Jobs
from engram.server.problems import NoModel
from engram.text import LONGEST_NAME

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Forget(_Order):
    """Classes to forget, with every earlier generation."""

    classes: Annotated[list[Name], Field(min_length=1, max_length=10_000)]


class Rename(_Order):
    """A class, and its new name."""

    old: Annotated[Name, Field(alias="from")]
    new: Annotated[Name, Field(alias="to")]


class Merge(_Order):
    """A class, and the one that answers for both from then on."""

    name: Annotated[Name, Field(alias="class")]
    into: Name


class Rollback(_Order):
    """The generation to use again; none: the one that the present one was made from."""

    to: Annotated[int, Field(ge=1, le=2**53)] | None = None


def add_edits(app: FastAPI, folder: ModelFolder, jobs: Jobs) -> None:
    """Let each of them be asked for."""

    def require() -> None:
        if not folder.exists():
            raise NoModel(404)

    @app.post("/api/forget")
    def forget_classes(order: Forget) -> shapes.Edited:
        """Remove classes, with every earlier generation. There is no way back."""
        require()
        edited = forget(folder, order.classes)
        jobs.forget()
        return _told(edited)

    @app.post("/api/rename")
    def rename_class(order: Rename) -> shapes.Edited:
        """Give a class another name."""
        require()
        return _told(rename(folder, order.old, order.new))

    @app.post("/api/merge")
    def merge_classes(order: Merge) -> shapes.Edited:
        """Join a class into another."""
        require()
        return _told(merge(folder, order.name, order.into))

    @app.post("/api/rollback")
    def roll_back(order: Rollback) -> shapes.Edited:
        """Use an earlier generation again."""
        require()
        return _told(rollback(folder, order.to))


def _told(edited: EditResult) -> shapes.Edited:
    return shapes.Edited(**edited.to_json())
