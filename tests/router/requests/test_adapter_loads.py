"""Requests that wait for the same adapter at one worker share a load; a full memory is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from common.contracts.adapters import NOBODYS, AdapterRef, AdapterShare
from common.contracts.clock import ManualClock
from common.contracts.errors import DeadlineExceeded, NotFound, Overloaded, QuotaViolation, RateLimited
from gpuworker.scheduling.adapter_table import CLAIM_S
from router.requests.adapter_loads import AdapterLoads
from router.workers.client import WorkerClient

ACME = AdapterShare("acme", ("sql",), 1000)
SQL = AdapterRef("sql", "1" * 64)
FULL = Overloaded(QuotaViolation("worker.loras", "all are in use"), 1.0)


class Client:
    """A worker's connection whose loads a test answers."""

    def __init__(self) -> None:
        self.loads: list[asyncio.Future[None]] = []
        self.shares: list[AdapterShare] = []
        self.asked = asyncio.Event()

    def load_adapter(self, wanted: AdapterRef, path: str = "", share: AdapterShare = NOBODYS) -> asyncio.Future[None]:
        assert (wanted, path) == (SQL, "")
        self.shares.append(share)
        self.loads.append(asyncio.get_running_loop().create_future())
        self.asked.set()
        return self.loads[-1]

    async def next_load(self) -> asyncio.Future[None]:
        async with asyncio.timeout(60):
            await self.asked.wait()
        self.asked.clear()
        return self.loads[-1]


def begin(
    loads: AdapterLoads,
    client: Client,
    deadline: float | None = None,
    give_way: Callable[[str], None] = lambda why: None,
) -> tuple[asyncio.Task[None], asyncio.Event]:
    interrupted = asyncio.Event()
    wait = loads.load(cast("WorkerClient", client), SQL, deadline, interrupted, give_way, ACME)
    return asyncio.create_task(wait), interrupted


async def test_two_requests_share_a_load() -> None:
    loads, client = AdapterLoads(ManualClock().monotonic), Client()
    (first, _), (second, _) = begin(loads, client), begin(loads, client)
    (await client.next_load()).set_result(None)
    await asyncio.gather(first, second)
    assert len(client.loads) == 1
    third, _ = begin(loads, client)
    (await client.next_load()).set_result(None)
    await third
    assert len(client.loads) == 2
    assert client.shares == [ACME, ACME]


async def test_a_request_that_is_interrupted_leaves_and_the_load_goes_on() -> None:
    loads, client = AdapterLoads(ManualClock().monotonic), Client()
    (first, interrupted), (second, _) = begin(loads, client), begin(loads, client)
    load = await client.next_load()
    interrupted.set()
    await first
    assert not second.done()
    load.set_result(None)
    await second


async def test_a_full_memory_is_asked_again_and_then_refuses() -> None:
    clock = ManualClock()
    loads, client = AdapterLoads(clock.monotonic, patience=5.0), Client()
    waiting, _ = begin(loads, client)
    (await client.next_load()).set_exception(FULL)
    (await client.next_load()).set_exception(FULL)
    third = await client.next_load()
    clock.advance(5.0)
    third.set_exception(FULL)
    with pytest.raises(Overloaded, match=r"^worker\.loras: all are in use; the request has waited for 5 s; try again"):
        await waiting
    assert len(client.loads) == 3


async def test_one_that_came_later_waits_longer_and_a_refusal_for_a_tenants_limit_stays_one() -> None:
    clock = ManualClock()
    loads, client = AdapterLoads(clock.monotonic, patience=5.0), Client()
    first, _ = begin(loads, client)
    load = await client.next_load()
    clock.advance(3.0)
    later, _ = begin(loads, client)
    load.set_exception(FULL)
    load = await client.next_load()
    clock.advance(2.0)
    load.set_exception(RateLimited(QuotaViolation("tenant acme.adapter_bytes", "at most 9"), 1.0))
    with pytest.raises(RateLimited, match="at most 9; the request has waited for 5 s"):
        await first
    assert not later.done()
    (await client.next_load()).set_result(None)
    await later


async def test_requests_give_way_once_while_the_memory_is_full() -> None:
    loads, client, gave = AdapterLoads(ManualClock().monotonic), Client(), list[str]()
    first, _ = begin(loads, client, give_way=lambda why: gave.append(f"first: {why}"))
    load = await client.next_load()
    assert gave == []
    load.set_exception(FULL)
    await client.next_load()
    second, _ = begin(loads, client, give_way=lambda why: gave.append(f"second: {why}"))
    client.loads[-1].set_exception(FULL)
    (await client.next_load()).set_result(None)
    await asyncio.gather(first, second)
    assert gave == ["first: all are in use", "second: all are in use"]


async def test_a_load_that_finds_room_lets_nobody_give_way() -> None:
    loads, client, gave = AdapterLoads(ManualClock().monotonic), Client(), list[str]()
    waiting, _ = begin(loads, client, give_way=gave.append)
    (await client.next_load()).set_result(None)
    await waiting
    assert gave == []


async def test_a_full_memory_is_not_asked_for_requests_that_have_left() -> None:
    others = asyncio.all_tasks()
    loads, client = AdapterLoads(ManualClock().monotonic), Client()
    waiting, interrupted = begin(loads, client)
    (await client.next_load()).set_exception(FULL)
    load = await client.next_load()
    interrupted.set()
    await waiting
    load.set_exception(FULL)
    another, _ = begin(loads, client)
    async with asyncio.timeout(60):
        (await client.next_load()).set_result(None)
        await another
        await asyncio.gather(*asyncio.all_tasks() - others, return_exceptions=True)
    assert len(client.loads) == 3


async def test_the_workers_reason_ends_all_that_wait() -> None:
    loads, client = AdapterLoads(ManualClock().monotonic), Client()
    waiting = [begin(loads, client)[0] for _ in range(2)]
    (await client.next_load()).set_exception(NotFound("adapter 'sql' is not known at this worker; load it"))
    found: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in found] == [NotFound, NotFound]


async def test_a_deadline_that_has_passed_is_no_wait() -> None:
    clock = ManualClock()
    loads, client = AdapterLoads(clock.monotonic), Client()
    waiting, _ = begin(loads, client, deadline=clock.monotonic())
    with pytest.raises(DeadlineExceeded, match="while adapter sql was loaded"):
        await waiting


async def test_the_more_loads_wait_the_more_rarely_each_is_tried_and_none_leaves_its_line() -> None:
    loads = AdapterLoads(ManualClock().monotonic)
    for waiting, pause in ((0, 0.05), (64, 0.05), (256, 0.2), (1024, 0.8), (100_000, 1.0)):
        loads._running = dict.fromkeys(range(waiting))  # type: ignore[arg-type, assignment]
        assert loads._pause() == pytest.approx(pause)
        assert loads._pause() < CLAIM_S
