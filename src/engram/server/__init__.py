"""The HTTP front door: a model that people ask and teach over the network, and its page."""

from __future__ import annotations

from engram.server.app import make_app
from engram.server.config import Config
from engram.server.running import check_address, make_server

__all__ = ["Config", "check_address", "make_app", "make_server"]
