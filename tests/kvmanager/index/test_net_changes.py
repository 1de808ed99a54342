"""Net effect of membership events: what is sent, in which order, and that nothing is lost whatever fails on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import BlockHash
from kvmanager.contracts.ports import IndexCall
from kvmanager.index.worker_feed import NetChanges


def key(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def calls(changes: NetChanges, limit: int = 100) -> list[IndexCall]:
    return list(changes.calls(limit))


def test_removes_go_deepest_first_then_adds_shallowest_first() -> None:
    changes = NetChanges()
    for depth in (1, 0, 2):
        changes.store(key(depth), depth)
        changes.remove(key(10 + depth), depth)
    assert calls(changes) == [IndexCall((key(12), key(11), key(10)), (key(0), key(1), key(2)))]


def test_what_came_and_went_is_not_sent() -> None:
    changes = NetChanges()
    changes.store(key(1), 0)
    changes.remove(key(1), 0)
    assert calls(changes) == []


def test_what_went_and_came_is_written_again() -> None:
    changes = NetChanges()
    changes.remove(key(1), 0)
    changes.store(key(1), 0)
    assert calls(changes) == [IndexCall((), (key(1),))]


def test_what_may_be_in_the_index_is_removed_there() -> None:
    changes = NetChanges()
    changes.refresh([(key(1), 0)])
    changes.remove(key(1), 0)
    assert calls(changes) == [IndexCall((key(1),), ())]


def test_what_was_removed_returned_and_went_again_is_removed() -> None:
    changes = NetChanges()
    changes.remove(key(1), 0)
    changes.store(key(1), 0)
    changes.remove(key(1), 0)
    assert calls(changes) == [IndexCall((key(1),), ())]


def test_calls_are_bounded_and_keep_the_order() -> None:
    changes = NetChanges()
    for number in range(3):
        changes.remove(key(number), number)
    for number in range(10, 12):
        changes.store(key(number), number)
    assert calls(changes, 2) == [
        IndexCall((key(2), key(1)), ()),
        IndexCall((key(0),), (key(10),)),
        IndexCall((), (key(11),)),
    ]


def test_what_was_sent_is_forgotten() -> None:
    changes = NetChanges()
    for number in range(4):
        changes.store(key(number), number)
    for call in changes.calls(2):
        changes.sent(call)
        break
    assert calls(changes) == [IndexCall((), (key(2), key(3)))]


def test_addition_whose_fate_is_unknown_is_removed_explicitly() -> None:
    unsent, newer = NetChanges(), NetChanges()
    unsent.store(key(1), 0)
    newer.remove(key(1), 0)
    assert calls(unsent.merged_under(newer)) == [IndexCall((key(1),), ())]


KEYS = 6


class Published:
    """A map of one chain (depth k stands on depth k - 1), what the index holds of it, and what is on its way."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.index: set[BlockHash] = set()
        self.changes = NetChanges()

    def toggle(self, number: int) -> None:
        """Remove a member with everything that stands on it, or add it with everything that it stands on."""
        if number in self.members:
            for above in sorted((each for each in self.members if each >= number), reverse=True):
                self.members.remove(above)
                self.changes.remove(key(above), above)
        else:
            for below in sorted(set(range(number + 1)) - self.members):
                self.members.add(below)
                self.changes.store(key(below), below)

    def send(self, meanwhile: int, written: bool, confirmed: bool) -> None:
        """Send what waits; whether it was written and whether that is known are two things."""
        taken, self.changes = self.changes, NetChanges()
        self.toggle(meanwhile)
        if written:
            self.write(taken)
        if not confirmed:
            self.changes = taken.merged_under(self.changes)

    def write(self, changes: NetChanges) -> None:
        for call in changes.calls(2):
            self.index.difference_update(call.removes)
            self.index.update(call.adds)

    def refresh(self) -> None:
        self.changes.refresh([(key(each), each) for each in self.members])


ACTIONS = st.sampled_from(["toggle", "confirmed", "lost", "written, not confirmed", "refresh"])


@given(st.lists(st.tuples(st.integers(0, KEYS - 1), ACTIONS)))
def test_index_equals_the_map_in_the_end_whatever_was_lost_on_the_way(steps: list[tuple[int, str]]) -> None:
    published = Published()
    for number, action in steps:
        if action == "toggle":
            published.toggle(number)
        elif action == "refresh":
            published.refresh()
        else:
            published.send(number, written=action != "lost", confirmed=action == "confirmed")
    published.write(published.changes)
    assert published.index == {key(each) for each in published.members}


@given(st.lists(st.integers(0, KEYS - 1)), st.integers(1, 4))
def test_every_prefix_of_the_calls_leaves_chains_whole(toggled: list[int], limit: int) -> None:
    published, index = Published(), {0, 1, 2}
    published.members = set(index)
    for number in toggled:
        published.toggle(number)
    for call in published.changes.calls(limit):
        for removed in call.removes:
            index.discard(removed[0])
            assert index == set(range(len(index)))
        for added in call.adds:
            index.add(added[0])
            assert index == set(range(len(index)))
    assert index == published.members
