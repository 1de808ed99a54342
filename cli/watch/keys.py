"""Keys of a terminal, one at a time and without an echo."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

UP, DOWN, ENTER, ESCAPE = "up", "down", "enter", "escape"
_NAMED: Final = {
    "\x1b[A": UP, "\x1bOA": UP, "k": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "j": DOWN,
    "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE,
}  # fmt: skip


def keys_of(typed: str) -> list[str]:
    """Return the names of keys; what has none is itself."""
    found, rest = list[str](), typed
    while rest:
        key = next((each for each in sorted(_NAMED, key=len, reverse=True) if rest.startswith(each)), rest[0])
        found.append(_NAMED.get(key, key))
        rest = rest[len(key) :]
    return found


@contextmanager
def pressed() -> Iterator[asyncio.Queue[str]]:
    """Put the keys of standard input into a queue until the end of the block; the terminal is then as before."""
    descriptor, queue = sys.stdin.fileno(), asyncio.Queue[str]()
    before, loop = termios.tcgetattr(descriptor), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 1024)
        if not typed:  # the terminal is gone
            loop.remove_reader(descriptor)
            queue.put_nowait("q")
        for key in keys_of(typed.decode(errors="replace")):
            queue.put_nowait(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield queue
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
