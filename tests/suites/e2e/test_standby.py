"""Two KV managers in one group: the leader is killed, stopped and sent away under streams, and no token changes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from tests.support.load import all_started, kill, prompts
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite

WORKERS, COUNT = 2, 96

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two managers and two workers, 1024 blocks each, float32; each test leaves both managers running."""
    flags = ("--kv-blocks", "1024", "--dtype", "float32", "--orphan-grace", "1")
    # A pause of a busy machine is shorter than this lease.
    group = ("--group-lease", "6")
    options = StackOptions(
        model=CHECKPOINT, workers=WORKERS, worker_flags=flags, manager_flags=group, standby_ports=(0,)
    )
    async with running_suite(tmp_path_factory.mktemp("pair"), options) as running:
        yield running


async def state_of(suite: Suite, name: str) -> pb.WatchLeaderResponse | None:
    """Return what a manager says of itself; None while its process is away."""
    watch = suite.managers[name].WatchLeader(pb.WatchLeaderRequest(), timeout=PATIENCE)
    try:
        with suppress(grpc.aio.AioRpcError):
            async for state in watch:
                return state
    finally:
        watch.cancel()
    return None


async def until(suite: Suite, name: str, leads: bool) -> pb.WatchLeaderResponse:
    """Wait until a manager says that it leads, or that it stands by and knows the leader."""
    async with asyncio.timeout(PATIENCE):
        while True:
            state = await state_of(suite, name)
            if state is not None and state.leads == leads and state.leader:
                return state
            await asyncio.sleep(0.02)


async def roles(suite: Suite) -> tuple[str, str]:
    """Wait until one manager leads and the other one stands by; return their names, the leader's first."""
    async with asyncio.timeout(PATIENCE):
        while True:
            states = {name: await state_of(suite, name) for name in suite.managers}
            leading = [name for name, state in states.items() if state is not None and state.leads]
            standing_by = [name for name, state in states.items() if state is not None and not state.leads]
            if len(leading) == len(standing_by) == 1:
                return leading[0], standing_by[0]
            await asyncio.sleep(0.02)


async def until_followed(suite: Suite, name: str) -> None:
    """Wait until every worker is attached to a manager, and ask that one for pools from now on."""
    suite.manager = suite.managers[name]
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if len(await suite.pools()) == WORKERS:
                    return
            await asyncio.sleep(0.02)


async def until_all_free(suite: Suite) -> None:
    """Wait until the leader holds no block for anybody; who leads may change meanwhile."""
    async with asyncio.timeout(PATIENCE):
        while True:
            leader, _ = await roles(suite)
            suite.manager = suite.managers[leader]
            try:
                if len(await suite.pools()) == WORKERS:
                    return await suite.until_all_free(WORKERS)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.02)


async def ended_right(suite: Suite, asked: list[list[int]], tasks: list[asyncio.Task[Outcome]]) -> None:
    outcomes = await asyncio.gather(*tasks)
    await until_all_free(suite)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


async def fences(suite: Suite) -> dict[object, object]:
    """Return fence and term of the index."""
    async with Redis.from_url(suite.stack.redis_url) as client:
        names = [*await client.keys("*:fence:*"), *await client.keys("{quire:m*:term*")]
        return {name: await client.get(name) for name in names}


async def test_the_standby_takes_over_from_a_killed_leader_under_streams(pair: Suite) -> None:
    for _ in range(2):  # the second time the other way round: who was killed is back
        leader, standby = await roles(pair)
        before = await until(pair, leader, leads=True)
        asked = 2 * prompts(16)
        tasks = await all_started(pair, asked, COUNT)
        kill(pair, leader)
        after = await until(pair, standby, leads=True)
        assert after.term > before.term
        await until_followed(pair, standby)
        await ended_right(pair, asked, tasks)
        back = await until(pair, leader, leads=False)
        assert (back.leader, back.term) == (after.leader, after.term)


async def test_a_leader_that_was_stopped_changes_nothing_and_stands_by(pair: Suite) -> None:
    leader, standby = await roles(pair)
    asked = 2 * prompts(16, seed=1)
    tasks = await all_started(pair, asked, COUNT)
    kill(pair, leader, signal.SIGSTOP)
    try:
        after = await until(pair, standby, leads=True)
        await until_followed(pair, standby)
        again = await pair.generate(greedy(asked[1], 8))
        assert again.finished is not None
        before = await fences(pair)
    finally:
        kill(pair, leader, signal.SIGCONT)
    woken = await until(pair, leader, leads=False)
    assert (woken.leader, woken.term) == (after.leader, after.term)
    await ended_right(pair, asked, tasks)
    assert await fences(pair) == before
    assert (await until(pair, standby, leads=True)).term == after.term
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pair.managers[leader].GetPool(pb.GetPoolRequest(), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == f"this KV manager stands by; {after.leader} leads its group"


async def test_a_leader_that_is_sent_away_hands_over(pair: Suite) -> None:
    leader, standby = await roles(pair)
    asked = 2 * prompts(16, seed=2)
    tasks = await all_started(pair, asked, COUNT)
    kill(pair, leader, signal.SIGTERM)
    await until(pair, standby, leads=True)
    await until_followed(pair, standby)
    await ended_right(pair, asked, tasks)
    await until(pair, leader, leads=False)  # the suite has started it again


async def test_both_managers_are_killed_and_one_leads_again(pair: Suite) -> None:
    before = await until(pair, (await roles(pair))[0], leads=True)
    asked = 2 * prompts(16, seed=3)
    tasks = await all_started(pair, asked, COUNT)
    for name in pair.managers:
        kill(pair, name)
    leader, _ = await roles(pair)
    assert (await until(pair, leader, leads=True)).term > before.term
    await until_followed(pair, leader)
    await ended_right(pair, asked, tasks)


async def test_a_redis_that_hangs_stops_neither_streams_nor_grants(pair: Suite) -> None:
    """New requests are admitted all along, although no lease is renewed; whoever leads afterwards, one does."""
    asked = 2 * prompts(8, seed=4)
    kill(pair, "redis", signal.SIGSTOP)
    try:
        tasks = await all_started(pair, asked, COUNT)
        await asyncio.gather(*tasks)
    finally:
        kill(pair, "redis", signal.SIGCONT)
    await ended_right(pair, asked, tasks)


async def test_status_names_the_leader_and_the_standby(pair: Suite) -> None:
    leader, standby = await roles(pair)
    ports = dict(zip(pair.managers, (pair.stack.options.manager_port, *pair.stack.options.standby_ports), strict=True))
    term = (await until(pair, leader, leads=True)).term
    expected = {f"127.0.0.1:{ports[leader]}": (True, True, term), f"127.0.0.1:{ports[standby]}": (True, False, term)}
    async with asyncio.timeout(PATIENCE):
        while True:
            managers = (await pair.status()).managers
            if {each.address: (each.reachable, each.leads, each.term) for each in managers} == expected:
                return
            await asyncio.sleep(0.05)
