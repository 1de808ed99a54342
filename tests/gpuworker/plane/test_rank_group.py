"""How a worker's ranks come together: who does not come, who differs, and who is lost."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import pytest

from common.contracts.errors import InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.plane.rank_group import RankGroup, rank_facts, start_group
from gpuworker.plane.rank_watch import STILL_LOOKS, how_it_ended
from gpuworker.runner.rank_messages import Agreed, Begin, Ended, Facts, Loaded, Start, packed, received, send
from gpuworker.runner.rank_steps import AdapterLoad, AdapterLoaded, RankLinks, RankPlan
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.engine_harness import PATIENCE
from tests.support.waiting import wait_until

Says = Callable[[Mapping[str, str]], Mapping[str, str] | bytes | None]
PLAN = RankPlan(np.empty((0, 2), dtype=np.int32), None)


def _framed(message: NamedTuple) -> bytes:
    data = packed(message)
    return struct.pack("!i", len(data)) + data


class FakeMember:
    """Says what a test wants in its greeting, and answers what follows."""

    def __init__(self, says: Says, ended: str, connection: socket.socket, facts: Mapping[str, str]) -> None:
        self._link, self._ended, self.killed = Connection(os.dup(connection.fileno())), ended, False
        self._says, self._facts, self.looks = says, facts, 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            assert isinstance(received(self._link), Start)
            said = self._says(self._facts)
            if said is None:
                return
            if isinstance(said, bytes):
                os.write(self._link.fileno(), said)
                return
            send(self._link, Facts(dict(said)))
            assert isinstance(received(self._link), Agreed)
            send(self._link, Loaded(77))
            assert isinstance(received(self._link), Begin)
            send(self._link, Loaded(77))
        except (EOFError, OSError):
            pass

    def hang_up(self) -> None:
        self._thread.join(PATIENCE)
        self._link.close()

    def end_as(self, how: str) -> None:
        self._ended = how

    def ended(self) -> str:
        self.looks += 1
        return self._ended

    def kill(self) -> None:
        self.killed = True

    def end(self, seconds: float) -> None:
        self._link.close()


class Group:
    def __init__(self, says: Mapping[int, Says], ranks: int = 3, ended: str = "", timeout: float = 60) -> None:
        self.settings = GpuWorkerSettings(
            model=str(checkpoint("llama")), tensor_parallel_size=ranks, rank_timeout=timeout, max_model_len=64
        )
        facts = rank_facts(self.settings).by_name
        self.members: dict[int, FakeMember] = {}
        self.reasons: list[str] = []
        self.lost = threading.Event()

        def start(rank: int, connection: socket.socket, board: int) -> FakeMember:
            self.members[rank] = FakeMember(says.get(rank, lambda own: own), ended, connection, facts)
            return self.members[rank]

        self._start = start

    def open(self) -> RankGroup:
        return start_group(self.settings, self._start, self.note_loss)

    def note_loss(self, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()


def test_ranks_that_do_not_come_are_named() -> None:
    group = Group({2: lambda own: None}, timeout=0.2)
    with pytest.raises(InvalidConfig) as refused:
        group.open()
    (found,) = refused.value.violations
    assert found.field == "--rank-timeout"
    assert found.description == "rank 2 did not come within 0.2 s; its log lines say why, or give it longer"


def test_a_rank_that_ended_before_it_came_is_told_apart() -> None:
    group = Group({1: lambda own: None, 2: lambda own: None}, ended=how_it_ended(-signal.SIGSEGV), timeout=0.1)
    with pytest.raises(InvalidConfig, match="rank 1 was ended by SIGSEGV; rank 2 was ended by SIGSEGV"):
        group.open()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\0\0", "did not come within 60 s"),  # half a header, and nothing more
        (struct.pack("!i", 1000) + b"x", "did not come within 60 s"),
        (struct.pack("!i", 1 << 20), "ended"),  # more than facts have
        (_framed(Facts({"version": 1})), "said what none says"),  # type: ignore[dict-item]
        (_framed(Facts("version")), "said what none says"),  # type: ignore[arg-type]
        (_framed(Loaded(1)), "said what none says"),
        (_framed(Ended("x" * 9000)), "x" * 200 + ";"),
        (_framed(Facts({}))[:4] + b"\0" * 99, "is not one of this version"),
    ],
)
def test_a_rank_that_says_half_of_a_message_or_none_ends_the_start_and_is_named(sent: bytes, said: str) -> None:
    group = Group({1: lambda own: sent}, ranks=2)
    with pytest.raises(InvalidConfig) as refused:
        group.open()
    (found,) = refused.value.violations
    assert found.description.startswith(f"rank 1 {said}"), found.description
    assert len(found.description) < 400


def test_what_a_rank_says_of_itself_is_cut() -> None:
    group = Group({1: lambda own: {**own, "version": "9" * 9000}}, ranks=2)
    with pytest.raises(InvalidConfig) as refused:
        group.open()
    assert len(refused.value.violations[0].description) < 400


def test_a_rank_that_takes_no_plan_is_said_to_have_ended_as_it_did() -> None:
    """Its connection ends before its process can be seen to have ended."""
    group = Group({}, ranks=2)
    opened = group.open()
    try:
        opened.await_loaded()
        opened.begin(Begin(1, 1, 1, 1, 1))
        member = group.members[1]
        member.hang_up()
        looks = member.looks

        def send_plan() -> None:
            with suppress(OSError):
                opened.links.send_plan(PLAN)

        threading.Thread(target=send_plan, daemon=True).start()
        wait_until(lambda: member.looks > looks + 5)  # more than the watch takes meanwhile
        member.end_as(how_it_ended(-signal.SIGKILL))
        assert group.lost.wait(PATIENCE)
        assert group.reasons == ["rank 1 was ended by SIGKILL"]
    finally:
        opened.close()


def test_the_last_word_on_a_rank_is_told_also_where_a_load_reads_it() -> None:
    own, other = socket.socketpair()
    lost = list[tuple[int, str]]()
    links = RankLinks({1: Connection(own.detach())}, lambda rank, how: lost.append((rank, how)))
    rank = Connection(other.detach())
    send(rank, Ended("was ended by SIGKILL"))
    with pytest.raises(EOFError):
        links.load_adapter(AdapterLoad(1, "x"))
    assert lost == [(1, "was ended by SIGKILL")]


def test_what_is_forgotten_goes_with_the_next_load_or_plan() -> None:
    own, other = socket.socketpair()
    links, rank = RankLinks({1: Connection(own.detach())}, lambda rank, how: None), Connection(other.detach())
    links.forgotten += [3, 4]
    send(rank, AdapterLoaded("ff"))
    links.load_adapter(AdapterLoad(5, "x"))
    links.forgotten.append(5)
    links.send_plan(PLAN)
    links.send_plan(PLAN)
    assert [received(rank).forgotten for _ in range(3)] == [(3, 4), (5,), ()]


def test_each_difference_between_ranks_is_a_line() -> None:
    other = {"version": "0.0.1", "--kv-cache-dtype": "int8"}
    group = Group({1: lambda own: {**own, **other}, 2: lambda own: {**own, "the checkpoint": "ff"}})
    with pytest.raises(InvalidConfig) as refused:
        group.open()
    first, option, second = (each.description for each in refused.value.violations)
    assert option == "rank 1 has --kv-cache-dtype int8, and rank 0 has auto; start all alike"
    assert first.startswith("rank 1 has version 0.0.1, and rank 0 has ")
    assert second.startswith("rank 2 has the checkpoint ff, and rank 0 has ")
    assert second.endswith("; start all alike")


def test_a_rank_that_ends_while_steps_run_ends_the_worker_and_the_others() -> None:
    group = Group({})
    opened = group.open()
    try:
        opened.await_loaded()
        opened.begin(Begin(1, 1, 1, 1, 1))
        assert opened.weight_bytes == {1: 77, 2: 77}
        group.members[2].end_as(how_it_ended(-signal.SIGKILL))
        assert group.lost.wait(PATIENCE)
        assert group.reasons == [opened.lost] == ["rank 2 was ended by SIGKILL"]
        assert all(member.killed for member in group.members.values())
    finally:
        opened.close()


def test_a_rank_without_beats_is_lost_once_the_worker_serves() -> None:
    """These members never beat: that counts from `serve` on, and not while models load."""
    group = Group({}, ranks=2)
    opened = group.open()
    try:
        opened.await_loaded()
        opened.begin(Begin(1, 1, 1, 1, 1))
        assert not opened.board.serving
        wait_until(lambda: group.members[1].looks > STILL_LOOKS + 3)
        assert not group.reasons
        opened.serve(group.note_loss)
        assert group.lost.wait(PATIENCE)
        assert group.reasons == ["rank 1 stood still for 1.2 s"]
    finally:
        opened.close()
