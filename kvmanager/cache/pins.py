"""Prefixes that an operator pins: their bounds, and which of them fit one worker's pool.

A pin is a list of block hashes from the first block of a prompt on, never its text. Every worker that computes these
blocks keeps them cached. A tenant's pins take at most a share of a worker's blocks, those of all tenants half of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.hashing import group_in, key_of
from common.contracts.lease import unread_blocks
from common.contracts.limits import MAX_PIN_NAME_CHARS, MAX_PINNED_BLOCKS, MAX_PINS
from common.contracts.types import BlockHash, KvGroup, PoolIdentity
from kvmanager.contracts.ledger_config import MOST_RETAINED


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix. `expires` is in seconds since 1970; None: never."""

    name: str
    tenant: str
    block_hashes: tuple[BlockHash, ...]
    num_tokens: int
    expires: float | None = None

    @property
    def owner(self) -> str:
        """The tenant in words."""
        return f"tenant {self.tenant}" if self.tenant else "no tenant"


@dataclass(frozen=True, slots=True)
class PinAtWorker:
    """What a worker has of a pinned prefix; `left_out` says why it is not pinned there."""

    worker_id: str
    blocks_there: int
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The contents that are pinned at one worker, each for a tenant, and the pins that do not fit there, with why."""

    contents: dict[BlockHash, str]
    left_out: dict[str, str]


def fitting(
    pins: Iterable[Pin], num_blocks: int, share: float, groups: Sequence[KvGroup] = (), block_size: int = 0
) -> Fitting:
    """Return which pins a pool of so many blocks takes, the oldest first. A content counts once, for its first pin.

    Where the pool has groups, it counts pages, and the contents are keys of groups (`key_of`). Of a run, those alone
    are pinned that a prompt reads which goes on behind the pin.
    """
    contents, left_out, used = dict[BlockHash, str](), dict[str, str](), Counter[str]()
    most, most_of_all, unit = int(share * num_blocks), int(MOST_RETAINED * num_blocks), "pages" if groups else "blocks"
    for pin in pins:
        fresh = dict.fromkeys(_keys_of(pin, groups, block_size) if groups else pin.block_hashes, pin.tenant)
        for each in fresh.keys() & contents.keys():
            del fresh[each]
        needed = sum(groups[group_in(key)].pages for key in fresh) if groups else len(fresh)
        if used[pin.tenant] + needed > most:
            what = f"pinned for {pin.owner}: {used[pin.tenant]} of at most {most}, {share:g} of {num_blocks} {unit}"
        elif used.total() + needed > most_of_all:
            what = f"pinned in all: {used.total()} of at most {most_of_all}, half of {num_blocks} {unit}"
        else:
            used[pin.tenant] += needed
            contents.update(fresh)
            continue
        left_out[pin.name] = f"{unit} needed: {needed}; {what}"
    return Fitting(contents, left_out)


def _keys_of(pin: Pin, groups: Sequence[KvGroup], block_size: int) -> Iterator[BlockHash]:
    end = len(pin.block_hashes)
    for number, group in enumerate(groups):
        first = unread_blocks(group, end * block_size, block_size) if number else 0
        for block_hash in pin.block_hashes[first:]:
            yield key_of(block_hash, number)


def num_listed(pins: Iterable[Pin]) -> int:
    """Return how many block hashes these pins list: what they share counts for each of them."""
    return sum(len(pin.block_hashes) for pin in pins)


def one_worker_for_each_size(pools: Mapping[str, int]) -> dict[int, str]:
    """Return one worker for each number of blocks, the smallest first: what fits it fits all others of its size."""
    found = {num_blocks: worker_id for worker_id, num_blocks in sorted(pools.items(), reverse=True)}
    return dict(sorted(found.items()))


class PinBook:
    """All pins by name, the oldest first. `share` is that of a worker's blocks which one tenant's pins may take."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._groups: Sequence[KvGroup] = ()
        self._block_size = 0
        self._pins: dict[str, Pin] = {}
        # The same pins; another tuple after each change.
        self.pins: tuple[Pin, ...] = ()

    def __len__(self) -> int:
        return len(self._pins)

    def with_pin(self, pin: Pin) -> tuple[Pin, ...]:
        """Return all pins with this one, which replaces one of its name. Nothing is changed. Raises InvalidRequest.

        Whether it fits the attached workers is for `check_fits` to say.
        """
        others = [each for each in self.pins if each.name != pin.name]
        replaced = self._pins.get(pin.name)
        if replaced is not None and replaced.tenant != pin.tenant:
            what = f"is {pin.name}, the name of a pin of {replaced.owner}; choose another name, or unpin that one"
            raise InvalidRequest(FieldViolation("name", what))
        if len(others) >= MAX_PINS:
            what = f"would be pin {len(others) + 1}; at most {MAX_PINS} are kept: unpin one (`quire pins` lists them)"
            raise InvalidRequest(FieldViolation("prompt", what))
        blocks = num_listed(others) + len(pin.block_hashes)
        if blocks > MAX_PINNED_BLOCKS:
            what = f"would make {blocks} blocks of pins, a shared beginning counted for each of them"
            raise InvalidRequest(FieldViolation("prompt", f"{what}; at most {MAX_PINNED_BLOCKS} are kept: unpin one"))
        return (*others, pin)

    def follow(self, identity: PoolIdentity) -> None:
        """Count as the pools of this identity do."""
        self._groups, self._block_size = identity.kv_geometry.groups, identity.block_size

    def fitting(self, pins: Iterable[Pin], num_blocks: int) -> Fitting:
        """Return which of these pins a pool of so many blocks takes."""
        return fitting(pins, num_blocks, self.share, self._groups, self._block_size)

    def check_fits(self, pins: Sequence[Pin], worker_id: str, num_blocks: int) -> None:
        """Check that the last of these pins fits a worker. Raises InvalidRequest."""
        left_out, name = self.fitting(pins, num_blocks).left_out, pins[-1].name
        if name in left_out:
            what = f"does not fit worker {worker_id}: {left_out[name]}; unpin something, or raise --pin-share"
            raise InvalidRequest(FieldViolation("prompt", what))

    def without(self, name: str) -> tuple[Pin, ...]:
        """Return all pins but this one. Nothing is changed. Raises NotFound."""
        if name not in self._pins:
            raise NotFound(f"there is no pin {name[:MAX_PIN_NAME_CHARS]}; `quire pins` lists them")
        return tuple(each for each in self.pins if each.name != name)

    def live(self, now: float) -> tuple[Pin, ...]:
        """Return the pins that are not over."""
        return tuple(each for each in self.pins if each.expires is None or each.expires > now)

    def next_end(self) -> float | None:
        """Return when the next pin is over; None: none ends."""
        return min((each.expires for each in self.pins if each.expires is not None), default=None)

    def set(self, pins: Iterable[Pin]) -> None:
        """Keep these pins from now on. Those beyond the bounds are left out: somebody else may have written them."""
        self._pins, blocks = {}, 0
        for pin in pins:
            if len(self._pins) < MAX_PINS and blocks + len(pin.block_hashes) <= MAX_PINNED_BLOCKS:
                blocks += len(pin.block_hashes)
                self._pins[pin.name] = pin
        self.pins = tuple(self._pins.values())
