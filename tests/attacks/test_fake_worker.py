"""A stranger attaches to the KV manager as a worker, is published in Redis, and the router dials it with its prompts.

Attack 7, first half. The suite runs as `quire serve` starts it: services verify each other. The last test shows what
the same stranger reaches without TLS, so that the attack itself is known to work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import redis

from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder
from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts.index_format import DISCOVERY_WORKERS_KEY, DiscoveredWorker, discovered_to_value, discovery_key
from common.contracts.types import PoolIdentity
from common.rpc.roles import Role
from common.rpc.server import open_channel
from common.rpc.tls import Identity
from common.wire.identity_codec import identity_from_proto
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from tests.support.certificates import new_folder
from tests.support.kvmanager.fake_session import RawWorker, attach_of
from tests.support.lost_status import is_lost
from tests.support.router.fake_worker import FakeWorker, running
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[7 + index, 9, 11, 13] for index in range(10)]
OPTIONS = StackOptions(model=CHECKPOINT, worker_flags=("--simulate", "base=10ms", "--kv-blocks", "256"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One simulated worker, and TLS between the services."""
    folder = tmp_path_factory.mktemp("suite")
    async with running_suite(folder, replace(OPTIONS, certs=folder / "certs")) as running_one:
        yield running_one


async def identity_of(suite: Suite) -> PoolIdentity:
    """Return the identity that the public API shows to every caller."""
    return identity_from_proto((await suite.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)).identity)


@asynccontextmanager
async def stranger(suite: Suite, tls: Identity | None = None) -> AsyncIterator[FakeWorker]:
    """Run a worker outside the pool: it answers every prompt itself, faster than any other worker could."""
    worker = FakeWorker("evil", await identity_of(suite), num_blocks=4096, max_num_seqs=64, automatic=True, tls=tls)
    async with running(worker):
        yield worker


def session(suite: Suite, worker: FakeWorker, identity: Identity | None, **changes: Any) -> RawWorker:
    """Return a session with the manager that announces the worker, over a channel that stays open."""
    attach = attach_of("evil", incarnation=worker.incarnation, identity=worker.identity, address=worker.address)
    address = f"127.0.0.1:{suite.stack.options.manager_port}"
    channel = open_channel(address, identity=identity, role=Role.MANAGER)
    return RawWorker(channel, replace(attach, num_blocks=4096, **changes))


async def refusal(suite: Suite, worker: FakeWorker, identity: Identity | None, **changes: Any) -> str:
    """Offer an attach that must fail; return how it failed."""
    while True:
        try:
            answer = await session(suite, worker, identity, **changes).refused()
        except grpc.aio.AioRpcError as error:
            if is_lost(error):
                continue
            return error.code().name
        return str(answer.attach_rejected.reason) or f"no refusal: {answer}"


async def until(suite: Suite, address: str, state: str, reason: str = "") -> None:
    """Wait until the router's status says this of a worker."""
    operator = inference_pb2_grpc.InferenceServiceStub(suite.admin)
    async with asyncio.timeout(PATIENCE):
        while True:
            status = await operator.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)
            (found,) = [each for each in status.workers if each.address == address] or [pb.WorkerStatus()]
            if found.state == state and reason in found.reason and bool(found.decode_step_seconds) is (not reason):
                return
            await asyncio.sleep(0.05)


async def served_by(suite: Suite) -> list[str]:
    """Send ten prompts; return the worker of each."""
    outcomes = [await suite.generate(greedy(prompt, 4)) for prompt in PROMPTS]
    return [outcome.admitted.worker_id for outcome in outcomes if outcome.admitted is not None]


def announce(suite: Suite, worker: FakeWorker) -> None:
    """Write a worker into Redis, as its manager would: the stranger has the pool's key and a manager's password."""
    found = DiscoveredWorker(worker.worker_id, worker.address, worker.incarnation.hex(), worker.identity)
    with redis.Redis.from_url(suite.stack.redis_url) as client:
        client.sadd(DISCOVERY_WORKERS_KEY, worker.worker_id)
        key = suite.stack.options.pool_key.encode()
        client.set(discovery_key(worker.worker_id), discovered_to_value(found, key, time.time()))


@pytest.mark.parametrize("with_a_ca_of_its_own", [False, True])
async def test_a_stranger_gets_no_prompt(suite: Suite, tmp_path: Path, with_a_ca_of_its_own: bool) -> None:
    """Neither by the manager nor by Redis, whether or not the stranger calls itself a worker in a certificate."""
    own = new_folder(tmp_path).role(Role.WORKER).identity() if with_a_ca_of_its_own else None
    async with stranger(suite, own) as worker:
        assert await refusal(suite, worker, own) == "UNAVAILABLE"
        announce(suite, worker)
        await until(suite, worker.address, "connecting", "failed to connect")
        assert await served_by(suite) == ["worker-0"] * len(PROMPTS)
        assert (len(worker.hellos), len(worker.submits)) == (0, 0)


def leaf(suite: Suite, role: Role, worker_id: str = "") -> Identity:
    """Return a certificate that the suite's own CA signed."""
    assert suite.stack.options.certs is not None
    folder = CertificateFolder(suite.stack.options.certs)
    make(folder, wanted(folder, [] if worker_id else [role], [worker_id] if worker_id else []))
    return (folder.worker(worker_id) if worker_id else folder.role(role)).identity()


@pytest.mark.parametrize("role", [Role.MANAGER, Role.OPERATOR])
async def test_another_role_is_no_worker(suite: Suite, role: Role) -> None:
    """Neither for the manager nor for the router: a certificate of the right CA is not enough."""
    own = leaf(suite, role)
    async with stranger(suite, own) as worker:
        assert await refusal(suite, worker, own) == "PERMISSION_DENIED"
        announce(suite, worker)
        await until(suite, worker.address, "connecting", "failed to connect")
        assert await served_by(suite) == ["worker-0"] * len(PROMPTS)
        assert len(worker.hellos) == 0


async def test_a_workers_certificate_takes_no_other_id(suite: Suite) -> None:
    async with stranger(suite) as worker:
        own = await refusal(suite, worker, leaf(suite, Role.WORKER, "worker-7"), worker_id="worker-0", session=99)
        shared = await refusal(suite, worker, leaf(suite, Role.WORKER), worker_id="worker-0", session=99)
    assert own == "the certificate is that of worker worker-7; expected this id and not worker-0"
    assert shared == "worker worker-0 is attached; expected another id, or a certificate that names this one"
    assert await served_by(suite) == ["worker-0"] * len(PROMPTS)


async def test_without_tls_the_stranger_gets_prompts(tmp_path: Path) -> None:
    """What `--insecure` means; it is also the proof that the tests above would notice a success."""
    async with running_suite(tmp_path, OPTIONS) as plain, AsyncExitStack() as stack:
        worker = await stack.enter_async_context(stranger(plain))
        await session(plain, worker, None).attached()
        await worker.until(lambda: worker.streams > 0)
        worker.heartbeat(decode_step_seconds=1e-6, prefill_seconds_per_token=1e-9)
        await until(plain, worker.address, "connected")
        served = await served_by(plain)
        assert "evil" in served
        assert len(worker.submits) == served.count("evil")
