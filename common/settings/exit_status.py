"""The exit statuses of all programs: 2 for wrong usage, 1 for what failed (docs/usage.md)."""

from __future__ import annotations

import errno
from typing import Final

from common.contracts.errors import InvalidRequest, PortTaken, QuireError

FAILED_STATUS: Final = 1
# Options or files are refused: the call itself must change.
REFUSED_STATUS: Final = 2
# Another process has the port.
PORT_TAKEN_STATUS: Final = errno.EADDRINUSE


def exit_status(error: QuireError) -> int:
    """Return the exit status of a program that ends with an error."""
    if isinstance(error, PortTaken):
        return PORT_TAKEN_STATUS
    return REFUSED_STATUS if isinstance(error, InvalidRequest) else FAILED_STATUS
