"""The command line: translates options into calls of the package, and results into text."""

from engram.cli.app import main

__all__ = ["main"]
