"""Which registered contents begin with a part of a block: the partial hashes that workers gave with seals and reserves.

Contents are named by their block hashes, so nothing changes here when one of several copies comes or goes. What a
worker did not say again after a rebuild is not known. The next sequence that hits such a block brings its partial
hashes.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from common.types import BlockHash


class PartialIndex:
    """Partial hash -> contents that begin with it. Each method takes O(1), however many contents begin alike."""

    __slots__ = ("first", "others", "parts")

    def __init__(self) -> None:
        self.parts: dict[BlockHash, tuple[BlockHash, ...]] = {}
        # One content of each partial hash, and the others of those that have several.
        self.first: dict[BlockHash, BlockHash] = {}
        self.others: dict[BlockHash, dict[BlockHash, None]] = {}

    def add(self, content: BlockHash, parts: Items[BlockHash]) -> None:
        """Add a registered content, unless it is known."""
        if content in self.parts or not parts:
            return
        self.parts[content] = known = tuple(dict.fromkeys(parts))
        for part in known:
            if part in self.first:
                self.others.setdefault(part, {})[content] = None
            else:
                self.first[part] = content

    def forget(self, content: BlockHash) -> None:
        """Remove a content that is registered no more; nothing when it is unknown."""
        for part in self.parts.pop(content, ()):
            others = self.others.get(part)
            if self.first[part] != content:
                assert others is not None
                del others[content]
            elif others:
                self.first[part] = others.popitem()[0]
            else:
                del self.first[part]
            if others is not None and not others:
                del self.others[part]

    def find(self, part: BlockHash) -> BlockHash | None:
        """Return a content that begins with this part."""
        return self.first.get(part)

    def clear(self) -> None:
        self.parts.clear()
        self.first.clear()
        self.others.clear()
