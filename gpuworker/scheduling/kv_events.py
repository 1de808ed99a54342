"""What of a worker's cached content is told to subscribers of KV events, and which changes are to be told yet.

The worker claims contents of blocks, of frames of host memory and of frames on disk (`Content`). Whatever the manager
grants changes these claims, and so does each sealed block: an eviction ends in a lease, in an admission or in a copy, a
reset forgets what nobody holds. So the claims are all that subscribers need.

    claims change  -->  CacheWatch  -->  take_changes, once a turn  -->  a publisher's queue

A watch keeps what was told and what is claimed. What waits to be told is the difference of the two, so it is bounded by
them, however long nobody takes it, and nothing is lost then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from itertools import islice
from typing import Any, Final, NamedTuple

from common.contracts.transfers import Medium
from common.contracts.types import BlockHash, BlockId, KvGroup, KvGroupKind
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.claims_by_hash import ClaimsByHash


class CacheLabel(NamedTuple):
    """What roots the hashes of a sequence's blocks beside model and tokens: its cache domain and its adapter."""

    cache_domain: bytes = b""
    adapter: str = ""
    adapter_fingerprint: str = ""


NO_LABEL: Final = CacheLabel()


class Origin(NamedTuple):
    """What a block hash stands for: the block's tokens, the block before it (None for a first one), and its label."""

    parent: BlockHash | None
    tokens: tuple[int, ...]
    label: CacheLabel = NO_LABEL


class Stored(NamedTuple):
    """A tier has a content that it did not have."""

    medium: Medium
    group: int
    hash: BlockHash
    origin: Origin


class Removed(NamedTuple):
    """The last copy of a content in a tier is gone."""

    medium: Medium
    group: int
    hash: BlockHash


class Cleared(NamedTuple):
    """No tier has anything any more."""


class EventForm(NamedTuple):
    """What all events of a worker have: slots of a block, and by group the kind of its layers and their window."""

    block_size: int
    specs: tuple[tuple[str, int | None], ...]


Change = Stored | Removed | Cleared
FindOrigin = Callable[[BlockHash, int], Origin | None]

_Entry = tuple[Medium, BlockHash, int]  # of a content: where it is, its hash, its group


class CacheWatch:
    """The contents of all tiers of one worker through its incarnations, and what of them was told.

    A content is told once somebody knows its tokens. A frame that was fetched ahead of need, or that an earlier process
    had on disk, has a hash alone: it is told when a sequence comes that has the block.
    """

    def __init__(self) -> None:
        self._copies: dict[_Entry, int] = {}
        self._told: set[_Entry] = set()
        # Entries that may not be told as they are, in the order of their last change.
        self._changed: dict[_Entry, None] = {}
        self._origins: dict[BlockHash, Origin] = {}
        self._entries_of: dict[BlockHash, set[_Entry]] = {}
        self._unknown: set[BlockHash] = set()
        self._find_origin: FindOrigin = _find_none

    # ------------------------------------------------------------ claims

    def begin(self, find_origin: FindOrigin) -> None:
        """Begin with a new agent, which claims nothing yet.

        `find_origin` looks for a hash among its sequences; the other argument is the depth.
        """
        self._changed |= dict.fromkeys(self._copies)
        for known in (self._copies, self._origins, self._entries_of, self._unknown):
            known.clear()
        self._find_origin = find_origin

    def describe(self, block_hash: BlockHash, origin: Origin) -> None:
        """Note what a hash stands for, before its block is claimed, or because a sequence has come that has it."""
        if block_hash not in self._origins:
            self._origins[block_hash] = origin
            if block_hash in self._unknown:
                self._unknown.discard(block_hash)
                for entry in sorted(self._entries_of.get(block_hash, ())):
                    self._note_change(entry)

    @property
    def unknown(self) -> Set[BlockHash]:
        """Claimed hashes of which nobody knows the tokens."""
        return self._unknown

    def claim(self, medium: Medium, content: Content) -> None:
        """Count a copy of a content in a tier."""
        block_hash = content.hash
        entry = medium, block_hash, content.group
        copies = self._copies.get(entry, 0)
        self._copies[entry] = copies + 1
        if copies:
            return
        self._entries_of.setdefault(block_hash, set()).add(entry)
        if block_hash not in self._origins:
            origin = self._find_origin(block_hash, content.depth)
            if origin is None:
                self._unknown.add(block_hash)
            else:
                self.describe(block_hash, origin)
        self._note_change(entry)

    def drop(self, medium: Medium, content: Content) -> None:
        """Count a copy of a content less in a tier."""
        entry = medium, content.hash, content.group
        copies = self._copies[entry]
        if copies > 1:
            self._copies[entry] = copies - 1
            return
        del self._copies[entry]
        others = self._entries_of[content.hash]
        others.discard(entry)
        if not others:
            del self._entries_of[content.hash]
            self._origins.pop(content.hash, None)
            self._unknown.discard(content.hash)
        self._note_change(entry)

    def _note_change(self, entry: _Entry) -> None:
        self._changed.pop(entry, None)
        self._changed[entry] = None

    # ------------------------------------------------------------ what is told

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def take_changes(self, most: int) -> list[Change]:
        """Return changes to be told, in their order. It looks at `most` entries, and leaves the others.

        Of one prompt, a block that is stored comes before those behind it.
        """
        if not self._copies and self._told:
            self._changed.clear()
            self._told.clear()
            return [Cleared()]
        found = list[Change]()
        for entry in tuple(islice(self._changed, most)):
            del self._changed[entry]
            medium, block_hash, group = entry
            if entry in self._told:
                if entry not in self._copies:
                    self._told.discard(entry)
                    found.append(Removed(medium, group, block_hash))
            elif entry in self._copies and (origin := self._origins.get(block_hash)) is not None:
                self._told.add(entry)
                found.append(Stored(medium, group, block_hash, origin))
        return found


def _find_none(block_hash: BlockHash, depth: int) -> Origin | None:
    return None


class WatchedClaims(ClaimsByHash):
    """Claims of one tier, by block or frame, whose changes a watch sees."""

    def __init__(self, watch: CacheWatch, medium: Medium) -> None:
        super().__init__()
        self._watch, self._medium = watch, medium

    def __setitem__(self, place: BlockId, content: Content | None) -> None:
        before = self.get(place)
        super().__setitem__(place, content)
        if before is not None and content is not None and (before.hash, before.group) == (content.hash, content.group):
            return  # it was used again
        if content is not None:
            self._watch.claim(self._medium, content)
        if before is not None:
            self._watch.drop(self._medium, before)

    def __delitem__(self, place: BlockId) -> None:
        self.pop(place)

    def pop(self, place: BlockId, *default: Any) -> Any:
        content = super().pop(place, *default)
        if content is not None and isinstance(content, Content):
            self._watch.drop(self._medium, content)
        return content

    def clear(self) -> None:
        held = [content for content in self.values() if content is not None]
        super().clear()
        for content in held:
            self._watch.drop(self._medium, content)


def spec_of(groups: Iterable[KvGroup], window: int) -> tuple[tuple[str, int | None], ...]:
    """Return how long the layers of each group keep K/V, by vLLM's names of cache specs, and the window or chunk.

    Without groups there is one: that of layers which all have a `window`, or of layers without any (0).
    """
    found = tuple([(_KINDS[group.kind], group.span or None) for group in groups])
    return found or ((_KINDS[KvGroupKind.WINDOW], window) if window else (_KINDS[KvGroupKind.FULL], None),)


_KINDS: Final[Mapping[KvGroupKind, str]] = {
    KvGroupKind.FULL: "full_attention",
    KvGroupKind.WINDOW: "sliding_window",
    KvGroupKind.CHUNK: "chunked_local_attention",
    KvGroupKind.STATE: "mamba",
}
