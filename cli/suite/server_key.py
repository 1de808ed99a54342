"""The key of a suite's routers that separates tenants' cached blocks."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_RANDOM_BYTES = 32


def ensure_server_key(path: Path) -> None:
    """Write a random key that its owner alone can read, unless there is a file already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(opened, "w") as file:
        file.write(secrets.token_hex(_RANDOM_BYTES) + "\n")
