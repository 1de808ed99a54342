"""Background responses: they go on without their client, can be read from any place on, cancelled, and are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest, Overloaded, QuotaViolation
from common.contracts.limits import BACKGROUND_SECONDS, MAX_BACKGROUND_A_TENANT
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from router.api.openai.responses import routes
from router.api.openai.responses.background import BackgroundResponses, EventLog, Job
from router.api.openai.responses.records import Record
from router.api.openai.responses.store import RedisStore, StoreLimits
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, Api, served_api
from tests.support.router.responses import events_of
from tests.support.turns import until_blocked

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH, TENANT = "/v1/responses", "Bearer none"
RUNNING = ("queued", "in_progress")


@pytest.fixture
async def held(api: Api) -> AsyncIterator[asyncio.Event]:
    """An event that the answers wait for after their first word."""
    release = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), release, tokens("lo"), finished(2)]
    yield release
    release.set()


async def ended(api: Api, name: str) -> Any:
    """Return a response once it has ended."""
    job = api.background.find(TENANT, name)
    assert job is not None
    assert job.task is not None
    await asyncio.wait_for(job.task, DEADLINE_S)
    return await api.client.responses.retrieve(name)


async def test_a_response_is_made_while_nobody_waits(api: Api, held: asyncio.Event) -> None:
    made = await api.client.responses.create(model="demo", input="Hi", background=True)
    assert made.status in RUNNING
    assert made.background
    await api.frontend.reached.wait()
    running = await api.client.responses.retrieve(made.id)
    assert (running.status, running.output_text) == ("in_progress", "Hel")
    with pytest.raises(openai.BadRequestError, match="still in progress"):
        await api.client.responses.create(model="demo", input="Hi", previous_response_id=made.id)
    held.set()
    done = await ended(api, made.id)
    assert (done.status, done.output_text) == ("completed", "Hello")
    assert api.frontend.requests[0].deadline == 3.0 + BACKGROUND_SECONDS


async def test_a_stream_goes_on_where_its_client_left_it(api: Api, held: asyncio.Event) -> None:
    stream = await api.client.responses.create(model="demo", input="Hi", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    name = seen[0].response.id  # type: ignore[union-attr]
    later = await api.client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    held.set()
    rest = [event async for event in later]
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    assert [event.type for event in seen][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "Hello"
    again = await api.http.get(f"{PATH}/{name}", params={"stream": "true"})
    assert len(events_of(again.text)) == len(numbers)
    assert len(api.frontend.requests) == 1


async def test_a_cancelled_response_ends_at_the_worker(api: Api, held: asyncio.Event) -> None:
    made = await api.client.responses.create(model="demo", input="Hi", background=True, stream=False)
    await api.frontend.reached.wait()
    cancelled = await api.client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert api.frontend.closed.is_set()
    assert (await api.client.responses.cancel(made.id)).status == "cancelled"
    assert (await api.client.responses.retrieve(made.id)).status == "cancelled"


async def test_a_response_in_progress_is_deleted(api: Api, held: asyncio.Event) -> None:
    made = await api.client.responses.create(model="demo", input="Hi", background=True)
    await api.frontend.reached.wait()
    await api.client.responses.delete(made.id)
    assert api.frontend.closed.is_set()
    with pytest.raises(openai.NotFoundError):
        await api.client.responses.retrieve(made.id)


async def test_another_tenant_cannot_read_or_cancel_it(api: Api, held: asyncio.Event) -> None:
    made = await api.client.responses.create(model="demo", input="Hi", background=True, stream=False)
    other = api.client.with_options(api_key="other")
    for refused in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await refused(made.id)
    held.set()
    assert (await ended(api, made.id)).status == "completed"


async def test_a_refusal_is_the_end_of_the_response(api: Api) -> None:
    api.frontend.script = lambda request: [Overloaded(QuotaViolation("router", "full"), 2.0)]
    made = await api.client.responses.create(model="demo", input="Hi", background=True)
    failed = await ended(api, made.id)
    assert (failed.status, failed.error.code) == ("failed", "rate_limit_exceeded")


async def test_a_wrong_body_is_refused_at_once(api: Api) -> None:
    answer = await api.http.post(PATH, json={"input": "Hi", "background": True, "max_output_tokens": 0})
    assert answer.status_code == 400


async def test_a_tenant_has_so_many_at_most(api: Api, held: asyncio.Event) -> None:
    client, other = api.client.with_options(api_key="many"), api.client.with_options(api_key="few")
    made = [
        await client.responses.create(model="demo", input="Hi", background=True) for _ in range(MAX_BACKGROUND_A_TENANT)
    ]
    with pytest.raises(openai.RateLimitError, match="at most 16"):
        await client.responses.create(model="demo", input="Hi", background=True)
    assert (await other.responses.create(model="demo", input="Hi", background=True)).status in RUNNING
    await client.responses.cancel(made[0].id)
    assert (await client.responses.create(model="demo", input="Hi", background=True)).status in RUNNING
    for each in made:
        await client.responses.cancel(each.id)


async def test_the_end_of_the_router_is_the_end_of_its_responses(api: Api, held: asyncio.Event) -> None:
    made = await api.client.responses.create(model="demo", input="Hi", background=True)
    await api.frontend.reached.wait()
    await api.background.aclose()
    failed = await api.client.responses.retrieve(made.id)
    assert (failed.status, failed.output_text) == ("failed", "Hel")
    assert failed.error is not None
    assert "the router stopped" in failed.error.message


async def test_a_response_whose_router_was_killed_has_failed_after_its_deadline() -> None:
    record = Record({"status": "in_progress", "created_at": 1000, "output": []}, [])
    assert record.seen_at(1000 + BACKGROUND_SECONDS)["status"] == "in_progress"
    lost = record.seen_at(1000 + 2 * BACKGROUND_SECONDS)
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")


# ------------------------------------------------------------ the log of events


def line(number: int) -> str:
    return f"data: {number:08}\n\n"


async def test_a_log_drops_its_oldest_events() -> None:
    log = EventLog(most_bytes=10 * (len(line(0)) + 57))
    for number in range(100):
        log.write(line(number))
    log.end()
    with pytest.raises(InvalidRequest, match="are gone"):
        log.check(10)
    log.check(95)
    assert "".join([lines async for lines in log.after(95)]) == "".join(map(line, range(96, 100)))
    assert "".join([lines async for lines in log.after(-1)]).endswith(line(99))
    assert "".join([lines async for lines in log.after(10**9)]) == ""


async def test_every_reader_of_a_log_gets_every_event() -> None:
    log = EventLog()

    async def read(after: int) -> str:
        return "".join([lines async for lines in log.after(after)])

    readers = [asyncio.create_task(read(after)) for after in (-1, 0, 4)]
    for number in range(6):
        log.write(line(number))
        await until_blocked(*readers)
    log.end()
    first, second, last = await asyncio.gather(*readers)
    assert (first, second, last) == tuple("".join(map(line, range(start, 6))) for start in (0, 1, 5))


async def test_jobs_that_ended_are_kept_in_bounds() -> None:
    background = BackgroundResponses(most=3, most_of_tenant=3)
    for number in range(20):
        background.check_room("acme")
        job = Job("acme", f"job {number}", dict, streamed=True)

        async def work(job: Job = job) -> None:
            job.end()

        await background.start(job, work())
        assert job.task is not None
        await job.task
    assert background.find("acme", "job 19") is not None
    assert background.find("acme", "job 0") is None


# ------------------------------------------------------------ several routers


async def test_a_response_is_read_and_cancelled_at_another_router(
    redis_server: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "LOOK_S", 0.01)
    redis = open_redis(redis_server.url, DEADLINE_S)
    store = RedisStore(redis, StoreLimits(), ManualClock(1.0))
    async with served_api(store=store) as one, served_api(store=store) as other:
        one.frontend.script = lambda request: [admitted(request), tokens("Hel"), asyncio.Event()]
        made = await one.client.responses.create(model="demo", input="Hi", background=True)
        await one.frontend.reached.wait()
        assert (await other.client.responses.retrieve(made.id)).status in RUNNING
        with pytest.raises(openai.BadRequestError, match="at their own router"):
            await other.client.responses.retrieve(made.id, stream=True)
        assert (await other.client.responses.cancel(made.id)).status == "cancelled"
        await asyncio.wait_for(one.frontend.closed.wait(), DEADLINE_S)
        job = one.background.find("test", made.id)
        assert job is not None
        assert job.task is not None
        await asyncio.wait_for(job.task, DEADLINE_S)
        read = await other.client.responses.retrieve(made.id)
        assert (read.status, read.output_text) == ("cancelled", "Hel")
    await redis.aclose()
