"""Notices that this process, or the machine, has no file descriptor left, and says so once.

Without one no connection is accepted and none is opened. Event loop and gRPC try again by themselves, without a word.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


class OpenFiles:
    """`look` once a second or so: it opens a file and closes it, some microseconds."""

    def __init__(self, opens: Callable[[], int] = lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) -> None:
        self._opens = opens
        self.exhausted = False

    def look(self) -> None:
        """Look whether a file can be opened, and log what has changed."""
        try:
            os.close(self._opens())
        except OSError as error:
            if error.errno in _NONE_LEFT and not self.exhausted:
                self.exhausted = True
                log.error("no file descriptor is left, so no connection can begin: %s", _words(error))
            return
        if self.exhausted:
            self.exhausted = False
            log.warning("there are file descriptors again; connections begin")


def _words(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "the machine has none; raise fs.file-max, or end what holds them"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the process has all {soft} that it may have; raise ulimit -n, or let clients close idle connections"
