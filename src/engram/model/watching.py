"""`watch`: learn new images of a folder once they have settled, one update at a time, across restarts.

The folder is polled: notifications of changes differ between systems, do not arrive from other machines on network
disks, and can be lost.

MODEL/watch/DIGEST/state.json records by digest of their path the files that were learned or skipped, with size and
modification time; it contains no names. Before an update it names the files under way and a batch number, which the
update writes into the model's history. So after a kill at any moment it is known whether they were learned.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from engram import storage
from engram.data.labelled import LabelledFiles, decode_files, scan
from engram.data.scanning import SkippedFile
from engram.errors import BusyError, DataError, EngramError, UsageError
from engram.model.folder import WATCH, ModelFolder
from engram.model.learning import UpdateRejected, UpdateResult, learn_files
from engram.model.manifest import Strict
from engram.model.plan import LearnOptions
from engram.progress import SILENT, Progress
from engram.text import printable

SETTLE = 5.0  # seconds without a change of size and time after which a file is complete
INTERVAL = 2.0  # seconds between two scans
PATIENCE = 60.0  # seconds that settled files wait for others, so that a copy in progress becomes one update
RETRY = 60.0  # seconds after which a failed update is tried again with the same files
CHECKED_SIDE = 32  # pixels: images are decoded once before the update, to find the unreadable ones
MAX_STATE = 2**30  # bytes of the state file

Signature = tuple[Annotated[int, Field(ge=0)], int]  # of a file: bytes, modification time in ns
BATCH = "batch"  # the entry of the model's history


@dataclass(frozen=True, kw_only=True)
class WatchEvent:
    """What happened to a watched folder."""

    event: Literal["watching", "learned", "skipped", "rejected", "failed", "waiting", "busy"]
    path: Path  # the skipped file, or else the folder
    reason: str = ""
    update: UpdateResult | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        update = {} if self.update is None else {"update": self.update.to_json()}
        reason = {"reason": self.reason} if self.reason else {}
        return {"event": self.event, "path": str(self.path), **reason, **update}


@dataclass(frozen=True, kw_only=True)
class WatchState(Strict):
    """The files that need no more attention, and those of the update under way, by digests of their paths."""

    done: Mapping[str, Signature] = field(default_factory=dict)
    pending: Mapping[str, Signature] = field(default_factory=dict)
    batch: str | None = None  # of the update under way

    def finished(self) -> WatchState:
        """The state when the update under way needs no more attention."""
        return WatchState(done={**self.done, **self.pending})


_STATE = pydantic.TypeAdapter(WatchState)


def watch(
    folder: ModelFolder,
    source: Path,
    options: LearnOptions | None = None,
    *,
    settle: float = SETTLE,
    interval: float = INTERVAL,
    once: bool = False,
    progress: Progress = SILENT,
) -> Iterator[WatchEvent]:
    """Learn the images of `source`, a folder with one sub-folder per class, and those that are added, as they settle.

    With `once`, it ends after everything that is there and settles has been learned. Only one process can watch a
    folder for a model.
    """
    if not (0 <= settle < math.inf and 0 < interval < math.inf):
        raise UsageError(f"Times must be positive numbers of seconds; found {settle} and {interval}.")
    if not os.path.isdir(source):
        raise UsageError(f"{printable(source)} is not a folder. Name one with one sub-folder per class.")
    folder.check_place()
    place = folder.path / WATCH / hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
    storage.make_folder(place)
    with storage.locked(place):
        watcher = _Watcher(folder, source, options or LearnOptions(), settle, place / "state.json")
        yield WatchEvent(event="watching", path=source)
        yield from watcher.poll(progress, hurry=once)
        while not once or settle:
            time.sleep(settle if once else interval)
            yield from watcher.poll(progress, hurry=once)
            if once:
                return


class _Watcher:
    """What is known of a watched folder between two scans."""

    def __init__(
        self, folder: ModelFolder, source: Path, options: LearnOptions, settle: float, state_path: Path
    ) -> None:
        self.folder, self.source, self.options, self.settle = folder, source, options, settle
        self.state_path = state_path
        self.state = self._restored()
        self.since: dict[Path, tuple[Signature, float]] = {}  # when each new file was first seen as it is
        self.reported: set[tuple[Path, str]] = set()
        self.failed: tuple[frozenset[Path], float] = (frozenset(), -math.inf)  # the last batch that failed, and when

    def poll(self, progress: Progress, *, hurry: bool) -> Iterator[WatchEvent]:
        """Scan once, and learn if new files have settled; in a `hurry`, without waiting for others to settle."""
        try:
            found = scan(self.source)
        except DataError as error:  # empty, unreadable, or two names for one class: perhaps not for long
            yield from self._report("waiting", self.source, str(error))
            return
        for each in found.skipped:
            yield from self._report("skipped", each.path, each.reason)
        now = time.monotonic()
        self._observe(found.paths, now)
        settled = {path for path, (_, since) in self.since.items() if now - since >= self.settle}
        waited = now - min((self.since[path][1] for path in settled), default=now) - self.settle
        if not settled or (len(settled) < len(self.since) and waited < PATIENCE and not hurry):
            return
        if settled == self.failed[0] and now - self.failed[1] < RETRY:
            return
        yield from self._learn(replace(found, skipped=()).where(lambda path, _: path in settled), progress)

    def _observe(self, paths: Sequence[Path], now: float) -> None:
        """Note new files and when they were last seen to change."""
        before, self.since = self.since, {}
        for path in paths:
            try:
                status = path.stat()
            except OSError:  # it was just removed
                continue
            signature = status.st_size, status.st_mtime_ns
            if self.state.done.get(self._key(path)) != signature:
                same = path in before and before[path][0] == signature
                self.since[path] = before[path] if same else (signature, now)

    def _learn(self, files: LabelledFiles, progress: Progress) -> Iterator[WatchEvent]:
        unreadable = [each for each in decode_files(files.paths, CHECKED_SIDE) if isinstance(each, SkippedFile)]
        if unreadable:
            yield from self._skip(unreadable)
            files = files.where(lambda path, _: path in self.since)
        if not files.paths:
            return
        pending = {self._key(path): self.since[path][0] for path in files.paths}
        self._save(replace(self.state, pending=pending, batch=secrets.token_hex(8)))
        try:
            update = learn_files(self.folder, files, self.options, progress, record={BATCH: self.state.batch})
        except BusyError as error:  # another process changes the model: try again at the next scan
            yield from self._report("busy", self.source, str(error))
        except UpdateRejected as error:
            self._save(self.state.finished())
            yield WatchEvent(event="rejected", path=self.source, reason=str(error))
        except EngramError as error:
            self.failed = frozenset(files.paths), time.monotonic()
            yield from self._report("failed", self.source, str(error))
        else:
            self._save(self.state.finished())
            self.reported = {each for each in self.reported if each[0] != self.source}
            yield WatchEvent(event="learned", path=self.source, update=update)

    def _skip(self, unreadable: Sequence[SkippedFile]) -> Iterator[WatchEvent]:
        """Report files and never try them again, unless they change."""
        done = {self._key(each.path): self.since.pop(each.path)[0] for each in unreadable}
        self._save(WatchState(done={**self.state.done, **done}))
        for each in unreadable:
            yield WatchEvent(event="skipped", path=each.path, reason=each.reason)

    def _report(
        self, event: Literal["skipped", "failed", "waiting", "busy"], path: Path, reason: str
    ) -> Iterator[WatchEvent]:
        """An event, unless it was the same before."""
        if (path, reason) not in self.reported:
            self.reported.add((path, reason))
            yield WatchEvent(event=event, path=path, reason=reason)

    def _key(self, path: Path) -> str:
        return hashlib.sha256(os.fsencode(path.relative_to(self.source))).hexdigest()[:32]

    def _restored(self) -> WatchState:
        """The state that was saved. An update that was under way is finished if the model's history has its batch."""
        if not self.state_path.exists():
            return WatchState()
        content = storage.read_inside(self.state_path.parent, self.state_path.name, MAX_STATE)
        try:
            state = _STATE.validate_json(content)
        except pydantic.ValidationError as error:
            raise DataError(
                f"{printable(self.state_path)} is damaged. Remove it to learn all images of the folder again."
            ) from error
        history = self.folder.history() if state.batch is not None and self.folder.exists() else ()
        learned = any(change.details.get(BATCH) == state.batch for change in history)
        return state.finished() if learned else WatchState(done=state.done)

    def _save(self, state: WatchState) -> None:
        self.state = state
        storage.write_file(self.state_path, storage.json_bytes(asdict(state)))
