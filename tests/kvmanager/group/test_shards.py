"""Four groups of managers on one index, as real processes: what happens to one of them concerns no other one."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from common.contracts import index_format
from tests.kvmanager.conftest import ChannelTo
from tests.kvmanager.group.test_processes import LONG, PATIENCE, SHORT, turns, until_it_says
from tests.support.kvmanager.fake_session import IDENTITY
from tests.support.kvmanager.manager_child import ManagerChild, manager_process
from tests.support.kvmanager.remote_fake_worker import DrivenWorker
from tests.support.waiting import until

GROUPS = ("a", "b", "c", "d")

Launch = Callable[..., Awaitable[ManagerChild]]


@pytest.fixture
async def launch(tmp_path: Path, redis_url: str) -> AsyncIterator[Launch]:
    """Return what starts one more manager of a group."""
    async with AsyncExitStack() as running:
        started: list[ManagerChild] = []

        async def start(group: str, lease: float = LONG) -> ManagerChild:
            flags = ("--redis-url", redis_url, "--group", group, "--group-lease", str(lease))
            state = tmp_path / f"state-{len(started)}"
            started.append(await running.enter_async_context(manager_process(state, *flags)))
            return started[-1]

        yield start


async def fences(client: Redis) -> dict[str, object]:
    space = IDENTITY.namespace
    return {group: await client.get(index_format.fence_key(space, group)) for group in GROUPS}


async def owners(client: Redis) -> dict[str, tuple[int, int]]:
    """Return slot and generation by worker."""
    found = {}
    for slot in range(8):
        fields = await client.hgetall(index_format.slot_key(IDENTITY.namespace, slot))
        owner = index_format.owner_from_fields(cast("dict[bytes, bytes]", fields))
        if owner is not None:
            found[owner.worker_id] = (slot, owner.generation)
    return found


async def until_owned(client: Redis, workers: set[str]) -> dict[str, tuple[int, int]]:
    return await until(lambda: owners(client), lambda found: set(found) == workers, seconds=PATIENCE)


async def test_a_hung_leader_of_one_group_is_fenced_while_the_others_go_on(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    workers = {group: DrivenWorker(f"w-{group}", seed=seed) for seed, group in enumerate(GROUPS)}
    managers = {group: await launch(group, SHORT if group == "b" else LONG) for group in GROUPS}
    for group, child in managers.items():
        await until_it_says(child, leads=True)
        await workers[group].attach(channel_to(child.address))
        await turns(workers[group])
    before_owners = await until_owned(redis_client, {f"w-{group}" for group in GROUPS})
    assert len({slot for slot, _ in before_owners.values()}) == len(GROUPS)
    before = await fences(redis_client)
    assert len(set(before.values())) == len(GROUPS)
    standby = await launch("b", SHORT)
    await until_it_says(standby, leads=False)

    managers["b"].process.send_signal(signal.SIGSTOP)
    leading = await until_it_says(standby, leads=True)
    await workers["b"].attach(channel_to(standby.address))
    for worker in workers.values():
        await turns(worker)
    after = await until(lambda: fences(redis_client), lambda found: found["b"] != before["b"], seconds=PATIENCE)
    managers["b"].process.send_signal(signal.SIGCONT)
    state = await until_it_says(managers["b"], leads=False)
    assert (state.leader, state.term, state.group) == (standby.address, leading.term, "b")
    for worker in workers.values():
        await turns(worker)
    assert await fences(redis_client) == after
    assert {group for group in GROUPS if after[group] != before[group]} == {"b"}
    now = await owners(redis_client)
    assert {worker for worker in now if now[worker] != before_owners[worker]} == {"w-b"}
    for worker in workers.values():
        await worker.finish()
        assert worker.fake.live == {}


async def test_a_worker_that_two_groups_have_is_published_by_the_one_with_its_session(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    """Its first manager is stopped when it attaches to the second one, and goes on as if nothing had happened."""
    first, second, worker = await launch("a"), await launch("b"), DrivenWorker("w")
    for child in (first, second):
        await until_it_says(child, leads=True)
    await worker.attach(channel_to(first.address))
    await turns(worker)
    before = await until_owned(redis_client, {"w"})
    old_epoch = worker.epoch
    first.process.send_signal(signal.SIGSTOP)
    await worker.attach(channel_to(second.address))
    assert worker.epoch > old_epoch
    await turns(worker)
    moved = await until(lambda: owners(redis_client), lambda found: found != before, seconds=PATIENCE)
    assert moved["w"][0] == before["w"][0]
    first.process.send_signal(signal.SIGCONT)
    assert (await until_it_says(first, leads=True)).group == "a"
    # A manager renews its slots every lease_ttl / 3; its own session ends when it sees that the stream is broken.
    other = DrivenWorker("other", seed=1)
    await other.attach(channel_to(first.address))
    await turns(other)
    await until_owned(redis_client, {"w", "other"})
    await turns(worker)
    now = await owners(redis_client)
    assert now["w"] == moved["w"]
    assert now["other"][0] != now["w"][0]
    for each in (worker, other):
        await each.finish()
