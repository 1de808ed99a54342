"""Debug output of a running service, also while its event loop is blocked.

SIGUSR1 writes the stacks of all threads to stderr (`faulthandler`, which needs no interpreter). SIGUSR2 writes a dump
to a file for `quire debug dump`: stacks, asyncio tasks and a summary of the service's state.
A signal and a file in the state directory need no port, no thread and no RPC, and only the same user may send one.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import itertools
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

log = logging.getLogger(__name__)

MAX_THREADS: Final = 64
MAX_TASKS: Final = 200
MAX_FRAMES: Final = 30
# Tasks with frames of these files alone wait for the next call; there is one for each method.
_GRPC_SOURCES: Final = "grpcio/grpc/_cython/"
State = Callable[[], Mapping[str, object]]


def stacks_on_signal() -> None:
    """Make SIGUSR1 write the stacks of all threads to stderr."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def dumps_on_signal(service: str, address: str, state_dir: Path, state: State) -> None:
    """Make SIGUSR2 write a dump. Call it on the main thread, in the event loop whose tasks the dump lists.

    By an entry in `state_dir`/debug `quire debug dump` finds this process. Without a place to write there are no dumps.
    """
    entry, loop = entry_path(state_dir, os.getpid()), asyncio.get_running_loop()

    def write(_: int, frame: FrameType | None) -> None:
        found = {"threads": _threads(frame), "tasks": _tasks(loop), "state": _read(state)}
        _write(dump_path(entry), found)

    about = {"service": service, "address": address, "pid": os.getpid(), "created": psutil.Process().create_time()}
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        signal.signal(signal.SIGUSR2, write)
        _write(entry, about)
    except OSError as error:
        log.info("no dumps for `quire debug dump`: %s", error)
        return
    atexit.register(entry.unlink, missing_ok=True)


def entry_path(state_dir: Path, pid: int) -> Path:
    """Return the file that announces a process that writes dumps."""
    return state_dir.resolve() / "debug" / f"{pid}.json"


def dump_path(entry: Path) -> Path:
    return entry.with_suffix(".dump")


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Write the file as a whole: a reader sees all of it or none."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, default=str))
    unfinished.replace(path)


def _read(state: State) -> Mapping[str, object]:
    try:
        return state()
    except RuntimeError as error:  # another thread changed a container meanwhile
        return {"error": f"the state changed while it was read ({error}); ask again"}


def _threads(interrupted: FrameType | None) -> dict[str, list[str]]:
    """Return the stack of each thread; for the main thread, the stack that the signal interrupted."""
    frames = sys._current_frames()
    main = threading.main_thread()
    if interrupted is not None and main.ident is not None:
        frames[main.ident] = interrupted
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    listed = sorted(frames.items(), key=lambda item: item[0] != main.ident)
    found = {f"{names.get(ident, 'not of Python')} ({ident})": _stack(frame) for ident, frame in listed[:MAX_THREADS]}
    return found | _left_out(len(listed) - MAX_THREADS, "threads")


def _stack(frame: FrameType) -> list[str]:
    """Return the innermost frames of a stack, outermost first."""
    frames = list(itertools.islice(traceback.walk_stack(frame), MAX_FRAMES + 1))
    lines = _lines(frames[:MAX_FRAMES])[::-1]
    return ["... outer frames are left out", *lines] if len(frames) > MAX_FRAMES else lines


def _tasks(loop: asyncio.AbstractEventLoop) -> dict[str, list[str]]:
    """Return the stack of each task that has not ended: from its coroutine to what it awaits."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    stacks = {task.get_name(): _lines(_awaiting(task.get_coro())) for task in tasks}
    ours = {name: lines for name, lines in stacks.items() if not all(_GRPC_SOURCES in line for line in lines)}
    found = dict(itertools.islice(ours.items(), MAX_TASKS))
    return found | _left_out(len(ours) - MAX_TASKS, "tasks") | _left_out(len(stacks) - len(ours), "tasks of gRPC")


def _awaiting(awaited: Any) -> Iterator[tuple[FrameType, int]]:
    for _ in range(MAX_FRAMES):
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        frame = None if kind is None else getattr(awaited, f"{kind}_frame")
        if frame is None:
            return
        yield frame, frame.f_lineno
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _lines(frames: Iterable[tuple[FrameType, int]]) -> list[str]:
    """Return one line a frame: file, line, function. Values of variables are left out: they may be a user's words."""
    return [f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}" for frame, line in frames]


def _left_out(count: int, what: str) -> dict[str, list[str]]:
    return {f"{count} more {what} are left out": []} if count > 0 else {}
