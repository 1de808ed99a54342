"""Lookups of names. One that gets no answer for long keeps no other one waiting, and no process from ending."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from common.group.names import resolved
from common.rpc import event_loop
from tests.support.waiting import until

PATIENCE = 60.0
# More than any pool of threads has that a loop of this machine would use.
MANY = 64

getaddrinfo = socket.getaddrinfo


class HeldLookups:
    """Lookups of hosts under held.test end when `answer` is set; `begun` are those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.answer = list[str](), threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: str, *args: Any, **kwargs: Any) -> object:
        if not host.endswith("held.test"):
            return getaddrinfo(host, *args, **kwargs)
        self.begun.append(host)
        assert self.answer.wait(PATIENCE)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]


async def test_the_resolver_of_this_machine_is_asked() -> None:
    assert "127.0.0.1" in await resolved("localhost")
    assert list(await resolved("127.0.0.7")) == ["127.0.0.7"]
    with pytest.raises(OSError, match=r"."):
        await resolved("no-such-host.invalid")


def test_lookups_without_an_answer_keep_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop of the services: neither another name of managers waits, nor what the loop itself looks up."""
    held = HeldLookups(monkeypatch)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            looking = [asyncio.create_task(resolved(f"{number}.held.test")) for number in range(MANY)]
            await until(lambda: len(held.begun) >= MANY)
            assert list(await resolved("127.0.0.7")) == ["127.0.0.7"]
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
            held.answer.set()
            assert await asyncio.gather(*looking) == [["10.0.0.1"]] * MANY

    event_loop.run(main())


async def test_a_lookup_is_awaited_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver asks a second name server after 5 s."""
    held, loop = HeldLookups(monkeypatch), asyncio.get_running_loop()
    looking = asyncio.create_task(resolved("held.test"))
    await until(lambda: held.begun)
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 60.0)
    await asyncio.sleep(0.01)
    held.answer.set()
    assert await looking == ["10.0.0.1"]


async def test_a_lookup_without_a_thread_is_one_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="can't start new thread"):
        await resolved("managers.test")


CHILD = """
import asyncio, socket, sys, threading
from common.group.leader_watch import LeaderWatch
from common.process.advertise import reachable_address
from common.process.supervised import Supervisor
from common.rpc import event_loop
from common.rpc.server import open_channel

begun = threading.Event()

def getaddrinfo(*_, **__):
    begun.set()
    threading.Event().wait()

socket.getaddrinfo = getaddrinfo

async def until_begun():
    while not begun.is_set():
        await asyncio.sleep(0.01)

async def managers():
    supervisor = Supervisor()
    watch = LeaderWatch(["held.test:1"], open_channel)
    watch.start(supervisor)
    await until_begun()
    await watch.close()
    await supervisor.aclose()

async def own_address():
    asking = asyncio.create_task(reachable_address("0.0.0.0", 1, "held.test:1"))
    await until_begun()
    asking.cancel()

event_loop.run(globals()[sys.argv[1]]())
print("ended", flush=True)
"""


@pytest.mark.parametrize("main", ["managers", "own_address"])
def test_a_process_ends_during_a_lookup(main: str) -> None:
    """Its loop is closed, and the interpreter ends, although the lookup never does."""
    command = [sys.executable, "-c", CHILD, main]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"ended\n", b"")
