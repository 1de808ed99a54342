"""What routers tell each other: figures that replace those before, so that no loss, delay or double lasts."""

from __future__ import annotations

import random
import struct
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.placement.shared_load import (
    FORGET_S,
    MAX_NOTICE_BYTES,
    MAX_ROUTERS,
    MAX_TOLD_WORKERS,
    WHOLE_EVERY_S,
    Notice,
    SharedLoad,
    Told,
    pack_notice,
    unpack_notice,
    worker_key,
)
from router.placement.worker_model import Capacity, Load, WorkerModel

KEY = b"k" * 32
W0, W1 = worker_key("w0", b"i"), worker_key("w1", b"i")
A, B = b"a" * 8, b"b" * 8
CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=1024)


def notice(number: int = 1, whole: bool = False, router: bytes = B, **told: tuple[int, int]) -> Notice:
    return Notice(router, number, whole, {worker_key(name, b"i"): Told(*each) for name, each in told.items()})


# ---------------------------------------------------------------- hearing


def test_the_figures_of_all_others_add_up_and_own_ones_are_not_among_them() -> None:
    shared = SharedLoad(A)
    share = shared.join("w0", b"i")
    share.set_own(5, 50)
    assert shared.hear(notice(w0=(2, 30)), 0.0)
    assert shared.hear(notice(router=b"c" * 8, w0=(1, 7)), 0.0)
    assert not shared.hear(notice(router=A, number=9, w0=(8, 8)), 0.0)
    assert (share.sequences, share.prefill_tokens) == (3, 37)
    assert shared.others == 2


def test_a_notice_that_was_overtaken_or_comes_twice_changes_nothing() -> None:
    shared = SharedLoad(A)
    share = shared.join("w0", b"i")
    assert shared.hear(notice(2, w0=(2, 30)), 0.0)
    assert not shared.hear(notice(1, w0=(9, 90)), 0.0)
    assert not shared.hear(notice(2, w0=(2, 30)), 0.0)
    assert (share.sequences, share.prefill_tokens) == (2, 30)


def test_a_whole_notice_ends_what_a_lost_one_left() -> None:
    shared = SharedLoad(A)
    w0, w1 = shared.join("w0", b"i"), shared.join("w1", b"i")
    shared.hear(notice(1, w0=(2, 30), w1=(1, 10)), 0.0)
    # The second one, which said that w0 has nothing left, was lost.
    shared.hear(notice(3, whole=True, w1=(1, 0)), 0.0)
    assert [(each.sequences, each.prefill_tokens) for each in (w0, w1)] == [(0, 0), (1, 0)]


def test_a_router_that_falls_silent_is_forgotten() -> None:
    shared = SharedLoad(A)
    share = shared.join("w0", b"i")
    shared.hear(notice(1, w0=(2, 30)), 10.0)
    shared.expire(10.0 + FORGET_S - 0.01)
    assert share.sequences == 2
    shared.expire(10.0 + FORGET_S)
    assert (share.sequences, share.prefill_tokens, shared.others) == (0, 0, 0)
    # It may come back with any number.
    assert shared.hear(notice(1, w0=(1, 0)), 20.0)


def test_a_worker_that_connects_later_has_what_was_told_of_it_and_a_new_process_has_not() -> None:
    shared = SharedLoad(A)
    shared.hear(notice(w0=(2, 30)), 0.0)
    assert shared.join("w0", b"i").sequences == 2
    assert shared.join("w0", b"j").sequences == 0


def test_routers_and_workers_are_bounded() -> None:
    shared = SharedLoad(A)
    for number in range(MAX_ROUTERS):
        assert shared.hear(notice(router=number.to_bytes(8, "big"), w0=(1, 0)), 0.0)
    assert not shared.hear(notice(router=B, w0=(1, 0)), 0.0)
    assert shared.others == MAX_ROUTERS
    shared = SharedLoad(A)
    for number in range(1, 4):
        many = {place.to_bytes(8, "big"): Told(1, 0) for place in range(number * 1000, (number + 1) * 1000)}
        shared.hear(Notice(B, number, False, many), 0.0)
    joined = [shared.join("w0", b"i"), shared.join("w1", b"i")]
    assert [each.sequences for each in joined] == [0, 0]
    assert sum(len(each.workers) for each in shared._others.values()) == MAX_TOLD_WORKERS


# ---------------------------------------------------------------- telling


def test_a_notice_names_what_changed_and_once_a_second_everything() -> None:
    shared = SharedLoad(A)
    w0, w1 = shared.join("w0", b"i"), shared.join("w1", b"i")
    w0.set_own(1, 10)
    w1.set_own(1, 20)
    assert shared.tell(0.0) == Notice(A, 1, True, {W0: Told(1, 10), W1: Told(1, 20)})
    assert shared.tell(0.1) is None
    w0.set_own(1, 0)
    assert shared.tell(0.2) == Notice(A, 2, False, {W0: Told(1, 0)})
    w0.set_own(0, 0)
    assert shared.tell(0.3) == Notice(A, 3, False, {W0: Told(0, 0)})
    assert shared.tell(WHOLE_EVERY_S) == Notice(A, 4, True, {W1: Told(1, 20)})


def test_what_was_at_a_worker_that_left_is_told_to_be_over() -> None:
    shared = SharedLoad(A)
    share = shared.join("w0", b"i")
    shared.tell(0.0)
    share.set_own(1, 10)
    shared.leave(share)
    assert shared.tell(0.1) == Notice(A, 2, False, {W0: Told(0, 0)})


def test_of_too_many_workers_those_with_the_most_sequences_are_told() -> None:
    shared = SharedLoad(A)
    for number in range(MAX_TOLD_WORKERS + 10):
        shared.join(f"w{number}", b"i").set_own(1 + number, 0)
    told = shared.tell(0.0)
    assert told is not None
    assert sorted(each.sequences for each in told.workers.values()) == [*range(11, MAX_TOLD_WORKERS + 11)]
    assert len(pack_notice(told, KEY)) <= MAX_NOTICE_BYTES
    for share in [shared.join(f"w{number}", b"i") for number in range(MAX_TOLD_WORKERS + 10)]:
        share.set_own(2, 0)
    changes = [shared.tell(0.1), shared.tell(0.1)]
    assert [len(each.workers) for each in changes if each is not None] == [MAX_TOLD_WORKERS, 10]


# ---------------------------------------------------------------- homes


def test_routers_with_work_divide_the_workers_alike_and_evenly() -> None:
    routers = [SharedLoad(name * 8) for name in (b"a", b"b", b"c")]
    shares = [[router.join(f"w{number}", b"i") for number in range(30)] for router in routers]
    assert all(each.home for row in shares for each in row)
    for router in routers:
        for other in routers:
            router.hear(Notice(other.router, 1, True, {W0: Told(1, 0)}), 0.0)
    homes = [[number for number in range(30) if row[number].home] for row in shares]
    assert Counter(map(len, homes)) == {10: 3}
    assert sorted(place for each in homes for place in each) == [*range(30)]


def test_a_router_without_work_has_no_home_after_a_while() -> None:
    shared = SharedLoad(A)
    shares = [shared.join(f"w{number}", b"i") for number in range(10)]
    shared.hear(notice(1, whole=True), 0.0)
    assert all(each.home for each in shares)
    shared.hear(notice(2, w0=(1, 0)), 1.0)
    assert sum(each.home for each in shares) == 5
    moves = shared.moves
    shared.hear(notice(3, whole=True), 2.0)
    assert shared.moves == moves  # a pause between two requests moves nothing
    shared.hear(notice(4, whole=True), 2.0 + FORGET_S)
    assert all(each.home for each in shares)


def test_a_router_of_other_workers_has_no_home_here() -> None:
    shared = SharedLoad(A)
    shares = [shared.join(f"w{number}", b"i") for number in range(10)]
    shared.hear(notice(1, whole=True, x0=(1, 0), x1=(1, 0)), 0.0)
    assert (shared.others, all(each.home for each in shares)) == (1, True)
    shared.hear(notice(2, w3=(1, 0)), 1.0)
    assert sum(each.home for each in shares) == 5


def test_a_worker_that_joins_gets_a_home_too() -> None:
    routers = [SharedLoad(A), SharedLoad(B)]
    shares = [[router.join("w0", b"i") for router in routers]]
    for router, other in (routers, routers[::-1]):
        router.hear(Notice(other.router, 1, True, {W0: Told(1, 0)}), 0.0)
    shares += [[router.join(name, b"i") for router in routers] for name in ("w1", "w2")]
    assert [sum(each.home for each in row) for row in shares] == [1, 1, 1]
    routers[0].leave(shares[1][0])
    routers[1].leave(shares[1][1])
    assert [sum(each.home for each in row) for row in shares[::2]] == [1, 1]


# ---------------------------------------------------------------- a worker's model


def model_with(shared: SharedLoad, load: Load) -> WorkerModel:
    model = WorkerModel("w0", CAPACITY, load, 0.0)
    model.share = shared.join("w0", b"i")
    return model


def test_what_others_placed_counts_once_before_and_after_a_heartbeat_that_has_it() -> None:
    shared = SharedLoad(A)
    model = model_with(shared, Load())
    model.placed(1, 100, 2)
    shared.hear(notice(1, w0=(3, 60)), 0.0)
    assert (model.sequences, model.unreported) == (1, (3, 60))
    model.heartbeat(Load(running=1, waiting=3, pending_prefill_tokens=160), 0.1)
    assert (model.sequences, model.unreported) == (4, (0, 0))
    # Two more of the others are under way: what is beyond the heartbeat counts alone.
    shared.hear(notice(2, w0=(5, 100)), 0.1)
    assert (model.sequences, model.unreported) == (4, (2, 40))


def test_what_nobody_told_of_still_counts_as_reported() -> None:
    shared = SharedLoad(A)
    model = model_with(shared, Load(running=6, pending_prefill_tokens=500))
    shared.hear(notice(1, w0=(2, 30)), 0.0)
    assert (model.sequences, model.pending_prefill_tokens, model.unreported) == (6, 500, (0, 0))


def test_a_model_tells_what_is_outstanding() -> None:
    shared = SharedLoad(A)
    model = model_with(shared, Load())
    shared.tell(0.0)
    model.placed(2, 100, 4)
    model.placed(0, -60, 0)
    assert shared.tell(0.1) == Notice(A, 2, False, {W0: Told(2, 40)})


# ---------------------------------------------------------------- the bytes


figures = st.builds(Told, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
notices = st.builds(
    Notice,
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.dictionaries(st.binary(min_size=8, max_size=8), figures, max_size=5),
)


@given(notices, st.sampled_from([None, KEY]))
def test_a_notice_is_what_it_was_after_its_way(sent: Notice, key: bytes | None) -> None:
    assert unpack_notice(pack_notice(sent, key), key) == sent


@given(st.binary(max_size=200), st.sampled_from([None, KEY]))
def test_any_bytes_are_a_notice_or_an_error_with_words(value: bytes, key: bytes | None) -> None:
    words = ""
    try:
        unpack_notice(value, key)
    except ValueError as wrong:
        words = str(wrong)
    assert not words or words.startswith("it")


def test_what_is_wrong_is_named() -> None:
    good = pack_notice(notice(w0=(1, 2)), KEY)
    plain = pack_notice(notice(w0=(1, 2)))
    for value, key, words in (
        (good[:-1] + b"x", KEY, "not signed"),
        (plain, KEY, "not signed"),
        (good, b"other key", "not signed"),
        (plain[:5], None, "fewer than a notice"),
        (b"\x02" + plain[1:], None, "version 2; 1 was expected"),
        (plain + b"x", None, "no whole number of 16 bytes"),
        (b"\0" * (MAX_NOTICE_BYTES + 1), None, "at most"),
        (plain[:19] + b"e" * 16 * (MAX_TOLD_WORKERS + 1), None, f"at most {MAX_TOLD_WORKERS} were expected"),
    ):
        with pytest.raises(ValueError, match=words):
            unpack_notice(value, key)


def test_a_later_version_may_tell_more_of_each_worker() -> None:
    longer = struct.pack("<BBB8sQ", 1, 1, 20, B, 7) + W0 + struct.pack("<III", 2, 30, 99)
    assert unpack_notice(longer) == notice(7, whole=True, w0=(2, 30))


def test_figures_beyond_the_format_are_cut() -> None:
    far = replace(notice(), workers={W0: Told(2**40, 2**40)})
    assert unpack_notice(pack_notice(far)).workers[W0] == Told(2**32 - 1, 2**32 - 1)


# ---------------------------------------------------------------- any way that notices take


class Ways(RuleBasedStateMachine):
    """Two routers tell a third what they have; notices are lost, doubled and reordered, and routers die."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.rng = 0.0, random.Random(0)
        self.third = SharedLoad(b"t" * 8)
        self.heard = [self.third.join(name, b"i") for name in ("w0", "w1")]
        self.on_way: list[Notice] = []
        self.born = 0
        self.routers = [self._new(), self._new()]

    def _new(self) -> tuple[SharedLoad, list[WorkerModel]]:
        self.born += 1
        shared = SharedLoad(self.born.to_bytes(8, "big"))
        models = [WorkerModel(name, CAPACITY, Load(), 0.0) for name in ("w0", "w1")]
        for model in models:
            model.share = shared.join(model.worker_id, b"i")
        return shared, models

    @rule(router=st.integers(0, 1), worker=st.integers(0, 1), tokens=st.integers(0, 100))
    def place(self, router: int, worker: int, tokens: int) -> None:
        self.routers[router][1][worker].placed(1, tokens, 1)

    @rule(router=st.integers(0, 1), worker=st.integers(0, 1))
    def release(self, router: int, worker: int) -> None:
        model = self.routers[router][1][worker]
        if model.outstanding:
            model.placed(-1, -min(100, model._outstanding.prefill_tokens), -1)

    @rule(router=st.integers(0, 1), copies=st.integers(0, 2))
    def tell(self, router: int, copies: int) -> None:
        said = self.routers[router][0].tell(self.now)
        self.on_way += [said] * copies if said is not None else []

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        if self.on_way:
            place = data.draw(st.integers(0, len(self.on_way) - 1))
            self.third.hear(self.on_way.pop(place), self.now)

    @rule(seconds=st.sampled_from([0.01, 0.5, FORGET_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.third.expire(self.now)

    @rule(router=st.integers(0, 1))
    def die(self, router: int) -> None:
        self.routers[router] = self._new()

    @invariant()
    def sums_are_those_of_the_routers_that_are_heard(self) -> None:
        for share in self.heard:
            told = [other.workers.get(share.key, Told(0, 0)) for other in self.third._others.values()]
            assert share.sequences == sum(each.sequences for each in told) >= 0
            assert share.prefill_tokens == sum(each.prefill_tokens for each in told) >= 0

    def teardown(self) -> None:
        """Whatever happened: once the dead are forgotten and one whole notice of each came, all is right."""
        self.now += FORGET_S + 1.0
        self.third.expire(self.now)
        for shared, _ in self.routers:
            said = shared.tell(self.now)
            assert said is not None
            assert said.whole
            self.third.hear(said, self.now)
        for place, share in enumerate(self.heard):
            models = [models[place] for _, models in self.routers]
            assert share.sequences == sum(model.outstanding for model in models)
            assert share.prefill_tokens == sum(max(0, model._outstanding.prefill_tokens) for model in models)


TestWays = Ways.TestCase
