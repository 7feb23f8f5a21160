"""The HTTP front door: an API and a page to query, update and edit a model."""

from __future__ import annotations

from engram.server.app import make_app, make_server
from engram.server.config import Config

__all__ = ["Config", "make_app", "make_server"]
