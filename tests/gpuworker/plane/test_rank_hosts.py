"""Ranks on several hosts: where each is, what they say to each other, and that their tokens are those of one process.

The hosts are trees of processes that share nothing but loopback. `tests/suites/deployment/hosts` has namespaces.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from common.contracts.errors import FieldViolation, InvalidConfig
from common.settings.config import FAILED_STATUS
from gpuworker.config import GpuWorkerSettings
from gpuworker.native import library as native
from gpuworker.native.ranks import HostRanks, RankBoard
from gpuworker.plane import rank_rendezvous
from gpuworker.plane.assembly import assemble
from gpuworker.plane.rank_bridge import Bridge
from gpuworker.plane.rank_hosts import Hosts
from gpuworker.plane.rank_rendezvous import Joined, MemberProcess, RemoteMember, Rendezvous, interface_of, join
from gpuworker.runner.executor import PlacedCheckpoint
from gpuworker.runner.rank_messages import Ended, Facts, Loaded, Start, array_of, packed, send, unpacked
from gpuworker.runner.rank_steps import RankPlan
from tests.gpuworker.engine.test_equality import COUNT, prompts
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gpuworker.engine_harness import PATIENCE, EngineDriver
from tests.support.waiting import wait_until

PLACE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


# ------------------------------------------------------------ where each rank is


def test_ranks_are_shared_out_among_hosts_in_order() -> None:
    hosts = Hosts.of(PLACE, 4)
    assert hosts == Hosts(2, 1, "10.0.0.1", 29500)
    assert [list(hosts.ranks(host, 4)) for host in (0, 1)] == [[0, 1], [2, 3]]
    each = Hosts.of(PLACE | {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2"}, 4)
    assert (list(each.own_ranks(4)), each.beside) == ([3], 2)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "7", "MASTER_ADDR": "x"}])
def test_without_a_world_all_ranks_are_here(environ: dict[str, str]) -> None:
    assert Hosts.of(environ, 4) == Hosts()
    assert list(Hosts().own_ranks(4)) == [0, 1, 2, 3]


def test_one_rank_has_no_place_to_take() -> None:
    """What a launcher has set for something else stays without meaning, as before."""
    assert Hosts.of(PLACE, 1) == Hosts()


@pytest.mark.parametrize(
    ("changed", "field", "said"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE", "is 3, and does not divide the 4 ranks"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE", "is 'two'; expected a number from 1 or more"),
        ({"RANK": ""}, "RANK", "is missing; expected a number from 0 to 1"),
        ({"RANK": "2"}, "RANK", "is '2'; expected a number from 0 to 1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT", "is '0'; expected a number from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR", "is missing; expected the host name or address of rank 0"),
        ({"MASTER_ADDR": "::1"}, "MASTER_ADDR", "is ::1, and ranks meet over IPv4; expected the host name"),
        ({"MASTER_ADDR": "[fd00::7]"}, "MASTER_ADDR", "is [fd00::7], and ranks meet over IPv4"),
        ({"LOCAL_WORLD_SIZE": "9" * 5000}, "LOCAL_WORLD_SIZE", "expected a number from 1 to 2"),
    ],
)
def test_each_variable_that_is_wrong_is_named(changed: dict[str, str], field: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Hosts.of(PLACE | changed, 4)
    (found,) = refused.value.violations
    assert found.field == field
    assert said in found.description
    assert len(found.description) < 200


def test_ranks_listen_on_loopback_unless_an_interface_is_named() -> None:
    said = Hosts.of(PLACE, 2).interface_problem(None)
    assert isinstance(said, FieldViolation)
    assert (said.field, "MASTER_ADDR is 10.0.0.1" in said.description) == ("--rank-interface", True)
    assert Hosts.of(PLACE, 2).interface_problem("eth1") is None
    for address in ("127.0.0.1", "127.9.9.9", "localhost"):
        assert Hosts.of(PLACE | {"MASTER_ADDR": address}, 2).interface_problem(None) is None
    assert Hosts().interface_problem(None) is None


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert interface_of(None) == ("lo", "127.0.0.1")
    with pytest.raises(InvalidConfig, match=r"is none0, which has no IPv4 address here: .*; expected one of .*lo"):
        interface_of("none0")


# ------------------------------------------------------------ what ranks say to each other


def test_plans_and_facts_come_back_as_they_were() -> None:
    plan = RankPlan(np.arange(6, dtype=np.int32).reshape(3, 2)[:, :1], None, (PlacedCheckpoint(1, ()),), (), ())
    found = unpacked(packed(plan))
    assert isinstance(found, RankPlan)
    assert found.copies.tolist() == [[0], [2], [4]]
    assert found.loads == plan.loads
    for message in (Start("{}", 1, 2, (3, 4)), Facts({"version": "1"}), Ended("was ended by SIGKILL")):
        assert unpacked(packed(message)) == message


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/quire-was-here",)


class Pointers:
    """An array of objects, by numpy's own constructor, whose pointers are the bytes that are sent."""

    def __reduce__(self) -> Any:
        return np.ndarray, ((1,), "O", b"pointers")


class Array:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return array_of, self.parts


def changed_class() -> bytes:
    named = b"cgpuworker.runner.rank_messages\nLoaded\n"
    return b"\x80\x04" + named + b"N}\x8c\x07failureN\x73\x86b."


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Command()),
        pickle.dumps(Path("/tmp")),
        pickle.dumps(GpuWorkerSettings),
        pickle.dumps(Pointers()),
        pickle.dumps(np.arange(3)),
        pickle.dumps(np.array(["a"], dtype=object)),
        pickle.dumps(Array(bytearray(8), "O", (1,)), 5),
        pickle.dumps(Array(bytearray(8), "<f8", (1,)), 5),
        pickle.dumps(Array(bytearray(8), "<i4", (1 << 40,)), 5),
        pickle.dumps(Array("12345678", "<i4", (2,)), 5),
        b"cgpuworker.runner.rank_steps\ntime.sleep\n.",
        b"cgpuworker.runner.rank_messages\nimportlib\n.",
        b"cgpuworker.runner.rank_steps\nConnection\n.",
        packed(Facts({"a": "b"}))[:-4],
        b"",
    ],
)
def test_what_is_no_message_makes_nothing(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        unpacked(data)
    assert not Path("/tmp/quire-was-here").exists()


def test_a_message_changes_nothing_that_later_ones_have() -> None:
    with suppress(pickle.UnpicklingError):
        unpacked(changed_class())
    assert Loaded(1) == (1, "")
    assert Loaded(1).failure == ""


def test_a_rank_elsewhere_ends_with_its_link_or_with_a_word() -> None:
    own, other = socket.socketpair()
    member, link = RemoteMember(own.dup()), Connection(other.detach())
    assert member.ended() == ""
    send(link, Facts({"a": "b" * 9000}))  # for who reads the link; longer than what is looked at
    assert member.ended() == ""
    Connection(own.detach()).recv_bytes()
    send(link, Ended("was ended by SIGKILL"))
    assert member.ended() == "was ended by SIGKILL"
    link.close()
    assert member.ended() == "was ended by SIGKILL"
    member.end(PATIENCE)
    gone, lost = socket.socketpair()
    lost.close()
    with gone:
        assert RemoteMember(gone).ended().startswith("is gone")


class Linked:
    """A bridge of the second host of two, and the other end of its link."""

    def __init__(self) -> None:
        library, self.board, self.ended = native.best(), RankBoard.make(), threading.Event()
        assert library is not None
        own, other = socket.socketpair()
        self.link = Connection(own.detach())
        bridge = Bridge(
            HostRanks(library, self.board, range(1, 2), 2), Hosts(2, 1, "x", 1), {0: Connection(other.detach())}
        )
        bridge.start(lambda host: self.ended.set())

    def close(self) -> None:
        self.link.close()
        assert self.ended.wait(PATIENCE)
        self.board.close()


@pytest.fixture
def linked() -> Iterator[Linked]:
    found = Linked()
    yield found
    found.close()


needs_native = pytest.mark.skipif(native.best() is None, reason="the native library is not there")


@needs_native
def test_beats_go_both_ways_and_say_whether_the_worker_serves(linked: Linked) -> None:
    linked.board.struct.ranks[1].beats = 7
    wait_until(lambda: linked.link.recv_bytes() == b"B" + struct.pack("<2I", 0, 7))
    linked.link.send_bytes(b"B" + struct.pack("<2I", 1, 2**32 - 1))
    wait_until(lambda: linked.board.serving)
    assert linked.board.beats(0) == 2**32 - 1


@needs_native
@pytest.mark.parametrize(
    "message", [b"", b"X", b"B" + bytes(4), b"B" + bytes(12), b"T" + bytes(7), b"T" + bytes(8), b"T" + bytes(1 << 20)]
)
def test_what_is_neither_beats_nor_tokens_ends_the_link(linked: Linked, message: bytes) -> None:
    """Nor are tokens before the ranks have loaded, or more of them than a step has."""
    linked.link.send_bytes(message)
    assert linked.ended.wait(PATIENCE)
    assert linked.board.struct.ranks[0].begun == 0


# ------------------------------------------------------------ who comes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_ranks_of_hosts_that_do_not_come_are_named_and_strangers_are_not_taken_for_them() -> None:
    hosts = Hosts(2, 0, "127.0.0.1", free_port())
    meeting = Rendezvous(hosts, 4, None, 1.0)
    try:
        address, _, port = meeting.store.get("links").decode().rpartition(":")
        assert address == "127.0.0.1"
        with socket.create_connection((address, int(port))) as stranger:
            stranger.sendall(struct.pack("<4sii", b"QRK0", 1, 2))  # rank 2 by another protocol
            with pytest.raises(InvalidConfig) as refused:
                meeting.await_guests()
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        (found,) = refused.value.violations
        assert found.field == "--rank-timeout"
        assert found.description.startswith("ranks 2, 3 did not come within 1 s; its host connects to 127.0.0.1:")
    finally:
        meeting.close()


def leave(joined: Joined) -> None:
    joined.host.close()
    for link in joined.ranks.values():
        link.close()


def test_strangers_that_say_nothing_or_half_a_hello_hold_off_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are more than may be silent at once, and each would have seconds of its own."""
    monkeypatch.setattr(rank_rendezvous, "_HELLO_S", PATIENCE)
    monkeypatch.setattr(rank_rendezvous, "_MOST_COMING", 4)
    hosts, strangers = Hosts(2, 0, "127.0.0.1", free_port()), list[socket.socket]()
    meeting = Rendezvous(hosts, 2, None, PATIENCE / 2)
    came = ThreadPoolExecutor(1).submit(meeting.await_guests)
    try:
        host, _, port = meeting.store.get("links").decode().rpartition(":")
        for number in range(12):
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(b"QRK1"[: number % 5])
        strangers[0].settimeout(PATIENCE)
        assert strangers[0].recv(1) == b""  # it makes room for the fifth
        joined = join(Hosts(2, 1, "127.0.0.1", hosts.port), 2, None, PATIENCE)
        guests = came.result(PATIENCE)
        assert (list(guests.ranks), list(guests.hosts)) == ([1], [1])
        for link in (guests.ranks[1], joined.ranks[1]):
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        for stranger in strangers:  # all are sent away
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        guests.close()
        leave(joined)
    finally:
        meeting.close()
        for stranger in strangers:
            stranger.close()


def test_a_host_that_comes_between_two_starts_of_rank_0_meets_the_second_one() -> None:
    """The store of the first one still names a port at which nobody listens any more."""
    hosts = Hosts(2, 0, "127.0.0.1", free_port())
    first = Rendezvous(hosts, 2, None, PATIENCE)
    first.close()
    joins = ThreadPoolExecutor(1).submit(join, Hosts(2, 1, "127.0.0.1", hosts.port), 2, None, PATIENCE)
    with suppress(TimeoutError):
        joins.result(0.5)
        pytest.fail("there was nobody to meet")
    again = socket.create_server(("127.0.0.1", 0))
    first.store.set("links", f"127.0.0.1:{again.getsockname()[1]}")
    joined = joins.result(PATIENCE)
    assert list(joined.ranks) == [1]
    leave(joined)
    again.close()


def test_a_port_that_another_process_has_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidConfig, match=r"MASTER_PORT: is .* cannot listen there"),
    ):
        Rendezvous(Hosts(2, 0, "127.0.0.1", taken.getsockname()[1]), 2, None, 1.0)


def test_a_host_whose_rank_0_does_not_come_says_where_it_looked() -> None:
    with pytest.raises(InvalidConfig) as refused:
        join(Hosts(2, 1, "127.0.0.1", free_port()), 2, None, 0.3)
    (found,) = refused.value.violations
    assert found.field == "--rank-timeout"
    assert found.description.startswith("rank 0 did not come at 127.0.0.1:")


# ------------------------------------------------------------ steps


class TwoHosts:
    """Rank 0 in this process, and the other host as a tree of processes of its own."""

    def __init__(self, kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
        self.kind = kind
        options = {"model": str(checkpoint(kind)), "dtype": "float32", "block-size": "4", "kv-blocks": "400"}
        options |= {"max-model-len": "256", "max-num-batched-tokens": "48", "max-num-seqs": "8", "threads": "1"}
        options |= {"tensor-parallel-size": str(ranks), "rank-timeout": str(PATIENCE)}
        place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        self.settings = GpuWorkerSettings(**{name.replace("-", "_"): value for name, value in options.items()})
        flags = [word for name, value in (options | other).items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "gpuworker", *flags]
        self.other = subprocess.Popen(command, env=os.environ | {"RANK": "1"}, stderr=subprocess.PIPE, text=True)

    def ranks_there(self) -> list[psutil.Process]:
        return psutil.Process(self.other.pid).children()

    def close(self) -> None:
        self.other.kill()
        self.other.communicate(timeout=PATIENCE)


@contextmanager
def two_hosts(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch, **other: str) -> Iterator[TwoHosts]:
    threads, hosts = torch.get_num_threads(), TwoHosts(kind, ranks, monkeypatch, **other)
    try:
        yield hosts
    finally:
        hosts.close()
        torch.set_num_threads(threads)


def listening() -> set[str]:
    """Return the addresses at which this process and all below it listen."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [each for process in everyone for each in process.net_connections("tcp")]
    # A socket for both families has an address of IPv4 in the form of IPv6.
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}


def board_of(rank: psutil.Process) -> RankBoard:
    """Return what a rank shares on its host."""
    _, descriptor = rank.cmdline()[-2:]
    handle = os.open(f"/proc/{rank.pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return RankBoard(handle)
    finally:
        os.close(handle)


@needs_native
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("llama", 2),
        *(
            pytest.param(*case, marks=pytest.mark.rest)
            for case in (("llama", 4), ("olmoe", 2), ("gemma4_text, experts", 2), ("lfm2", 2))
        ),
    ],
)
def test_tokens_across_hosts_equal_transformers(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, then again on what is cached; the other host ends well behind rank 0."""
    wanted = [hf_greedy(checkpoint(kind), prompt, COUNT) for prompt in prompts()]
    with two_hosts(kind, ranks, monkeypatch) as hosts:
        plane = assemble(hosts.settings)
        with EngineDriver(plane.runner, plane.agent_config()) as engine:
            assert len(hosts.ranks_there()) == ranks // 2
            assert listening() <= {"127.0.0.1"}
            assert engine.run(prompts(), COUNT) == wanted
            assert engine.run(prompts(), COUNT) == wanted
            engine.assert_all_free()
            plane.report_lost_rank(pytest.fail)
            wait_until(lambda: all(board_of(rank).serving for rank in hosts.ranks_there()))
        assert hosts.other.wait(PATIENCE) == 0


_STILL = "rank 1 stood still for 1.2 s, or its host cannot be reached"
_GONE = "rank 1 is gone: its process ended, or its host cannot be reached"


@needs_native
@pytest.mark.rest
@pytest.mark.parametrize(
    ("how", "whole_host", "said"),
    [
        (signal.SIGKILL, False, {"rank 1 was ended by SIGKILL"}),
        (signal.SIGSTOP, False, {_STILL}),
        (signal.SIGKILL, True, {_GONE}),
        (signal.SIGSTOP, True, {_STILL, _GONE}),
    ],
    ids=["rank killed", "rank stopped", "host killed", "host stopped"],
)
def test_a_rank_or_a_host_that_is_lost_ends_the_worker(
    how: signal.Signals, whole_host: bool, said: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is told the reason, and nothing is left on the other host.

    A rank whose host stands still misses rank 0 when rank 0 misses it, and may end first.
    """
    reasons, lost = list[str](), threading.Event()

    def note(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    with two_hosts("llama", 2, monkeypatch) as hosts:
        plane = assemble(hosts.settings)
        plane.report_lost_rank(note)
        (rank,) = hosts.ranks_there()
        wait_until(lambda: board_of(rank).serving)
        os.kill(hosts.other.pid if whole_host else rank.pid, how)
        assert lost.wait(PATIENCE)
        assert len(reasons) == 1
        assert set(reasons) <= said
        assert hosts.other.wait(PATIENCE) != 0
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        plane.runner.close()


@needs_native
@pytest.mark.rest
def test_a_host_whose_ranks_wait_while_rank_0_is_lost_ends_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever started it starts it again then; its ranks have no step, so they end by themselves."""
    reasons, lost = list[str](), threading.Event()

    def note(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    with two_hosts("llama", 2, monkeypatch) as hosts:
        plane = assemble(hosts.settings)
        group = plane.ranks
        assert group is not None
        assert isinstance(group.bridge, MemberProcess)
        plane.report_lost_rank(note)
        (rank,) = hosts.ranks_there()
        wait_until(lambda: board_of(rank).serving)
        group.bridge.process.kill()
        assert lost.wait(PATIENCE)
        assert reasons == ["the process that carries parts to other hosts was ended by SIGKILL"]
        assert hosts.other.wait(PATIENCE) == FAILED_STATUS
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        plane.runner.close()


@needs_native
@pytest.mark.rest
def test_hosts_that_differ_do_not_start_and_each_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"kv-cache-dtype": "int8", "block-size": "8", "port": "0", "worker-id": "there"}
    with two_hosts("llama", 2, monkeypatch, **other) as hosts:
        with pytest.raises(InvalidConfig) as refused:
            assemble(hosts.settings)
        assert [each.description for each in refused.value.violations] == [
            "rank 1 has --kv-cache-dtype int8, and rank 0 has auto; start all alike",
            "rank 1 has --block-size 8, and rank 0 has 4; start all alike",
        ]
        assert hosts.other.wait(PATIENCE) == 1
