"""Attacks by who reaches a worker's port, the KV manager's port or Redis: the streams of others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts import index_format
from common.contracts.index_format import DiscoveredWorker, discovered_to_value
from common.rpc.server import open_channel
from common.wire.identity_codec import identity_from_proto
from quire.gpuworker.v1 import gpuworker_pb2, gpuworker_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from tests.support.kvmanager.fake_session import RawWorker, attach_of
from tests.support.load import prompts
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

# Bounds what an innocent request may take under attack; without an attack it takes a second.
STREAM_S = 60.0
TOKENS = 96

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One worker, which the router finds through Redis. Its steps take time and run no model."""
    flags = ("--kv-blocks", "512", "--simulate", "base=5ms,decode=4us,prefill=2us")
    options = StackOptions(model=CHECKPOINT, workers=1, named_workers=0, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


async def worker_info(suite: Suite) -> gpuworker_pb2.WorkerInfo:
    """Return what a worker answers to every caller of its port."""
    async with open_channel(f"127.0.0.1:{suite.stack.options.worker_ports[0]}") as channel:
        stub = gpuworker_pb2_grpc.GpuWorkerServiceStub(channel)
        return (await stub.GetWorker(gpuworker_pb2.GetWorkerRequest(), timeout=PATIENCE)).info


async def test_a_page_whose_name_leads_here_gets_nothing(suite: Suite) -> None:
    """DNS rebinding: a browser on the machine asks for a page of a stranger's name, which leads to 127.0.0.1."""
    options = suite.stack.options
    public = [f"http://127.0.0.1:{options.port}{path}" for path in ("/v1/models", "/health", "/openapi.json")]
    admin = f"http://127.0.0.1:{(await suite.status()).admin_http_port}"
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
        for url in (*public, *(f"{admin}{path}" for path in ("/metrics", "/server_info", "/load", "/page/"))):
            answer = await client.get(url, headers={"host": "rebound.example:8000"})
            assert (answer.status_code, "could be anybody's" in answer.text) == (403, True), url
            for name in ("localhost:8000", "127.0.0.1", "[::1]:8000", "gpu-box", "host.docker.internal"):
                answer = await client.get(url, headers={"host": name})
                assert answer.status_code == 200, (url, name, answer.text)


async def test_who_reads_a_workers_facts_cannot_take_its_session(suite: Suite) -> None:
    """The unmended manager gave the session away: all requests of the worker hung."""
    asked = prompts(8)
    started = [asyncio.Event() for _ in asked]
    streams = [
        asyncio.create_task(suite.generate(greedy(prompt, TOKENS), timeout=STREAM_S, first_token=event))
        for prompt, event in zip(asked, started, strict=True)
    ]
    async with asyncio.timeout(STREAM_S):
        await asyncio.gather(*(event.wait() for event in started))
    info = await worker_info(suite)
    identity = identity_from_proto(info.identity)
    stolen = attach_of(info.worker_id, incarnation=info.incarnation, session=1_000_000, identity=identity)
    async with open_channel(f"127.0.0.1:{suite.stack.options.manager_port}") as channel:
        thief = RawWorker(channel, replace(stolen, num_blocks=info.num_blocks))
        answer = await thief.refused()
        after = await suite.generate(greedy(asked[0], TOKENS), timeout=STREAM_S)
    assert answer.WhichOneof("message") == "attach_rejected", answer
    outcomes = await asyncio.gather(*streams)
    assert [len(outcome.tokens) for outcome in (*outcomes, after)] == [TOKENS] * 9


async def test_an_address_that_somebody_wrote_into_redis_is_not_called(suite: Suite) -> None:
    """The attacker may write all of Redis, and has no key. The unmended router called the address."""
    identity = identity_from_proto((await suite.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)).identity)
    called = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Redis.from_url(suite.stack.redis_url) as redis:
        await redis.sadd(index_format.DISCOVERY_WORKERS_KEY, "evil")
        evil = DiscoveredWorker("evil", address, "00" * 16, identity)
        value = discovered_to_value(evil, b"a key that the attacker made up", asyncio.get_running_loop().time())
        await redis.set(index_format.discovery_key("evil"), value)
        await until_passed_over(suite, "evil", called)
        await redis.delete(index_format.discovery_key("evil"))
    assert not called.is_set()
    outcome = await suite.generate(greedy(prompts(1)[0], 16), timeout=STREAM_S)
    assert len(outcome.tokens) == 16


async def until_passed_over(suite: Suite, name: str, called: asyncio.Event) -> None:
    """Wait until the router says that it passes an entry over, or calls its address."""
    async with asyncio.timeout(STREAM_S):
        while not called.is_set():
            status = await suite.status()  # the admin plane: a public port names no workers of Redis
            if name in status.discovery_problem:
                assert status.redis_connected
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("user", ["manager", "router", "nobody"])
async def test_users_of_redis_may_do_what_their_service_does_and_no_more(suite: Suite, user: str) -> None:
    """The unmended Redis had one user for all, who could do everything, CONFIG SET included."""
    urls = suite.stack.redis
    address = urls.router.rpartition("@")[2]
    url = {"manager": urls.manager, "router": urls.router, "nobody": f"redis://{address}"}[user]
    forbidden = [
        ("CONFIG", "SET", "dir", "/tmp"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("DEBUG", "SLEEP", "0"),
        ("ACL", "LIST"),
        ("SET", "another:key", "1"),
    ]
    if user != "manager":
        evil = index_format.discovery_key("evil")
        # A script may do what its user may: the router keeps responses by scripts.
        forbidden += [("SET", evil, "x"), ("EVAL", "return redis.call('SET', KEYS[1], 'x')", "1", evil)]
    if user == "nobody":
        forbidden += [("GETRANGE", index_format.discovery_key("worker-0"), "0", "9"), ("EVAL", "return 1", "0")]
    async with Redis.from_url(url) as redis:
        assert await redis.ping()
        for command in forbidden:
            with pytest.raises((NoPermissionError, RedisError)):
                await redis.execute_command(*command)  # type: ignore[no-untyped-call]
    status = await suite.inference.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)
    assert status.redis_connected


async def test_no_password_stands_among_the_flags_of_a_process(suite: Suite) -> None:
    secrets = [suite.stack.options.pool_key]
    urls = suite.stack.redis
    secrets += [url.partition("@")[0].rpartition(":")[2] for url in (urls.manager, urls.router, urls.operator)]
    for child in suite.stack.children.values():
        with open(f"/proc/{child.pid}/cmdline", "rb") as file:  # noqa: ASYNC230
            said = file.read().decode()
        assert not [secret for secret in secrets if secret in said]
    assert not [line for line in suite.lines for secret in secrets if secret in line]
