"""What the routes of files and batches use; there is none where the router has no folder for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.api.openai.batches.folder import BatchFolder
from router.api.openai.batches.runner import BatchRunner
from router.api.openai.batches.uploads import Uploads


@dataclass(frozen=True, slots=True)
class BatchParts:
    """`now` are Unix seconds."""

    folder: BatchFolder
    uploads: Uploads
    runner: BatchRunner
    now: Callable[[], float]
