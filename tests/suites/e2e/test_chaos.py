"""One suite, disturbed again and again while it streams: kills, wipes, duplicates and stops change no token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from cli.demo_model.prompts import questions, system_text
from cli.suite.stack import free_ports
from common.contracts import index_format
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.server import open_channel
from kvmanager.main import REPLACED_STATUS
from quire.inference.v1 import inference_pb2 as pb
from tests.suites.e2e.conftest import WORKERS
from tests.support.index_view import Index, identity_of
from tests.support.kvmanager.fake_session import RawWorker, attach_of
from tests.support.load import all_started, epoch, kill, prompts, started
from tests.support.reference import assert_greedy, chat_tokens
from tests.support.suite import PATIENCE, Outcome, Suite, greedy
from tests.support.waiting import until

STREAMS, COUNT = 16, 96

pytestmark = pytest.mark.asyncio(loop_scope="session")


def assert_reference(asked: Sequence[list[int]], outcomes: Sequence[Outcome], count: int = COUNT) -> None:
    """Compare every stream with the greedy tokens of transformers."""
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], count)


async def until_connected(suite: Suite) -> None:
    """Wait until the router may use every worker."""

    async def all_connected() -> bool:
        try:
            status = await suite.inference.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False  # sent to a router that was just killed, before its end was seen
        return [worker.state for worker in status.workers] == ["connected"] * WORKERS

    await until(all_connected, every=0.05, seconds=PATIENCE)


async def test_a_killed_manager_amid_a_hundred_cancels_loses_nothing(suite: Suite) -> None:
    asked, rng = prompts(STREAMS), random.Random(11)
    before, ended = await epoch(suite), 0

    async def cancelled_somewhere(index: int) -> None:
        nonlocal ended
        call = suite.inference.Generate(greedy(asked[index % STREAMS], 200), timeout=PATIENCE)
        wanted = rng.randrange(0, 30)
        async for _ in call:
            wanted -= 1
            if wanted < 0:
                break
        call.cancel()
        ended += 1
        if ended == 30:
            kill(suite, "kvmanager")

    tasks = await all_started(suite, asked, COUNT)
    await asyncio.gather(*(cancelled_somewhere(index) for index in range(100)))
    outcomes = await asyncio.gather(*tasks)
    assert await epoch(suite) > before
    await suite.until_all_free(WORKERS)
    assert_reference(asked, outcomes)


async def test_a_wiped_redis_fails_no_request_and_is_filled_again(suite: Suite) -> None:
    long = chat_tokens(questions(1)[0].text, system_text())  # so that a hit outweighs every other cost
    asked = [long, *prompts(STREAMS, seed=21)]
    identity = await identity_of(suite)
    fence = index_format.fence_key(identity.namespace)
    async with Redis.from_url(suite.stack.redis_url) as redis:
        index = Index(suite, redis, identity)

        async def is_published() -> bool:
            return await index.number(fence) > 0

        await until(is_published, every=0.05, seconds=PATIENCE)
        before = await index.number(fence)
        tasks = await all_started(suite, asked, COUNT)
        await redis.flushall()
        outcomes = await asyncio.gather(*tasks)
        assert_reference(asked, outcomes)
        await suite.until_all_free(WORKERS)
        whole = [prompt + outcome.tokens for prompt, outcome in zip(asked, outcomes, strict=True)]

        async def index_equals_map() -> bool:
            return [await index.hits(each) for each in whole] == [await index.manager_hits(each) for each in whole]

        await until(index_equals_map, every=0.05, seconds=PATIENCE)
        assert set(await index.owners()) == {"worker-0", "worker-1"}
        for tokens, outcome in zip(whole, outcomes, strict=True):
            assert outcome.admitted is not None
            # The last sampled token is never computed, and a block is registered only when it is fully computed.
            assert (await index.hits(tokens))[outcome.admitted.worker_id] == (len(tokens) - 1) // 16
        assert await index.number(fence) == await index.number(index_format.epoch_key(identity.namespace)) > before
        for worker_id in await index.owners():
            assert await redis.exists(index_format.discovery_key(worker_id))
        again = await suite.generate(greedy(whole[0], 1))
        assert again.admitted is not None
        assert outcomes[0].admitted is not None
        assert again.admitted.worker_id == outcomes[0].admitted.worker_id
        assert again.admitted.cached_tokens == (len(whole[0]) - 1) // 16 * 16


async def test_a_second_manager_takes_over_and_is_replaced_in_turn(suite: Suite, tmp_path: Path) -> None:
    """Epoch n, then n + 1 elsewhere, which ends the first; it is started again, as n + 2, which ends the second."""
    asked = prompts(STREAMS, seed=31)
    first = await epoch(suite)
    tasks = await all_started(suite, asked, 2 * COUNT)
    (port,) = free_ports(1)
    flags = ["--port", str(port), "--metrics-port", "0", "--redis-url", suite.stack.redis_url]
    command = module_command("kvmanager", *flags, "--state-dir", str(tmp_path))
    pipe = asyncio.subprocess.PIPE
    second = await asyncio.create_subprocess_exec(*die_with_parent.command(command), stdout=pipe, stderr=pipe)
    try:
        assert second.stdout is not None
        assert (await second.stdout.readline()).startswith(b"READY")
        async with open_channel(f"127.0.0.1:{port}") as channel:
            intruder = attach_of("intruder", identity=await identity_of(suite), address="127.0.0.1:9")
            await RawWorker(channel, intruder).attached()
            async with asyncio.timeout(PATIENCE):
                _, said = await second.communicate()
    finally:
        if second.returncode is None:
            second.kill()
            await second.wait()
    outcomes = await asyncio.gather(*tasks)
    third = await epoch(suite)
    words = "quire-kvmanager: a manager of epoch {} has taken over from this one, of epoch {}; this one ends"
    assert "kvmanager: " + words.format(first + 1, first) in suite.lines
    assert any(line.startswith(f"kvmanager: ended with status {REPLACED_STATUS};") for line in suite.lines)
    assert second.returncode == REPLACED_STATUS
    assert words.format(third, first + 1) in said.decode()
    assert third == first + 2
    await suite.until_all_free(WORKERS)
    assert_reference(asked, outcomes, 2 * COUNT)


async def test_a_killed_router_leaves_nothing_running_and_its_successor_serves(suite: Suite) -> None:
    asked = prompts(STREAMS, seed=41)
    await until_connected(suite)
    tasks = await all_started(suite, asked, 2000)

    async def all_run() -> bool:
        return sum(pool.running for pool in await suite.pools()) == STREAMS

    await until(all_run, every=0.05, seconds=PATIENCE)
    kill(suite, "router")
    broken = await asyncio.gather(*tasks, return_exceptions=True)
    assert {error.code() for error in broken if isinstance(error, grpc.aio.AioRpcError)} == {
        grpc.StatusCode.UNAVAILABLE
    }
    await until_connected(suite)
    await suite.until_all_free(WORKERS)
    outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, 24)) for prompt in asked))
    assert_reference(asked, outcomes, 24)


async def test_streams_leave_a_worker_that_is_stopped_and_it_is_used_again_when_it_goes_on(suite: Suite) -> None:
    asked = prompts(STREAMS, seed=51)
    await until_connected(suite)
    seen = [Outcome() for _ in asked]
    tasks = await started(suite, [greedy(prompt, 4 * COUNT) for prompt in asked], seen)
    # The router may have preferred either of them: on a busy machine one looks slower. The manager hears of both late.
    workers = Counter(each.admitted.worker_id for each in seen if each.admitted and not each.finished)
    ((stopped, _),) = workers.most_common(1)
    pid = suite.stack.children[stopped].pid
    assert pid is not None

    async def is_out_of_use() -> bool:
        return [each.state for each in (await suite.status()).workers if each.worker_id == stopped] != ["connected"]

    kill(suite, stopped, signal.SIGSTOP)
    try:
        outcomes = await asyncio.gather(*tasks)
        assert stopped in {outcome.admitted.worker_id for outcome in outcomes if outcome.admitted}
        await until(is_out_of_use, every=0.05, seconds=PATIENCE)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_reference(asked, outcomes, 4 * COUNT)
    await until_connected(suite)
    await suite.until_all_free(WORKERS)
    assert suite.stack.children[stopped].pid == pid
