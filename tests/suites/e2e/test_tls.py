"""A whole suite with TLS between its services, as `quire serve` starts it: streams, traces, recovery, operators."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.certificates.folder import CertificateFolder
from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from common.rpc.roles import Role
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2
from quire.gpuworker.v1 import gpuworker_pb2, gpuworker_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from tests.support.certificates import renew
from tests.support.load import prompts, until_used
from tests.support.page_suite import answer_of
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Suite, chat, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two simulated workers, 1024 blocks each; each worker has a certificate of its own."""
    folder = tmp_path_factory.mktemp("suite")
    flags = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags, certs=folder / "certs")
    async with running_suite(folder, options) as running:
        yield running


def certificates(suite: Suite) -> CertificateFolder:
    assert suite.stack.options.certs is not None
    return CertificateFolder(suite.stack.options.certs)


async def test_streams_give_the_tokens_of_their_workers(suite: Suite) -> None:
    asked = prompts(16)
    outcomes = await asyncio.gather(*(suite.generate(seeded(prompt, 16)) for prompt in asked))
    assert [outcome.tokens for outcome in outcomes] == [expected(each, 16) for each in asked]
    for name in ("worker-0", "worker-1"):
        await until_used(suite, name)
    await suite.until_all_free(WORKERS)


async def test_spans_of_every_service_reach_the_router(suite: Suite) -> None:
    outcome = await suite.generate(chat("Hello!"))
    assert outcome.admitted is not None
    query = decision_pb2.GetTraceRequest(trace_id=outcome.admitted.trace_id)
    services: set[str] = set()
    async with asyncio.timeout(PATIENCE):
        while services != {"quire-router", "quire-gpuworker", "quire-kvmanager"}:
            services = {span.service for span in (await suite.decisions.GetTrace(query, timeout=PATIENCE)).spans}
            await asyncio.sleep(0.1)


async def test_every_internal_port_wants_a_certificate_of_the_right_role(suite: Suite) -> None:
    folder, children = certificates(suite), suite.stack.children
    worker = children["worker-0"].program.address
    for name in ("kvmanager", "worker-0", "router"):
        async with open_channel(children[name].program.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for role, allowed in ((Role.MANAGER, False), (Role.OPERATOR, True)):
        identity = folder.role(role).identity()
        async with open_channel(worker, identity=identity, role=Role.WORKER) as channel:
            call = gpuworker_pb2_grpc.GpuWorkerServiceStub(channel).GetWorker(gpuworker_pb2.GetWorkerRequest())
            assert (await call.code() is grpc.StatusCode.OK) is allowed
            assert allowed or await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_page_asks_the_manager_with_the_routers_certificate(suite: Suite) -> None:
    url = f"http://{metrics_addresses(suite.stack.options)[0]}/page/data/"
    worker: dict[str, object] = {"worker": "worker-0"}
    questions: dict[str, dict[str, object]] = {
        "overview": {},
        "block": {**worker, "block": 1},
        "decisions": {"service": "kvmanager"},
        "blocks": worker,
    }
    # It is the same machine. Others have no certificate to show, and get nothing: tests/router/api/page/test_site.py.
    answers = {name: await answer_of(url + name, parameters) for name, parameters in questions.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(questions, 200)
    blocks = answers["blocks"].json()
    assert blocks["num_blocks"] == 1024


async def test_operators_reset_the_cache_through_the_router_and_workers_may_not(suite: Suite) -> None:
    await suite.generate(greedy(prompts(1)[0], 1))
    await suite.until_all_free(WORKERS)
    cached = sum(pool.cached for pool in await suite.pools())
    asked = kvmanager_pb2.ResetPrefixCacheRequest()
    for address, role in ((suite.stack.admin_address, Role.ROUTER), (manager_address(suite), Role.MANAGER)):
        identity = certificates(suite).worker("worker-0").identity()
        async with open_channel(address, identity=identity, role=role) as channel:
            call = kvmanager_pb2_grpc.KvManagerServiceStub(channel).ResetPrefixCache(asked, timeout=PATIENCE)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    stub = kvmanager_pb2_grpc.KvManagerServiceStub(suite.admin)
    answer = await stub.ResetPrefixCache(asked, timeout=PATIENCE)
    assert (answer.dropped_blocks, answer.index_current) == (cached, True)
    # The HTTP port asks for no certificate, and takes the call from this machine alone.
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        url = f"http://{metrics_addresses(suite.stack.options)[0]}/reset_prefix_cache"
        assert (await client.post(url)).json()["dropped_blocks"] == 0
        assert (await client.post(url, headers={"Origin": "http://evil.example"})).status_code == 403


def manager_address(suite: Suite) -> str:
    return suite.stack.children["kvmanager"].program.address


async def test_a_manager_that_dies_comes_back_with_a_renewed_certificate(suite: Suite) -> None:
    """The workers attach to the next manager, whose certificate they have not seen; no stream breaks."""
    first_token = asyncio.Event()
    running = asyncio.create_task(suite.generate(greedy(prompts(1)[0], 300), first_token=first_token))
    await first_token.wait()
    renew(certificates(suite), Role.MANAGER)
    pid = suite.stack.children["kvmanager"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert len((await running).tokens) == 300
    async with asyncio.timeout(PATIENCE):
        pools = 0
        while suite.stack.children["kvmanager"].restarts == 0 or pools < WORKERS:
            with suppress(grpc.aio.AioRpcError):
                pools = len(await suite.pools())
            await asyncio.sleep(0.05)
    await suite.until_all_free(WORKERS)
