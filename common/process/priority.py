"""The priority of a thread: what may wait stands back behind what must not. Standard library only."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final

_LOWEST: Final = 19


def stand_back(levels: int) -> None:
    """Lower the priority of the calling thread alone, for good. Linux has one for each, other systems have none."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, thread) + levels))
