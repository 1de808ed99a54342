"""Two workers on a host of their own, with the environment and the ports that docker/worker.compose.yaml gives them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.fault_injection.hosts.suite import until
from common.rpc import probe
from common.rpc.roles import Role
from tests.suites.deployment.hosts.pool import NUMBER, Pool, certificates, pool_of_hosts

STREAMS, TOKENS = 16, 300

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """All services, and two workers that the router uses."""
    async with pool_of_hosts(tmp_path_factory.mktemp("worker-hosts")) as running:
        for name, service in services(running).items():
            await running.start_worker(name, service)
        await until_usable(running)
        yield running


def services(pool: Pool) -> dict[str, dict[str, Any]]:
    return pool.composed(NUMBER, pool.certificates.role(Role.WORKER))


def ids(pool: Pool) -> set[str]:
    return {f"{pool.network.address('workers')}-{number}" for number in range(1, NUMBER + 1)}


async def until_usable(pool: Pool) -> None:
    async def usable() -> bool:
        assert pool.ended() == [], [pool.lines(name)[-2000:] for name in pool.ended()]
        return await pool.usable() == ids(pool)

    await until(usable, "the router to use both workers")


async def sampled(pool: Pool, number: int) -> float:
    """Return the tokens that a worker has sampled, from its published port for metrics."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://{pool.address('workers', 51052 + number)}/metrics")).text
    (found,) = re.findall(r"^quire:engine_tokens_sampled_total (\S+)$", text, re.MULTILINE)
    return float(found)


async def test_tokens_stream_from_each_worker_through_its_own_port(pool: Pool) -> None:
    before = [await sampled(pool, number) for number in (1, 2)]
    async with pool.streams(STREAMS, TOKENS):
        pass
    new = [await sampled(pool, number) - old for number, old in zip((1, 2), before, strict=True)]
    assert sum(new) >= STREAMS * TOKENS
    assert min(new) > 0, "the router spreads streams over both"


async def test_workers_announce_the_published_ports_of_their_host(pool: Pool) -> None:
    ready = [re.search(r"READY (\S+)", pool.lines(f"gpuworker-{number}")) for number in (1, 2)]
    assert [found and found[1] for found in ready] == [pool.address("workers", 50052 + number) for number in (1, 2)]


@pytest.mark.parametrize("number", [1, 2])
async def test_who_has_no_certificate_gets_no_answer_from_a_worker(pool: Pool, number: int) -> None:
    """The same port answers the router, so the refusal is that of TLS."""
    address = pool.address("workers", 50052 + number)
    assert (await asyncio.to_thread(probe.ask, address)).startswith("UNAVAILABLE")
    leaf = pool.certificates.role(Role.OPERATOR)
    assert await pool.health(address, leaf) == "SERVING"


@pytest.mark.parametrize("wrong", ["another CA", "another role"])
async def test_a_worker_with_another_certificate_is_not_attached(pool: Pool, wrong: str) -> None:
    number = NUMBER + 1 + ["another CA", "another role"].index(wrong)
    leaf = pool.certificates.role(Role.ROUTER)
    if wrong == "another CA":
        leaf = certificates(pool.folder / "others").role(Role.WORKER)
    name = f"gpuworker-{number}"
    await pool.start_worker(name, pool.composed(number, leaf)[name])
    said = {"another CA": "CERTIFICATE_VERIFY_FAILED", "another role": "PERMISSION_DENIED"}[wrong]

    async def refused() -> bool:
        return said in pool.lines(name)

    await until(refused, f"the worker to say {said}")
    assert await pool.usable() == ids(pool)
    await pool.kill(name)


async def test_streams_outlive_a_worker_which_comes_back_under_its_id(pool: Pool) -> None:
    async with pool.streams(STREAMS, TOKENS):
        await pool.kill("gpuworker-2")
    await pool.start_worker("gpuworker-2", services(pool)["gpuworker-2"])
    await until_usable(pool)
    before = await sampled(pool, 2)
    async with pool.streams(STREAMS, TOKENS):
        pass
    assert await sampled(pool, 2) > before
