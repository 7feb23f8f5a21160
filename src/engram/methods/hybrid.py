"""Ours-hybrid: features, and a few images too, which are replayed in training and join the adapter's pairs."""

from __future__ import annotations

from dataclasses import dataclass

from engram.methods.features import Features
from engram.methods.replay import Rehearsing


@dataclass(kw_only=True)
class Hybrid(Rehearsing, Features):
    """P images and L features of every class (§5.2, Ours-hybrid): both halves are there already, and meet here."""
