"""What a worker claims, found by its key too: so peers ask for it."""

from __future__ import annotations

from typing import Any

from common.contracts.types import BlockHash, BlockId
from gpuworker.scheduling.block_states import Content

_MOST_STALE = 1024


class ClaimsByHash(dict[BlockId, Any]):
    """Claims by block or frame: each is a Content, or None.

    `find` knows what was set last for a key: of two copies it may miss the older one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[BlockHash, BlockId] = {}

    def __setitem__(self, place: BlockId, content: Content | None) -> None:
        super().__setitem__(place, content)
        if content is not None:
            self._places[content.key if content.group else content.hash] = place
            if len(self._places) > 2 * len(self) + _MOST_STALE:
                self._places = {each.key: at for at, each in self.items() if each is not None}

    def find(self, key: BlockHash) -> BlockId | None:
        """Return where a content is claimed; None if it is not."""
        place = self._places.get(key)
        content = self.get(place) if place is not None else None
        return place if content is not None and content.key == key else None
