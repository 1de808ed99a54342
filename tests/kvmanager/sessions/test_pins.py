"""Operators' pins over an index in memory: what survives a restart, and what a change of leader stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest, Unavailable
from common.contracts.limits import MAX_PINNED_BLOCKS, MAX_PINS
from common.contracts.types import BlockHash
from kvmanager.cache.pins import Pin, PinBook
from kvmanager.contracts.ports import KeptPins, PinsUnreadable
from kvmanager.sessions import pins as sessions_pins
from kvmanager.sessions.pins import OperatorPins
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from tests.support.turns import counted_turns, take_turn
from tests.support.waiting import until


def numbered(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "little")) for number in range(first, first + count))


class Index:
    """One namespace at a time, and a value for it. `meanwhile` happens within the next read."""

    publisher = object()

    def __init__(self) -> None:
        self.namespace: object | None = object()
        self.value: bytes | None = None
        self.own = True
        self.written: list[bytes] = []
        self.meanwhile: Callable[[], None] | None = None

    async def read_pins(self, most_bytes: int) -> KeptPins | None:
        value = self.value
        await take_turn()  # as a real one, whose answer comes later
        if self.meanwhile is not None:
            self.meanwhile()
        if value is not None and len(value) > most_bytes:
            raise PinsUnreadable("key", f"has {len(value)} bytes")
        return None if value is None else KeptPins("key", value, self.own)

    async def has_lost_pins(self) -> bool:
        if self.meanwhile is not None:
            self.meanwhile()
        return self.value is None

    async def write_pins(self, value: bytes) -> None:
        self.written.append(value)
        self.value, self.own = value, True


class Pools:
    """The pins and the sizes of the workers, of which none is carried out."""

    last_reset = 0

    def __init__(self, **sizes: int) -> None:
        self.pins, self.sizes = PinBook(1.0), sizes

    def pool_sizes(self) -> dict[str, int]:
        return self.sizes

    def workers(self) -> list[str]:
        return []

    def begin_reset(self, number: int) -> None:
        self.last_reset = number


class Leading:
    leads_now = True

    def leads(self) -> bool:
        return self.leads_now

    async def confirmed(self) -> None: ...


def pins_over(index: Index, manager: Pools | None = None, leading: Leading | None = None) -> OperatorPins:
    parts = cast("Any", manager or Pools()), cast("Any", index), cast("Any", leading or Leading())
    return OperatorPins(*parts, ManualClock())


async def test_pins_with_a_common_beginning_survive_a_restart_up_to_their_bound() -> None:
    index, common = Index(), numbered(0, 8000)
    first = pins_over(index)
    for number in range(MAX_PINNED_BLOCKS // len(common)):
        await first.pin(f"p{number}", "t", common, 128_000, None)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PINNED_BLOCKS} are kept"):
        await first.pin("one more", "t", common, 128_000, None)
    second = pins_over(index)
    assert await second.pins() == await first.pins()


async def test_the_longest_pins_can_be_read_again() -> None:
    index = Index()
    first = pins_over(index)
    await first.pins()
    tenant, each = "\U0001f5dd" * 128, MAX_PINNED_BLOCKS // MAX_PINS
    most = tuple(Pin(f"{at:064}", tenant, numbered(at * each, each), (1 << 32) - 1, 1e308) for at in range(MAX_PINS))
    await first._change(most, "")
    assert await pins_over(index).pins() == most


async def test_pins_that_would_be_too_long_to_read_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index()
    monkeypatch.setattr(sessions_pins, "_MOST_BYTES", 100)
    operator = pins_over(index)
    with pytest.raises(Unavailable, match="at most 100 are kept"):
        await operator.pin("p", "t", numbered(0, 10), 160, None)
    assert (index.written, await operator.pins()) == ([], ())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"\xff" * 100, "malformed"),
        (b"x" * (4 << 20), "bytes"),
        (pb.StoredPins(pins=[pb.Pin(name="a", block_hashes=b"x" * 17)]).SerializeToString(), "part of a hash"),
        (pb.StoredPins(pins=[pb.Pin(name=str(at)) for at in range(MAX_PINS + 1)]).SerializeToString(), "257 pins"),
        (
            pb.StoredPins(pins=[pb.Pin(name="a", block_hashes=bytes(16 * MAX_PINNED_BLOCKS + 16))]).SerializeToString(),
            "65537 blocks",
        ),
    ],
    ids=["malformed", "too long", "part of a hash", "pins", "blocks"],
)
async def test_a_value_that_no_manager_has_written_stays_and_is_named(
    value: bytes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = Index()
    index.value = value
    operator = pins_over(index)
    with pytest.raises(Unavailable, match=f"key .*{what}.*Delete that key"):
        await operator.pin("p", "t", numbered(0, 1), 16, None)
    with pytest.raises(Unavailable):
        await operator.pins()
    assert (index.value, index.written) == (value, [])
    task = asyncio.create_task(operator.run())
    await until(lambda: "cannot be read" in caplog.text)
    task.cancel()
    index.value = None  # as the words say
    await operator.pin("p", "t", numbered(0, 1), 16, None)
    assert len(index.written) == 1


async def test_a_change_that_is_broken_off_is_carried_out_all_the_same() -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), list[str]()

    class Slow(Pools):
        def workers(self) -> list[str]:
            return list(self.sizes)

        def pin_in_steps_at(self, worker_id: str, why: str) -> Iterator[None]:
            begun.set()
            while not go_on.is_set():
                yield
            done.append(worker_id)

    operator = pins_over(Index(), Slow(w0=100, w1=100))
    call = asyncio.create_task(operator.pin("p", "t", numbered(0, 1), 16, None))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    assert (done, operator._wake.is_set()) == ([], True), "the task does not wait for its next look"
    task = asyncio.create_task(operator.run())
    await until(lambda: done == ["w0", "w1"])
    task.cancel()


async def test_other_tasks_have_a_turn_for_each_size_of_worker() -> None:
    sizes = {f"w{at}": 1000 + at // 2 for at in range(80)}
    async with counted_turns() as turns:
        before = turns.count
        await pins_over(Index(), Pools(**sizes)).pin("p", "t", numbered(0, 10), 160, None)
        assert turns.count - before >= 40


class Cached:
    """A ledger that has all of a pin; it notes how many hashes it looked for between two turns of others."""

    def __init__(self) -> None:
        self.looked = self.most = 0

    def leading_blocks(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int:
        self.looked += len(block_hashes[first:end])
        self.most = max(self.most, self.looked)
        return len(block_hashes[first:end])


async def test_other_tasks_have_a_turn_while_a_worker_is_asked_for_long_pins() -> None:
    """All pins together have 65,536 blocks; to look for them in one turn took some 14 ms."""
    manager, ledger = Pools(w0=1 << 18, w1=1 << 18), Cached()
    manager.ledger = lambda worker_id: ledger  # type: ignore[attr-defined]
    pins = [Pin("long", "t", numbered(0, 40_000), 640_000, None)]
    pins += [Pin(f"p{at}", "t", numbered(50_000 + 100 * at, 100), 1600, None) for at in range(250)]

    async def others() -> None:
        while True:
            ledger.looked = 0
            await take_turn()

    task = asyncio.create_task(others())
    found = await pins_over(Index(), manager).at_workers(pins)
    task.cancel()
    assert [[at.blocks_there for at in each] for each in found[:2]] == [[40_000, 40_000], [100, 100]]
    assert ledger.most <= 1 << 13


@pytest.mark.parametrize("then", [None, object()], ids=["stands by", "another model"])
async def test_a_change_of_namespace_during_the_first_read_pins_nothing(then: object | None) -> None:
    index = Index()
    index.value = pb.StoredPins(pins=[pb.Pin(name="old", block_hashes=b"1" * 16)]).SerializeToString()

    def changes() -> None:
        index.namespace = then

    index.meanwhile = changes
    manager = Pools()
    with pytest.raises(Unavailable, match="stopped leading, or serves another model"):
        await pins_over(index, manager).pin("p", "t", numbered(0, 1), 16, None)
    assert (index.written, len(manager.pins)) == ([], 0)


async def test_a_change_of_namespace_while_sizes_are_checked_pins_nothing() -> None:
    index = Index()

    class Changing(Pools):
        def pool_sizes(self) -> dict[str, int]:
            index.namespace = object()
            return {}

    with pytest.raises(Unavailable, match="another model"):
        await pins_over(index, Changing()).pin("p", "t", numbered(0, 1), 16, None)
    assert index.written == []


async def test_lost_pins_are_not_written_into_another_namespace() -> None:
    index = Index()
    operator = pins_over(index)
    await operator.pin("p", "t", numbered(0, 1), 16, None)
    index.value = None

    def changes() -> None:
        index.namespace = object()

    index.meanwhile = changes
    with suppress(Unavailable):
        await operator._round()
    assert len(index.written) == 1


async def test_a_manager_that_leads_no_more_waits_as_long_as_one_without_ends() -> None:
    leading = Leading()
    manager = Pools()
    operator = pins_over(Index(), manager, leading)
    manager.pins.set([Pin("over", "t", numbered(0, 1), 16, 0.0)])
    assert operator._until_next_end() == sessions_pins._LEAST_PAUSE_S
    leading.leads_now = False
    assert operator._until_next_end() == sessions_pins._LOOK_S


async def test_a_group_without_a_value_takes_that_of_no_group_and_writes_it_as_its_own() -> None:
    index = Index()
    await pins_over(index).pin("p", "t", numbered(0, 1), 16, None)
    index.own = False
    assert [each.name for each in await pins_over(index).pins()] == ["p"]
    assert (len(index.written), index.own) == (2, True)
