"""Which registered contents begin with a part of a block: the partial hashes that workers gave with seals and reserves.

Contents are named by their block hashes, so nothing changes here when one of several copies comes or goes. What a
worker did not say again after a rebuild is not known. The next sequence that hits such a block brings its partial
hashes.

There is one content for each cached block, so each object counts. The parts of a content are one value. Nearly every
content is the only one with its first quarter: then the longer parts have no keys, and a search compares the value.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from common.contracts.types import BlockHash

_WIDTH = len(BlockHash(bytes(16)))
_KEY_BYTES = 7
"""The last ones of a partial hash. Their number takes half the memory of the hash; a search compares whole hashes."""


class PartialIndex:
    """Partial hash -> contents that begin with it. Each method takes O(1), however many contents begin alike.

    Where two contents or more have a key, all of them have the key of their next longer part too.
    """

    __slots__ = ("first", "others", "parts")

    def __init__(self) -> None:
        # The partial hashes of each content, one after the other.
        self.parts: dict[BlockHash, bytes] = {}
        # One content of each key, and the others of those that have several.
        self.first: dict[int, BlockHash] = {}
        self.others: dict[int, dict[BlockHash, None]] = {}

    def add(self, content: BlockHash, parts: Items[BlockHash]) -> None:
        """Add a registered content, unless it is known."""
        if content in self.parts or not parts:
            return
        self.parts[content] = b"".join(parts)
        self._enter(content, 0)

    def _enter(self, content: BlockHash, first: int) -> None:
        """Give a content the key of its part `first`; where another one has that key, both get longer ones."""
        for at, key in enumerate(self._keys(content)[first:], first):
            holder = self.first.setdefault(key, content)
            others = self.others.get(key)
            if holder == content or (others is not None and content in others):
                return
            if others is None:
                self.others[key] = {content: None}
                self._enter(holder, at + 1)
            else:
                others[content] = None

    def forget(self, content: BlockHash) -> None:
        """Remove a content that is registered no more; nothing when it is unknown."""
        if content not in self.parts:
            return
        for key in self._keys(content):
            others = self.others.get(key)
            if self.first.get(key) == content:
                if others:
                    self.first[key] = others.popitem()[0]
                else:
                    del self.first[key]
            elif others is not None:
                others.pop(content, None)
            if others is not None and not others:
                del self.others[key]
        del self.parts[content]

    def find(self, parts: Items[BlockHash]) -> tuple[BlockHash, int] | None:
        """Return a content that has the most of these leading parts, and how many; None when none has the first."""
        for part in reversed(parts):
            content = self.first.get(_key(part))
            if content is not None and (count := self._in_common(content, parts)):
                return content, count
        return None

    def _in_common(self, content: BlockHash, parts: Items[BlockHash]) -> int:
        known = self.parts[content]
        count = 0
        for at, part in enumerate(parts):
            if known[_WIDTH * at : _WIDTH * (at + 1)] != part:
                break
            count += 1
        return count

    def _keys(self, content: BlockHash) -> list[int]:
        """Return the keys of a content's parts, the shortest first."""
        known = self.parts[content]
        return [_key(known[at : at + _WIDTH]) for at in range(0, len(known), _WIDTH)]

    def clear(self) -> None:
        self.parts.clear()
        self.first.clear()
        self.others.clear()


def _key(part: bytes) -> int:
    return int.from_bytes(part[-_KEY_BYTES:], "big")
