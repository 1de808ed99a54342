"""Commands on a pseudo-terminal of a given width, and the lines that they leave on its screen.

The commands under test print lines and styles, and move no cursor. So neither a terminal multiplexer nor an emulator is
needed, and the tests run on every machine.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

PATIENCE_S = 120.0
_ROWS = 50
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]|\x07")


class Terminal:
    """A command whose standard streams are a terminal of `columns`; `lines` are what it has printed so far."""

    def __init__(
        self, command: Sequence[str], columns: int, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._columns = columns
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        kept = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
        env = {**kept, "TERM": "xterm-256color", "INPUTRC": "/dev/null", "PYTHONFAULTHANDLER": "1", **(environ or {})}
        # The leader of a new session gets the first terminal that it opens as its own: Ctrl-C then reaches it.
        opened = ["sh", "-c", 'exec "$@" <"$TTY" >"$TTY" 2>&1', "sh", *command]
        env["TTY"] = os.ttyname(theirs)
        self.process = subprocess.Popen(opened, stdin=subprocess.DEVNULL, env=env, cwd=cwd, start_new_session=True)
        self._theirs: int | None = theirs
        self._raw = b""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 4096)
            except OSError:  # the command has ended
                part = b""
            with self._more:
                self._raw += part
                self._more.notify_all()
            if not part:
                return

    @property
    def text(self) -> str:
        """What was printed, without styles and other control sequences."""
        printed = _CONTROL.sub("", self._raw.decode(errors="replace"))
        return printed.replace("\r\n", "\n").replace("\r", "")

    @property
    def lines(self) -> list[str]:
        """The lines on the screen: the terminal breaks what is wider than it."""
        found: list[str] = []
        for line in self.text.rstrip("\n").split("\n"):
            found += [line[at : at + self._columns].rstrip() for at in range(0, max(1, len(line)), self._columns)]
        return found

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, words: str) -> None:
        """Wait until these words are there; fail with all that was printed when they never come."""
        self._until(lambda: words in self.text)

    def interrupt_until(self, words: str) -> None:
        """Press Ctrl-C until these words are there: Python forgets one that comes just before it waits for a key."""
        deadline = time.monotonic() + PATIENCE_S
        with self._more:
            while words not in self.text:
                assert time.monotonic() < deadline, self._told()
                self.type("\x03")
                self._more.wait_for(lambda: words in self.text, 1)

    def until_prompt(self, prompt: str) -> None:
        """Wait until the cursor stands behind a prompt."""
        self._until(lambda: self.text.endswith("\n" + prompt))

    def _until(self, true: Callable[[], bool]) -> None:
        with self._more:
            assert self._more.wait_for(true, PATIENCE_S), self._told()

    def _told(self) -> str:
        """Return what was printed, how the command ended, and where the threads of one that hangs are."""
        if (status := self.process.poll()) is None:
            self.process.send_signal(signal.SIGABRT)  # Python's fault handler prints the stacks
            self._more.wait_for(lambda: "most recent call first" in self.text, 5)
        return f"{self.text}\n(status: {'still running' if status is None else status})"

    def wait(self) -> int:
        """Return the exit status."""
        status = self.process.wait(PATIENCE_S)
        self._close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()
        os.close(self._ours)

    def _close(self) -> None:
        """Close our copy of the command's end, so that the reader meets the end of the output."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None
        self._reader.join(PATIENCE_S)


def screen(command: Sequence[str], columns: int, environ: Mapping[str, str] | None = None) -> list[str]:
    """Run a command to its end on a terminal; return the lines of the screen."""
    with Terminal(command, columns, environ) as terminal:
        assert terminal.wait() == 0, terminal.text
        return terminal.lines
