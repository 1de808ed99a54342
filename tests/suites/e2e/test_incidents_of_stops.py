"""One process of a suite stands still while a request is served: the first line of `quire why` names that process.

What must overlap is held: a request waits for the KV manager until the test has stopped whom it stops. The stop is a
multiple of what the work takes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from common.process.local_redis import LocalRedis
from quire.inference.v1 import inference_pb2 as pb
from tests.support.load import kill, manager_stopped
from tests.support.page_suite import answer_of
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import head_of, quire_why, until_blamed, until_placed

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Seconds that a suite bears of a process that stands still: then others take its requests over.
MOST_S = 8.0
# Seconds after which a process without work has surely missed a look.
IDLE_S = 2.0
Stop = Callable[[Suite, str, float], Awaitable[str]]
names = (f"stop-{number:04}" for number in itertools.count())
_random = random.Random(29)


@pytest.fixture(scope="module")
def index() -> Iterator[LocalRedis]:
    with LocalRedis() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory, index: LocalRedis) -> AsyncIterator[Suite]:
    options = StackOptions(
        model=CHECKPOINT,
        worker_flags=("--kv-blocks", "512", "--simulate", "base=4ms,prefill=400us"),
        router_flags=("--index-timeout", "2"),
        redis_url=index.url,
    )
    async with running_suite(tmp_path_factory.mktemp("stops"), options) as running:
        for _ in range(3):  # the worker learns what its steps usually take
            await running.generate(request())
        yield running


def request(tokens: int = 400, output: int = 20) -> pb.GenerateRequest:
    """Return a request whose prompt no other one has."""
    made = greedy(_random.choices(range(100, 400), k=tokens), output)
    made.request_id = next(names)
    return made


async def work_of(suite: Suite) -> float:
    """Return the seconds that a request takes now."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await suite.generate(request())
    return clock() - began


def first_line(head: str) -> str:
    return head.splitlines()[0]


def check(line: str, words: str) -> None:
    """Check that a first line begins with the share of time of what these words say."""
    assert re.match(rf"\d+ % of [^:]*{re.escape(words)}", line), line


async def held(task: asyncio.Task[Outcome], seconds: float) -> None:
    """Let a request wait, for as long as a suite bears it."""
    await asyncio.wait([task], timeout=min(MOST_S, seconds))


async def stopped_before_its_grant(suite: Suite, name: str, seconds: float) -> str:
    """Stop a process when its worker has a request, and let the manager grant the blocks then."""
    asked = request()
    async with manager_stopped(suite):
        task = asyncio.create_task(suite.generate(asked))
        await until_placed(suite, asked)
        await until_at_worker(suite)
        kill(suite, name, signal.SIGSTOP)
    try:
        await held(task, seconds)
    finally:
        kill(suite, name, signal.SIGCONT)
    await task
    return first_line(await head_of(suite, asked.request_id))


async def until_at_worker(suite: Suite) -> None:
    """Wait until the worker has told the router of a sequence."""
    await until(
        suite.status,
        lambda status: sum(each.waiting_sequences for each in status.workers) == 1,
        every=0.05,
        seconds=PATIENCE,
    )


async def stopped_in_its_stream(suite: Suite, name: str, seconds: float) -> str:
    """Stop a process when a client has the first token of many. One that had ended by then is asked for again."""
    while True:
        asked, first = request(output=100), asyncio.Event()
        task = asyncio.create_task(suite.generate(asked, first_token=first))
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        kill(suite, name, signal.SIGSTOP)
        running = not task.done()
        try:
            await held(task, seconds)
        finally:
            kill(suite, name, signal.SIGCONT)
        await task
        if running:
            return first_line(await head_of(suite, asked.request_id))


ROUTER = ": the router stood still: its process was stopped, had no processor, or was held up by one long task."
WORKER = ": worker-0 stood still: its process was stopped or had no processor, or its steps took many times their "


@pytest.mark.parametrize("stop", [stopped_before_its_grant, stopped_in_its_stream])
@pytest.mark.parametrize(("name", "words"), [("router", ROUTER), ("worker-0", WORKER)])
async def test_a_process_that_stands_still_is_named(suite: Suite, name: str, words: str, stop: Stop) -> None:
    """Where the router stands still, the worker has finished long before its tokens are read."""
    work = await work_of(suite)
    check(await until_blamed(words, lambda times: stop(suite, name, 4 * times * work)), words)


@pytest.mark.parametrize(
    ("name", "words"), [("worker-0", WORKER), ("router", " The router had stood still for up to ")]
)
async def test_a_process_that_stands_still_before_a_request_reaches_it_is_named(
    suite: Suite, name: str, words: str
) -> None:
    """A process without work looks once a second. A router cannot know when a request came that it had not read."""
    work = await work_of(suite)

    async def stands_still(times: int) -> str:
        asked = request()
        kill(suite, name, signal.SIGSTOP)
        try:
            await held(task := asyncio.create_task(suite.generate(asked)), times * max(IDLE_S, 4 * work))
        finally:
            kill(suite, name, signal.SIGCONT)
        await task
        return first_line(await head_of(suite, asked.request_id))

    line = await until_blamed(words, stands_still)
    assert words in line, line


async def test_a_manager_that_stands_still_is_named(suite: Suite) -> None:
    work = await work_of(suite)

    async def stands_still(times: int) -> str:
        asked = request()
        async with manager_stopped(suite):
            await held(task := asyncio.create_task(suite.generate(asked)), 4 * times * work)
        await task
        return first_line(await head_of(suite, asked.request_id))

    words = ": the KV manager answered worker-0 late: it stood still, or the messages between them were slow"
    check(await until_blamed(words, stands_still), words)
    work = MOST_S  # longer than a manager may be silent
    words = ": it lacked blocks at worker-0, whose KV manager did not answer for "
    check(await until_blamed(words, stands_still), words)


async def test_a_redis_that_stands_still_is_named(suite: Suite, index: LocalRedis) -> None:
    words = ": the prefix index in Redis did not answer within 2.0 s, and the router went on without it"

    async def stands_still(_: int) -> str:
        asked = request()
        os.kill(index.pid, signal.SIGSTOP)
        try:
            await suite.generate(asked)
        finally:
            os.kill(index.pid, signal.SIGCONT)
        return first_line(await head_of(suite, asked.request_id))

    check(await until_blamed(words, stands_still), words)


async def test_the_page_says_the_same_and_its_timeline_has_the_same_seconds(suite: Suite) -> None:
    work, asked = await work_of(suite), request()
    async with manager_stopped(suite):
        task = asyncio.create_task(suite.generate(asked))
        await until_placed(suite, asked)
        kill(suite, "router", signal.SIGSTOP)
    try:
        await held(task, 4 * work)
    finally:
        kill(suite, "router", signal.SIGCONT)
    await task
    status, out, _ = await quire_why(suite, asked.request_id, "--json")
    (found,) = json.loads(out)["requests"]
    url = f"http://{metrics_addresses(suite.stack.options)[0]}/page/data/request"
    page = (await answer_of(url, {"id": asked.request_id})).json()
    assert status == 0
    for each in ("cause", "share", "sentence"):
        assert page["diagnosis"]["verdict"][each] == found["verdict"][each]
    drawn = [(each["phase"], each["end"] - each["start"]) for each in page["timeline"]]
    assert drawn == [(each["phase"], pytest.approx(each["seconds"], abs=1e-5)) for each in found["phases"]]
    assert dict(drawn)["router_still"] > 0.0
