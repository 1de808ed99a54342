"""The images of blocks as the engine transfers them: where they are taken and put, and what moves them to disk.

    a save   block or host frame --take--> image --mover's thread--> frame on disk
    a fetch  frame on disk --mover's thread--> image --land--> host frame

The engine's thread alone takes and lands images, between steps. A thread of the mover sees nothing but an image that
is its own, so no image is torn. Neither the engine nor what runs steps knows what a frame on disk is.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from common.contracts.transfers import Place, Transfer, TransferEnd
from common.contracts.types import FrameId

Image = bytes | bytearray | memoryview
"""The content of one block in all layers, or of a page where the pool has groups. All of a worker have one length."""


class Images(Protocol):
    """Takes images out of blocks and frames, and puts them into frames. Called from the engine's thread.

    No copy that waits or runs may touch the place: the step that carried the last one is over.
    """

    def take(self, place: Place) -> Image:
        """Return a copy of what a block or a host frame holds. It is the same for both, bit by bit."""
        ...

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        """Let a host frame hold an image, which may be `of_states`. Copies that are ordered from now on read it."""
        ...


class TransferFailed(Exception):
    """A transfer did not end well; `end` says how."""

    def __init__(self, end: TransferEnd) -> None:
        super().__init__(end.name)
        self.end = end


class EndedTransfer(NamedTuple):
    """A transfer that has ended. A fetch that is DONE has the `image`, which is verified."""

    transfer: Transfer
    image: Image | None
    end: TransferEnd


class ImageMover(Protocol):
    """Moves images to and from disk, beside the steps. Called from the engine's thread; `start` and `poll` never wait.

    Once the disk is not `usable`, every transfer fails.
    """

    @property
    def usable(self) -> bool: ...

    def start(self, transfer: Transfer, image: Image | None = None) -> None:
        """Begin a transfer, behind all earlier ones in its direction. A save has its image, which nobody changes."""
        ...

    def poll(self) -> list[EndedTransfer]:
        """Return the transfers that have ended since the last call, in that order. Each ends once."""
        ...

    def clear(self, reset: int) -> None:
        """Carry out a reset: nothing that was saved before is there any more, not even after a restart. It waits."""
        ...

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and give up the disk. Nothing more ends."""
        ...
