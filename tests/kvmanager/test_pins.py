"""Operators pin prefixes over the wire: who keeps them, what survives a restart of the manager, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from grpc import aio
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.errors import InvalidRequest, NotFound, Unavailable
from common.contracts.lease import CachedBlock, Inventory, Report
from common.contracts.types import BlockId
from kvmanager.contracts.ports import IndexUnavailable
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.kvmanager.conftest import ChannelTo, Connect, Running, Start
from tests.kvmanager.test_operator_calls import HASHES, scraped, values, worker_with_one_sequence
from tests.support.kvmanager.fake_session import IDENTITY
from tests.support.waiting import until

TWO = b"".join(HASHES[:2])
KEY = index_format.pins_key(IDENTITY.namespace)
# Two sealed blocks that no sequence uses.
CACHED = Inventory(cached_blocks=(CachedBlock(BlockId(3), HASHES[0], -1, 1), CachedBlock(BlockId(5), HASHES[1], 0, 1)))


class Operator:
    def __init__(self, channel: aio.Channel) -> None:
        self.stub = rpc.KvManagerServiceStub(channel)

    async def pin(
        self, name: str = "p", hashes: bytes = TWO, tenant: str = "", duration: float | None = None
    ) -> pb.PinPrefixResponse:
        """Pin a prefix. Raises the error of the tree."""
        request = pb.PinPrefixRequest(
            name=name, tenant=tenant, block_hashes=hashes, num_tokens=len(hashes), duration=duration
        )
        try:
            return await self.stub.PinPrefix(request)
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def names(self) -> list[str]:
        return [each.name for each in (await self.stub.ListPins(pb.ListPinsRequest())).pins]

    async def unpin(self, name: str) -> None:
        try:
            await self.stub.UnpinPrefix(pb.UnpinPrefixRequest(name=name))
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from None


def operator_of(manager: Running, channel_to: ChannelTo) -> Operator:
    return Operator(channel_to(manager.address))


def kept(manager: Running, worker_id: str = "w0") -> int:
    return manager.attachments.manager.ledger(worker_id).pool_counts().kept_pinned


async def test_a_pin_holds_what_a_worker_has_and_is_listed(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    await connect(manager).attached(CACHED)
    operator = operator_of(manager, channel_to)
    answer = await operator.pin()
    assert (answer.pin.num_blocks, answer.durable) == (2, False), "there is no Redis"
    assert list(answer.pin.workers) == [pb.PinAtWorker(worker_id="w0", blocks_there=2)]
    assert kept(manager) == 2
    (listed,) = (await operator.stub.ListPins(pb.ListPinsRequest())).pins
    assert listed == answer.pin
    text = await scraped(manager)
    assert values(text, "quire:kv_kept_pinned_blocks") == {'{worker="w0"}': 2.0}
    assert values(text, "quire:pinned_prefixes") == {'{group=""}': 1.0}
    pool = (await operator.stub.GetPool(pb.GetPoolRequest())).pools[0]
    assert (pool.cached, pool.kept_pinned) == (2, 2)
    await operator.unpin("p")
    assert (await operator.names(), kept(manager)) == ([], 0)


async def test_each_change_is_a_record_of_each_worker(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    worker = await worker_with_one_sequence(manager, connect)
    operator = operator_of(manager, channel_to)
    await operator.pin(tenant="acme", name="handbook")
    await operator.unpin("handbook")
    await worker.report(Report(step=2))
    stub = decision_pb2_grpc.DecisionServiceStub(channel_to(manager.address))

    async def records() -> list[str]:
        found = (await stub.ListDecisions(decision_pb2.ListDecisionsRequest(kind="pin"))).decisions
        return [each.chosen for each in found]

    found = await until(records, lambda found: len(found) >= 2)
    assert found == ["pinned handbook of tenant acme: 2 blocks", "unpinned handbook"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "two words"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"hashes": b""}, "block_hashes"),
        ({"hashes": TWO[:17]}, "block_hashes"),
        ({"duration": 0.0}, "duration"),
        ({"duration": float("nan")}, "duration"),
        ({"duration": float("inf")}, "duration"),
    ],
    ids=str,
)
async def test_a_wrong_pin_names_the_field(
    manager: Running, connect: Connect, channel_to: ChannelTo, wrong: dict[str, str | bytes | float], field: str
) -> None:
    await connect(manager).attached()
    with pytest.raises(InvalidRequest) as caught:
        await operator_of(manager, channel_to).pin(**wrong)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == field


async def test_a_pin_over_its_tenants_share_is_refused_with_the_numbers(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    await connect(manager).attached()
    operator = operator_of(manager, channel_to)
    with pytest.raises(InvalidRequest, match=r"needed: 3; pinned for tenant acme: 0 of at most 2, 0\.25 of 8"):
        await operator.pin(hashes=b"".join(HASHES[:3]), tenant="acme")
    assert await operator.names() == []


async def test_without_a_worker_the_model_is_unknown(manager: Running, channel_to: ChannelTo) -> None:
    with pytest.raises(Unavailable, match="no worker has attached"):
        await operator_of(manager, channel_to).pin()


async def test_without_a_namespace_nothing_counts_as_written(manager: Running) -> None:
    with pytest.raises(Unavailable, match="stopped leading, or no worker has attached"):
        await manager.process.index.write_pins(b"pins")


async def test_what_is_not_pinned_cannot_be_unpinned(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await connect(manager).attached()
    with pytest.raises(NotFound, match="no pin nothing"):
        await operator_of(manager, channel_to).unpin("nothing")


async def test_a_pin_ends_at_its_time(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await connect(manager).attached(CACHED)
    operator = operator_of(manager, channel_to)
    answer = await operator.pin(duration=0.2)
    assert answer.pin.HasField("expires")
    await until(lambda: not len(manager.attachments.manager.pins))
    assert (await operator.names(), kept(manager)) == ([], 0)


# ---------------------------------------------------------------- Redis


async def test_pins_survive_the_manager_and_hold_what_its_workers_bring(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    first = await start_manager(redis_url=redis_url)
    await connect(first).attached()
    assert (await operator_of(first, channel_to).pin()).durable
    await operator_of(first, channel_to).pin("q", b"".join(HASHES[2:]), "other", 3600.0)
    await first.process.abort()
    second = await start_manager(redis_url=redis_url)
    await connect(second).attached(CACHED)
    await until(lambda: len(second.attachments.manager.pins) == 2)
    await until(lambda: kept(second) == 2)
    assert await operator_of(second, channel_to).names() == ["p", "q"]
    await operator_of(second, channel_to).unpin("p")
    await operator_of(second, channel_to).unpin("q")
    assert await redis_client.exists(KEY) == 0


async def test_pins_are_read_before_the_first_change(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str
) -> None:
    first = await start_manager(redis_url=redis_url)
    await connect(first).attached()
    await operator_of(first, channel_to).pin("old")
    await first.process.abort()
    second = await start_manager(redis_url=redis_url)
    await connect(second).attached()
    await operator_of(second, channel_to).pin("new")
    assert await operator_of(second, channel_to).names() == ["old", "new"]


async def test_a_wiped_redis_gets_the_pins_again(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    manager = await start_manager(redis_url=redis_url)
    await connect(manager).attached()
    await operator_of(manager, channel_to).pin()
    written = await redis_client.get(KEY)
    await redis_client.delete(KEY)
    async with asyncio.timeout(60.0):
        while await redis_client.get(KEY) != written:
            manager.process.pins.wake()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("wrong", ["malformed", "long", "type"])
async def test_what_no_manager_can_have_written_is_named_until_it_is_deleted(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str, redis_client: Redis, wrong: str
) -> None:
    if wrong == "type":
        await redis_client.hset(KEY, "a", "b")
    else:
        await redis_client.set(KEY, b"\xff" * (100 if wrong == "malformed" else 2 << 20))
    manager = await start_manager(redis_url=redis_url)
    await connect(manager).attached()
    operator = operator_of(manager, channel_to)
    with pytest.raises(Unavailable) as caught:
        await operator.pin()
    expected = {"malformed": "malformed", "long": "has 2097152 bytes", "type": "holds another type of value"}[wrong]
    assert f"{KEY} {'is ' if wrong == 'malformed' else ''}{expected}" in str(caught.value)
    assert "cannot be reached" not in str(caught.value)
    assert await redis_client.exists(KEY) == 1
    await redis_client.delete(KEY)
    await operator.pin()
    assert await operator.names() == ["p"]


async def test_a_group_begins_with_the_pins_of_no_group_and_goes_on_with_its_own(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    alone = await start_manager(redis_url=redis_url)
    await connect(alone).attached()
    await operator_of(alone, channel_to).pin("before")
    for names in (["before"], []):
        of_group = await start_manager(redis_url=redis_url, group="a", group_lease=60.0)
        await until(of_group.process.leading.leads)
        await connect(of_group, "w-a").attached()
        assert await operator_of(of_group, channel_to).names() == names
        assert await redis_client.exists(f"{KEY}:a") == 1
        if names:
            await operator_of(of_group, channel_to).unpin("before")
        await of_group.process.abort()
        await redis_client.delete(index_format.group_keys("a")[0])  # as if its lease had ended
    assert await operator_of(alone, channel_to).names() == ["before"], "it is another group's"


async def test_without_redis_for_the_moment_nothing_is_pinned(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    manager = await start_manager(redis_url=redis_url)
    await connect(manager).attached()
    operator = operator_of(manager, channel_to)
    await operator.pin("before")

    async def unreachable(value: bytes) -> None:
        raise IndexUnavailable("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(manager.process.index, "write_pins", unreachable)
        with pytest.raises(Unavailable, match="did not take the change: connection refused"):
            await operator.pin("meanwhile")
    assert await operator.names() == ["before"]


async def test_a_worker_that_missed_a_reset_is_reset_by_the_next_manager(
    start_manager: Start, connect: Connect, channel_to: ChannelTo, redis_url: str
) -> None:
    first = await start_manager(redis_url=redis_url)
    here = connect(first)
    await here.attached()
    asked = asyncio.ensure_future(
        rpc.KvManagerServiceStub(channel_to(first.address)).ResetPrefixCache(pb.ResetPrefixCacheRequest())
    )
    order = await here.batch()
    await here.report(Report(reset=order.reset))
    await asked
    await first.process.abort()
    second = await start_manager(redis_url=redis_url)
    # The first to attach comes before Redis was asked: the namespace is known by it.
    there, away = connect(second, reset=order.reset), connect(second, "w1")
    await there.attached(CACHED)
    await until(lambda: second.attachments.manager.last_reset == order.reset)
    assert (await away.attached(CACHED)).reset == order.reset
    assert second.attachments.manager.ledger("w1").pool_counts().cached == 0
    assert second.attachments.manager.ledger("w0").pool_counts().cached == 2


async def test_a_worker_that_attaches_before_redis_has_answered_is_reset_too(
    start_manager: Start, connect: Connect, redis_url: str, redis_client: Redis
) -> None:
    await redis_client.set(KEY, pb.StoredPins(last_reset=77).SerializeToString())
    manager = await start_manager(redis_url=redis_url)
    worker = connect(manager)
    batch = await worker.attached(CACHED)
    while batch.reset != 77:
        batch = await worker.batch()
    assert manager.attachments.manager.ledger("w0").pool_counts().cached == 0
