"""A learner kept for years: its folder on disk."""

from __future__ import annotations

from engram.model.folder import ModelFolder
from engram.model.manifest import Change, File, Manifest
from engram.model.writing import KEEP, Writer

__all__ = ["KEEP", "Change", "File", "Manifest", "ModelFolder", "Writer"]
