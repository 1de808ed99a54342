"""The publisher against a scripted store: what it writes when, and what it does when the store fails halfway."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import StaleEpoch
from common.contracts.index_format import DiscoveredWorker
from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import Cleared, IndexSnapshot, Removed, Stored
from kvmanager.contracts.ports import FenceLost, IndexCall, IndexUnavailable, KeptPins, WorkerEntry
from kvmanager.contracts.slots import Loss, NoSlot
from kvmanager.index.epoch import EpochKeeper
from kvmanager.index.publisher import PrefixPublisher, PublisherTimes
from kvmanager.index.state_file import EpochFile
from kvmanager.index.worker_feed import WorkerFeed
from tests.support.kvmanager.fake_session import IDENTITY
from tests.support.turns import until_idle

H = [BlockHash(bytes([number]) * 16) for number in range(8)]
TIMES = PublisherTimes(prefix_ttl=60.0, lease_ttl=3.0, linger=0.0)


class ScriptedStore:
    """An index in memory that does what the next entry of `script` says before it obeys: raise, or wait."""

    def __init__(self) -> None:
        self.epoch = 0
        self.calls: list[object] = []
        self.registered: list[int] = []
        self.members_of: dict[tuple[int, int], set[BlockHash]] = {}
        self.script: list[Exception | asyncio.Event] = []
        self.swallow_cancellation = False
        self.called = asyncio.Event()
        # What the next renewals of a slot find.
        self.lost: list[Mapping[int, Loss]] = []
        # How many updates find that the slot has another generation.
        self.unwritable = 0

    async def _step(self, call: object) -> None:
        self.calls.append(call)
        self.called.set()
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            try:
                await step.wait()
            except asyncio.CancelledError:
                if not self.swallow_cancellation:
                    raise

    async def acquire(self, least: int, held: int) -> int:
        await self._step("acquire")
        self.epoch = max(self.epoch + 1, least)
        return self.epoch

    async def register(self, epoch: int, worker: WorkerEntry) -> int | NoSlot:
        self.registered.append(worker.generation)
        await self._step(("register", worker.worker_id, worker.generation))
        self.members_of[0, worker.generation] = set()
        return 0

    async def update(self, epoch: int, slot: int, generation: int, call: IndexCall) -> bool:
        await self._step(call)
        if self.unwritable:
            self.unwritable -= 1
            return False
        members = self.members_of[slot, generation]
        members.difference_update(call.removes)
        members.update(call.adds)
        return True

    async def renew(self, epoch: int, slots: Mapping[int, int], discovery: Mapping[str, str]) -> Mapping[int, Loss]:
        await self._step(("renew", dict(slots), list(discovery)))
        return self.lost.pop() if self.lost and slots else {}

    async def retire(self, epoch: int, slot: int, generation: int, worker_id: str) -> None:
        await self._step(("retire", slot, generation, worker_id))

    async def read_pins(self, most_bytes: int) -> KeptPins | None:
        return None

    async def has_pins(self) -> bool:
        return False

    async def write_pins(self, epoch: int, value: bytes) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return None

    @property
    def updates(self) -> list[IndexCall]:
        return [call for call in self.calls if isinstance(call, IndexCall)]


class Rig:
    """A publisher over a scripted store, one worker's membership, and the events that change it."""

    def __init__(self, directory: Path) -> None:
        self.store, self.clock = ScriptedStore(), ManualClock()
        self.epochs = EpochKeeper(EpochFile(directory), self.store)
        generations = itertools.count(100)
        self.publisher = PrefixPublisher(self.store, self.epochs, self.clock, TIMES, lambda: next(generations))
        self.depths: dict[BlockHash, int] = {}
        self.number = 0
        self.task = asyncio.create_task(self.publisher.run())

    def snapshot(self) -> IndexSnapshot:
        return IndexSnapshot(self.number, tuple(sorted(self.depths.items(), key=lambda entry: entry[1])))

    def open(self, worker_id: str = "w0") -> WorkerFeed:
        return self.publisher.open(DiscoveredWorker(worker_id, "", "", IDENTITY), self.snapshot)

    def store_hash(self, index: int) -> Stored:
        self.number += 1
        self.depths[H[index]] = index
        return Stored(self.number, H[index], index)

    def remove_hash(self, index: int) -> Removed:
        self.number += 1
        del self.depths[H[index]]
        return Removed(self.number, H[index], index)

    async def settled(self) -> None:
        async with asyncio.timeout(60.0):
            await self.publisher.settled()

    def published(self, feed: WorkerFeed) -> set[BlockHash]:
        return self.store.members_of[0, feed.generation]

    async def next_call(self, wanted: Callable[[object], bool]) -> None:
        """Return once the store was called as wanted."""
        async with asyncio.timeout(60.0):
            while not any(map(wanted, self.store.calls)):
                self.store.called.clear()
                await self.store.called.wait()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.settled()
    await rig.next_call(lambda call: call == ("renew", {}, []))
    yield rig
    rig.publisher.stop()
    rig.task.cancel()
    with suppress(asyncio.CancelledError, StaleEpoch):
        await rig.task


async def test_worker_is_registered_before_anything_is_written_of_it(rig: Rig) -> None:
    rig.store_hash(0)
    rig.open()
    await rig.settled()
    assert rig.store.calls[-3:] == [("renew", {}, ["w0"]), ("register", "w0", 100), IndexCall((), (H[0],))]


async def test_changes_of_one_batch_travel_as_their_net_effect(rig: Rig) -> None:
    for index in range(3):
        rig.store_hash(index)
    feed = rig.open()
    await rig.settled()
    feed.push((rig.remove_hash(2), rig.store_hash(3), rig.store_hash(4), rig.remove_hash(4), rig.store_hash(2)))
    await rig.settled()
    assert rig.store.updates[1:] == [IndexCall((), (H[2], H[3]))]
    assert rig.published(feed) == set(rig.depths)


async def test_clear_begins_a_new_generation(rig: Rig) -> None:
    rig.store_hash(0)
    feed = rig.open()
    await rig.settled()
    rig.depths.clear()
    rig.number += 1
    feed.push((Cleared(rig.number), rig.store_hash(5)))
    await rig.settled()
    assert feed.generation == 101
    assert rig.published(feed) == {H[5]}


async def test_gap_in_the_events_is_repaired_by_a_snapshot(rig: Rig) -> None:
    feed = rig.open()
    await rig.settled()
    rig.store_hash(0)  # lost
    feed.push((rig.store_hash(1),))
    await rig.settled()
    assert feed.generation == 101
    assert rig.published(feed) == {H[0], H[1]}


async def test_events_that_the_snapshot_contains_are_not_applied_again(rig: Rig) -> None:
    events = (rig.store_hash(0), rig.remove_hash(0), rig.store_hash(1))
    feed = rig.open()
    await rig.settled()
    feed.push(events)
    await rig.settled()
    assert rig.published(feed) == {H[1]}
    assert len(rig.store.updates) == 1


async def test_failed_registration_is_done_again_with_everything(rig: Rig) -> None:
    rig.store_hash(0)
    done = asyncio.Event()
    done.set()
    feed = rig.open()
    rig.store.script = [done, IndexUnavailable("gone")]  # a renewal, then the registration
    await rig.settled()
    assert rig.store.registered == [100, 101]
    assert rig.published(feed) == {H[0]}


async def test_call_whose_fate_is_unknown_is_made_again_with_what_came_since(rig: Rig) -> None:
    feed = rig.open()
    await rig.settled()
    rig.store.script = [IndexUnavailable("no answer")]
    feed.push((rig.store_hash(0), rig.store_hash(1)))
    rig.publisher.wake()
    await rig.next_call(lambda call: isinstance(call, IndexCall))
    feed.push((rig.remove_hash(1),))
    await rig.settled()
    assert rig.store.updates[-1] == IndexCall((H[1],), (H[0],))
    assert rig.publisher.counts.outages == 1
    assert rig.publisher.reachable


async def test_change_during_a_call_is_written_after_it(rig: Rig) -> None:
    feed = rig.open()
    await rig.settled()
    gate = asyncio.Event()
    rig.store.script = [gate]
    feed.push((rig.store_hash(0),))
    rig.publisher.wake()
    await rig.next_call(lambda call: isinstance(call, IndexCall))
    feed.push((rig.remove_hash(0),))
    assert feed.behind == 2
    gate.set()
    await rig.settled()
    assert rig.store.updates == [IndexCall((), (H[0],)), IndexCall((H[0],), ())]


async def test_lost_fence_leads_to_a_new_epoch_and_everything_again(rig: Rig) -> None:
    rig.store_hash(0)
    feed = rig.open()
    await rig.settled()
    rig.store.script = [FenceLost("wiped")]
    feed.push((rig.store_hash(1),))
    await rig.settled()
    assert rig.epochs.epoch == 2
    assert feed.generation == 101
    assert rig.published(feed) == {H[0], H[1]}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (Loss.TAKEN, "another group of KV managers has taken the slot of worker w0"),
        (Loss.GONE, "the index was wiped or overwritten: it has no slot of worker w0"),
    ],
)
@pytest.mark.parametrize("by_a_write", [False, True], ids=["lease", "write"])
async def test_a_lost_slot_is_named_and_published_again(
    rig: Rig, caplog: pytest.LogCaptureFixture, loss: Loss, said: str, by_a_write: bool
) -> None:
    feed = rig.open()
    feed.push((rig.store_hash(0),))
    await rig.settled()
    rig.store.lost = [{0: loss}]
    if by_a_write:
        rig.store.unwritable = 1
        feed.push((rig.store_hash(1),))
    else:
        rig.clock.advance(TIMES.lease_ttl / 3)
        rig.publisher.wake()
        await rig.next_call(lambda call: call == ("register", "w0", 101))
    await rig.settled()
    assert f"{said}; it is published again" in caplog.messages
    assert (feed.generation, rig.published(feed)) == (101, set(rig.depths))


async def test_newer_manager_ends_the_task(rig: Rig) -> None:
    rig.store.script = [StaleEpoch("replaced")]
    rig.open()
    with pytest.raises(StaleEpoch, match="replaced"):
        await asyncio.wait_for(rig.task, 60.0)


async def test_leases_are_renewed_and_a_worker_that_stays_away_is_retired(rig: Rig) -> None:
    feed = rig.open()
    await rig.settled()
    rig.publisher.close(feed)
    rig.clock.advance(TIMES.lease_ttl)
    rig.publisher.wake()
    await rig.next_call(lambda call: call == ("retire", 0, 100, "w0"))
    assert rig.store.calls[-2] == ("renew", {}, [])


async def test_renewals_are_due_at_multiples_of_their_period(rig: Rig) -> None:
    """All that is periodic in the processes of a host wakes them up at one moment."""

    def renewals() -> int:
        return rig.store.calls.count(("renew", {0: 100}, ["w0"]))

    rig.open()
    for pause, due in ((1.4 * TIMES.lease_ttl / 3, True), (0.5, False), (0.2, True)):
        await rig.settled()
        before = renewals()
        rig.clock.advance(pause)
        rig.publisher.wake()
        await until_idle()
        assert renewals() - before == due


async def test_entries_are_written_again_in_half_their_life(rig: Rig) -> None:
    rig.store_hash(0)
    rig.open()
    await rig.settled()
    rig.clock.advance(TIMES.prefix_ttl / 2 + 1)
    rig.publisher.wake()
    await rig.next_call(lambda _: len(rig.store.updates) == 2)
    assert rig.store.updates[1] == IndexCall((), (H[0],))


async def test_stop_does_not_depend_on_a_cancellation_that_arrives(rig: Rig) -> None:
    feed = rig.open()
    await rig.settled()
    rig.store.swallow_cancellation = True
    rig.store.script = [asyncio.Event()]
    feed.push((rig.store_hash(0),))
    rig.publisher.wake()
    await rig.next_call(lambda call: isinstance(call, IndexCall))
    rig.publisher.stop()
    rig.task.cancel()
    async with asyncio.timeout(60.0):
        await asyncio.wait([rig.task])
