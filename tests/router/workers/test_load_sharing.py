"""Routers that tell each other of their load through a real Redis: what comes, what is passed over, what stays."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common.contracts.clock import ManualClock
from common.contracts.types import KvGeometry, PoolIdentity
from common.process.redis_client import QuireRedis, open_redis
from common.process.supervised import cancel_and_wait
from router.contracts.identity import UNKNOWN_GEOMETRY
from router.placement.shared_load import (
    FORGET_S,
    MAX_NOTICE_BYTES,
    Notice,
    SharedLoad,
    Told,
    WorkerShare,
    pack_notice,
    worker_key,
)
from router.workers.load_sharing import ALONE_S, EXCHANGE_S, QUIET_S, LoadSharing, load_key
from tests.support.router.known_router import KnownRouter
from tests.support.waiting import until

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"), arithmetic="a", pooling="none")
STREAM = load_key(IDENTITY.namespace)
KEY = b"k" * 32
PATIENT_S = 30.0


class Side:
    """A router: what it tells of one worker, and what it hears."""

    def __init__(self, name: bytes, client: Redis, clock: ManualClock, key: bytes | None = KEY) -> None:
        self.shared, self.outcomes = SharedLoad(name * 8), Counter[str]()
        self.share: WorkerShare = self.shared.join("w0", b"i")
        self.pool = KnownRouter(IDENTITY)
        self.sharing = LoadSharing(client, self.pool, self.shared, clock, key, self._count)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    @property
    def heard(self) -> tuple[int, int]:
        return self.share.sequences, self.share.prefill_tokens


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[QuireRedis]:
    found = open_redis(redis_url, PATIENT_S)
    yield found
    await found.aclose()


@pytest.fixture
def sides(client: QuireRedis, clock: ManualClock) -> tuple[Side, Side]:
    return Side(b"a", client, clock), Side(b"b", client, clock)


async def test_what_one_router_places_the_other_knows_after_one_call_each(sides: tuple[Side, Side]) -> None:
    first, second = sides
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert (first.heard, second.heard) == ((0, 0), (3, 120))
    first.share.set_own(1, 0)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert second.heard == (1, 0)
    await first.sharing.exchange()
    assert (first.shared.others, second.shared.others) == (1, 1)
    assert first.outcomes == {"sent": 2, "taken": 1}


async def test_a_router_that_comes_later_hears_what_was_told_before(client: QuireRedis, clock: ManualClock) -> None:
    first = Side(b"a", client, clock)
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    later = Side(b"b", client, clock)
    await later.sharing.exchange()
    assert later.heard == (3, 120)


async def test_a_router_that_is_gone_counts_no_more_although_redis_still_has_its_notices(
    sides: tuple[Side, Side], clock: ManualClock
) -> None:
    first, second = sides
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    await second.sharing.exchange()
    clock.advance(FORGET_S)
    await second.sharing.exchange()
    assert (second.heard, second.shared.others) == ((0, 0), 0)


async def test_a_stream_that_begins_anew_is_read_from_its_beginning(
    sides: tuple[Side, Side], redis_client: Redis, clock: ManualClock
) -> None:
    first, second = sides
    # The clock of the Redis before was ahead of this one's.
    second.sharing._namespace, second.sharing._last = IDENTITY.namespace, b"99999999999999-5"
    first.share.set_own(2, 7)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert second.heard == (2, 7)


async def test_ids_that_are_ahead_of_the_clock_do_no_harm(sides: tuple[Side, Side], redis_client: Redis) -> None:
    first, second = sides
    await redis_client.xadd(STREAM, {"n": b"x"}, id="99999999999999-5")
    for number in (1, 2):
        first.share.set_own(number, 0)
        await first.sharing.exchange()
        await second.sharing.exchange()
        assert second.heard == (number, 0)
    assert second.outcomes["refused"] == 1


async def test_other_pools_hear_nothing(client: QuireRedis, clock: ManualClock) -> None:
    first, other = Side(b"a", client, clock), Side(b"b", client, clock)
    other.pool.identity = replace(IDENTITY, model_fingerprint="n" * 32)
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    await other.sharing.exchange()
    assert other.heard == (0, 0)


async def test_nothing_is_told_until_the_pool_is_known(
    client: QuireRedis, clock: ManualClock, redis_client: Redis
) -> None:
    side = Side(b"a", client, clock)
    side.pool.identity = replace(IDENTITY, kv_geometry=UNKNOWN_GEOMETRY)
    side.share.set_own(3, 120)
    await side.sharing.exchange()
    assert await redis_client.keys("quire-load:*") == []


async def test_bytes_of_strangers_are_counted_logged_once_and_passed_over(
    sides: tuple[Side, Side], redis_client: Redis, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sides
    forged = Notice(b"f" * 8, 1, True, {worker_key("w0", b"i"): Told(9, 9)})
    for value in (b"", b"x", pack_notice(forged), pack_notice(forged, b"other key"), b"\0" * (MAX_NOTICE_BYTES + 1)):
        await redis_client.xadd(STREAM, {"n": value})
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    caplog.clear()
    await second.sharing.exchange()
    assert second.heard == (3, 120)
    assert second.outcomes["refused"] == 5
    lines = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "passed over: 1 since" in lines[0]
    clock.advance(60.0)
    await redis_client.xadd(STREAM, {"n": b"x"})
    await second.sharing.exchange()
    assert "passed over: 5 since" in caplog.messages[-1]


async def test_an_answer_is_bounded(sides: tuple[Side, Side], redis_client: Redis) -> None:
    _, second = sides
    async with redis_client.pipeline(transaction=False) as pipe:
        for _ in range(40):
            pipe.xadd(STREAM, {"n": b"\0" * MAX_NOTICE_BYTES})
        await pipe.execute()
    await second.sharing.exchange()
    most = (1 << 20) // MAX_NOTICE_BYTES + 1
    assert second.outcomes["refused"] == most < 40
    await second.sharing.exchange()
    assert second.outcomes["refused"] == 2 * most  # it goes on behind those that it has read


async def test_other_work_goes_on_while_many_notices_are_heard(
    sides: tuple[Side, Side], redis_client: Redis, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = sides
    entries = {worker_key(f"w{number}", b"i"): Told(1, 1) for number in range(128)}
    for number in range(200):
        await redis_client.xadd(STREAM, {"n": pack_notice(Notice(b"f" * 8, number, True, entries), KEY)})
    turns, hear = [0], second.shared.hear
    loop, handles = asyncio.get_running_loop(), list[asyncio.Handle]()

    def other_work() -> None:
        turns.append(0)
        handles.append(loop.call_soon(other_work))

    def heard(notice: Notice, now: float) -> bool:
        turns[-1] += 1
        clock.advance(0.001)
        return hear(notice, now)

    monkeypatch.setattr(second.shared, "hear", heard)
    other_work()
    await second.sharing.exchange()
    handles[-1].cancel()
    assert second.outcomes["taken"] == 200
    assert sum(turns) == 201  # its own one too
    assert max(turns) <= 1 + (1 << 16) // len(pack_notice(Notice(b"f" * 8, 1, True, entries), KEY)) + 1
    assert second.sharing._heard_s == pytest.approx(0.201)


async def test_redis_keeps_few_notices_for_a_minute(sides: tuple[Side, Side], redis_client: Redis) -> None:
    first, _ = sides
    async with redis_client.pipeline(transaction=False) as pipe:
        for _ in range(2500):
            pipe.xadd(STREAM, {"n": b"x"})
        await pipe.execute()
    await first.sharing.exchange()
    assert 1000 <= await redis_client.xlen(STREAM) <= 1200
    assert 0 < await redis_client.pttl(STREAM) <= 60_000


async def test_a_stream_that_is_none_is_a_failure_that_stops_nothing(
    sides: tuple[Side, Side], redis_client: Redis, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, _ = sides
    await redis_client.set(STREAM, b"no stream")
    for _ in range(5):
        await first.sharing.exchange()
    assert first.outcomes == {"failed": 3}  # then it pauses
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1
    await redis_client.delete(STREAM)
    clock.advance(20.0)
    await first.sharing.exchange()
    assert first.outcomes["sent"] == 1
    assert caplog.messages[-1] == "routers tell each other of their load again"


class DeadRedis:
    async def eval(self, *args: object) -> list[bytes]:
        raise RedisConnectionError("refused")


async def test_without_redis_what_was_heard_expires(sides: tuple[Side, Side], clock: ManualClock) -> None:
    first, second = sides
    first.share.set_own(3, 120)
    await first.sharing.exchange()
    await second.sharing.exchange()
    second.sharing._redis = DeadRedis()  # type: ignore[assignment]
    await second.sharing.exchange()
    assert second.heard == (3, 120)
    clock.advance(FORGET_S)
    await second.sharing.exchange()
    assert second.heard == (0, 0)


async def test_calls_are_rare_without_news_and_without_others(sides: tuple[Side, Side], clock: ManualClock) -> None:
    first, second = sides
    assert first.sharing.pause() == ALONE_S
    first.share.set_own(1, 0)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert second.sharing.pause() == EXCHANGE_S
    clock.advance(1.5)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert second.sharing.pause() == EXCHANGE_S  # the first one has work
    clock.advance(1.5)
    first.share.set_own(0, 0)
    await first.sharing.exchange()
    clock.advance(1.5)
    await first.sharing.exchange()
    await second.sharing.exchange()
    assert second.sharing.pause() == QUIET_S


async def test_a_quiet_router_tells_at_once_what_it_places(sides: tuple[Side, Side]) -> None:
    first, second = sides
    tasks = [asyncio.create_task(each.sharing.run()) for each in (first, second)]
    try:
        # The clock stands still, so that no tick is due: only what is placed makes them call.
        await until(lambda: first.outcomes["sent"] and second.outcomes["sent"], every=0, seconds=PATIENT_S)
        first.share.set_own(3, 120)
        second.share.set_own(1, 5)
        await until(lambda: second.heard == (3, 120) and first.heard == (1, 5), every=0, seconds=PATIENT_S)
    finally:
        await cancel_and_wait(*tasks)
