"""A worker's adapters: reads them beside running steps, keeps as many as --max-loras, and names them to routers.

Everything but the reading runs on the I/O loop. The reading has a thread of its own, which computes on one core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.contracts.adapters import NAME_WORDS, NOBODYS, AdapterRef, AdapterShare, is_adapter_name
from common.contracts.errors import (
    FieldViolation,
    InvalidConfig,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuireError,
    Unavailable,
)
from common.contracts.limits import MAX_ADAPTER_PATH_CHARS, MAX_ADAPTERS
from gpuworker.scheduling.adapter_table import Adapter, AdapterTable, check_bytes
from quire.gpuworker.v1 import gpuworker_pb2 as pb

log = logging.getLogger(__name__)
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
WATCH_SECONDS: Final = 1.0
"""Between two looks at the folder of --lora-dir."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and prepared for the model."""

    fingerprint: str
    rank: int
    num_bytes: int
    weights: object


class UnfitAdapter(ValueError):
    """A folder that has no adapter for this model, with the reason and what to do."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """How many adapters are in memory at once, and below which folder, with links followed, others are; None: none."""

    max_held: int
    root: Path | None = None


class AdapterStore:
    """`read` reads a folder, on any thread, and raises UnfitAdapter. `begin_thread` prepares the thread of loads."""

    def __init__(
        self,
        read: Callable[[Path], ReadAdapter],
        limits: AdapterLimits,
        begin_thread: Callable[[], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._limits, self._now = read, limits, now
        self._table = AdapterTable(limits.max_held)
        self._thread = ThreadPoolExecutor(1, "quire-adapters", initializer=begin_thread)
        self._turn = asyncio.Lock()  # of loads: one reads at a time
        # Of the root's folders: what the last look saw, and what was taken in.
        self._seen: dict[str, Stamp] = {}
        self._taken: dict[str, Stamp] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called when what routers should know has changed."""
        self.load_seconds = 0.0
        """Of the last load, from its turn to its end; 0: there was none."""

    def load_at_start(self, given: Iterable[tuple[str, Path]]) -> None:
        """Read the adapters of the command line; the first ones stay in memory. Raises InvalidConfig."""
        wrong = []
        for name, folder in given:
            try:
                read = self._read(folder)
            except UnfitAdapter as error:
                wrong.append(FieldViolation("--lora", f"{name}={folder}: {error}"))
                continue
            adapter = self._table.add(_adapter_of(name, folder, read))
            if self._table.num_held < self._limits.max_held:
                self._table.fill(adapter, read.weights)
        if wrong:
            raise InvalidConfig(*wrong)

    # ------------------------------------------------------------ sequences

    def find(self, name: str, fingerprint: str) -> Adapter:
        """Return an adapter in memory. Raises as `AdapterTable.find_held` does."""
        return self._table.find_held(name, fingerprint)

    def use(self, adapter: Adapter) -> None:
        """Count a sequence that begins."""
        self._table.use(adapter)

    def release(self, adapter: Adapter) -> None:
        """Count the end of a sequence."""
        self._table.release(adapter)

    # ------------------------------------------------------------ routers

    async def load(self, wanted: AdapterRef, path: str = "", share: AdapterShare = NOBODYS, folder: str = "") -> None:
        """Have an adapter in memory: one that is known, or the one at a path below the root, and below its `folder`.

        The fingerprint of `wanted` is what a router expects; "" takes any content. `share` says for whom it is. Raises
        InvalidRequest for a path without an adapter for this model, NotFound for an unknown name, and PermissionDenied
        for a path elsewhere, and for an adapter larger than its tenant may have. Where it finds no room, a new one is
        known and not in memory; for a known one Overloaded is raised, and it has a place in the line of loads.
        """
        if not is_adapter_name(wanted.name):
            raise InvalidRequest(FieldViolation("lora_name", f"is {wanted.name[:64]!r}; expected {NAME_WORDS}"))
        async with self._turn:
            before = self._table.changes
            try:
                await self._load(wanted, path, share, folder)
            finally:
                if self._table.changes != before:
                    self.changed()

    async def _load(self, wanted: AdapterRef, path: str, share: AdapterShare, below: str) -> None:
        known = None if path else self._table.get(wanted.name)
        folder = self._below_root(path, below) if known is None else Path(known.source)
        if known is not None:
            _check_content(known, wanted)
            self._table.check_room(known, share, self._now())
            if known.is_open:
                return
        began = self._now()
        read = await self._read_beside(folder) if known is None else await self._read_again(known)
        found, left = _adapter_of(wanted.name, folder, read), list[Adapter]()
        check_bytes(found, share)
        adapter = self._table.add(found, share)
        try:
            left = self._table.fill(adapter, read.weights, share, self._now())
        except Overloaded:
            if known is not None:
                raise
            self._table.leave_line(adapter.name)
            log.warning("adapter %s is known, and not in memory: all that are there are in use", wanted.name)
        finally:
            self.load_seconds = self._now() - began
        log.info("adapter %s loaded in %.3f s", wanted.name, self.load_seconds, extra={"source": str(folder)})
        for each in left:
            log.info("adapter %s left memory for it", each.name)

    async def _read_again(self, known: Adapter) -> ReadAdapter:
        """Read a known adapter for a request. Its client is told neither of folders nor of what is wrong in them."""
        try:
            read = await self._read_beside(Path(known.source))
        except InvalidRequest as unfit:
            log.warning("adapter %s cannot be read again from %s: %s", known.name, known.source, unfit)
            raise NotFound(f"adapter {known.name!r} cannot be read any more; {_BY_OPERATOR}") from None
        if self._known(known.name) is None:
            raise NotFound(f"adapter {known.name!r} was unloaded while it was read; {_BY_OPERATOR}")
        if read.fingerprint != known.fingerprint:
            log.warning("adapter %s has changed in %s since it was loaded; load it again", known.name, known.source)
            raise NotFound(f"adapter {known.name!r} has changed on its disk since it was loaded; {_BY_OPERATOR}")
        return read

    async def _read_beside(self, folder: Path) -> ReadAdapter:
        began = self._now()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, folder)
        except UnfitAdapter as error:
            raise InvalidRequest(FieldViolation("lora_path", str(error))) from None
        finally:
            self._table.note_read(self._now() - began)

    def _below_root(self, path: str, below: str = "") -> Path:
        """Return the folder that a path names. Links are followed first, those of its files too, so none leads out.

        `below` is the folder of the root that it must lie in; "": anywhere in the root.
        """
        root = self._limits.root
        if root is None:
            what = "this worker loads no adapters at run time; start it with --lora-dir, and load from below its folder"
            raise PermissionDenied(what)
        if not path or len(path) > MAX_ADAPTER_PATH_CHARS or "\0" in path:
            what = f"expected the path of a folder, at most {MAX_ADAPTER_PATH_CHARS} characters"
            raise InvalidRequest(FieldViolation("lora_path", what))
        try:
            folder = (root / path).resolve()
            places = [folder, *((folder / name).resolve() for name in ADAPTER_FILES)]
        except (OSError, RuntimeError):  # RuntimeError: Python 3.11 and 3.12, for links that lead in a circle
            raise InvalidRequest(
                FieldViolation("lora_path", "has links that lead nowhere; expected a folder below --lora-dir")
            ) from None
        if not all(each.is_relative_to(root / below) for each in places):
            where = f"the folder {below} of --lora-dir" if below else str(root)
            raise PermissionDenied(f"adapters are loaded from below {where} alone; copy the folder there")
        return folder

    # ------------------------------------------------------------ the folder

    async def watch(self) -> None:
        """Keep the names of the root's folders known, until this task is cancelled."""
        while True:
            await self.look_at_root()
            await asyncio.sleep(WATCH_SECONDS)

    async def look_at_root(self) -> None:
        """Take in what has changed below the root since the last look.

        A folder is an adapter under its own name, from the second look on that finds it as it is: it is written by
        then. One that has gone is forgotten. What a load or the command line named stays as it is.
        """
        if self._limits.root is None:
            return
        before, self._seen = (
            self._seen,
            await asyncio.get_running_loop().run_in_executor(self._thread, _folders_of, self._limits.root),
        )
        for name, stamp in self._seen.items():
            if before.get(name) == stamp and self._taken.get(name) != stamp:
                self._taken[name] = stamp
                await self._take_folder(name, self._limits.root / name)
        for name in self._taken.keys() - self._seen.keys():
            del self._taken[name]
            known = self._known(name)
            if known is not None and Path(known.source) == self._limits.root / name:
                self.unload(name)

    async def _take_folder(self, name: str, folder: Path) -> None:
        known = self._known(name)
        if known is not None and Path(known.source) != folder:
            log.warning("the folder %s is passed over: %s is loaded from %s", folder, name, known.source)
            return
        async with self._turn:
            try:
                read = await self._read_beside(self._below_root(name))
                adapter = self._table.add(_adapter_of(name, folder, read))
            except QuireError as refused:
                log.warning("the adapter in %s cannot be served: %s", folder, refused)
                return
            if self._table.may_take(adapter):
                self._table.fill(adapter, read.weights)
        log.info("adapter %s is known", name, extra={"source": str(folder)})
        self.changed()

    def _known(self, name: str) -> Adapter | None:
        return next((each for each in self._table.known if each.name == name), None)

    def unload(self, name: str) -> None:
        """Forget an adapter; its memory is free once its last sequence has ended. Raises NotFound."""
        self._table.remove(name)
        log.info("adapter %s unloaded", name)
        self.changed()

    def message(self) -> pb.Adapters:
        """Return what routers should know."""
        known = [
            pb.Adapter(
                name=each.name,
                fingerprint=each.fingerprint,
                rank=each.rank,
                num_bytes=each.num_bytes,
                in_memory=each.is_open,
            )
            for each in self._table.known
        ]
        return pb.Adapters(adapters=known, load_seconds=self.load_seconds, max_in_memory=self._limits.max_held)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


_BY_OPERATOR: Final = "ask the operator to load it again"


def _check_content(known: Adapter, wanted: AdapterRef) -> None:
    """Raise Unavailable where a name has got another content than a router knows: it is about to hear of that."""
    if wanted.fingerprint not in ("", known.fingerprint):
        raise Unavailable(f"adapter {known.name!r} has another content at this worker than the router knows")


Stamp = tuple[int, int, int, int]
"""When the two files of an adapter were written, and their sizes."""


def _folders_of(root: Path) -> dict[str, Stamp]:
    """Return the folders below the root that may be adapters, by their names, a bounded number of them."""
    found: dict[str, Stamp] = {}
    try:
        folders = sorted(root.iterdir())
    except OSError as error:
        log.warning("the folder %s cannot be read: %s", root, error.strerror or error)
        return found
    for folder in folders:
        if len(found) == MAX_ADAPTERS or not is_adapter_name(folder.name):
            continue
        try:
            config, weights = (folder / name for name in ADAPTER_FILES)
            stats = config.stat(), weights.stat()
        except OSError:
            continue
        found[folder.name] = (*(each.st_mtime_ns for each in stats), *(each.st_size for each in stats))  # type: ignore[assignment]
    return found


def _adapter_of(name: str, folder: Path, read: ReadAdapter) -> Adapter:
    return Adapter(name, read.fingerprint, read.rank, read.num_bytes, str(folder))
