"""Constraints that take all the processor time that a constraint may have: who sends them delays only itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest
import pytest_asyncio

from common.contracts.limits import MAX_CONSTRAINTS_A_PEER
from router.tenants.directory import PeerDirectory
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.router.http_harness import Api, served_api
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = 66


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api(PeerDirectory()) as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    served.reset()
    return served


def costly(number: int) -> str:
    """Return a grammar of 724 bytes that takes longer than a constraint may take."""
    parts = " & ".join(rf"/(.|\n)*{number % 10}.{{{each}}}/" for each in range(number // 10, number // 10 + 28))
    return f"start: T\nT: {parts}".ljust(724)


@asynccontextmanager
async def client_at(api: Api, address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client that calls from an address of this host."""
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(base_url=api.url, transport=transport, timeout=PATIENCE_S) as client:
        yield client


async def ask(client: httpx.AsyncClient, field: str, constraint: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "a", field: constraint})


async def test_costly_grammars_of_one_sender_do_not_delay_another(api: Api) -> None:
    async with client_at(api, "127.0.0.2") as attacker, client_at(api, "127.0.0.1") as innocent:
        attack = [asyncio.create_task(ask(attacker, "guided_grammar", costly(each))) for each in range(HOSTILE)]
        refused = HOSTILE - MAX_CONSTRAINTS_A_PEER - 1
        await until(lambda: sum(each.done() for each in attack) >= refused)
        for number in range(8):
            assert (await ask(innocent, "guided_regex", f"[a-z]{{{number + 1}}}")).status_code == 200
        # The attacker's own are still being examined, one by one.
        assert sum(each.done() for each in attack) < HOSTILE
        assert {each.result().status_code for each in attack if each.done()} <= {400, 429}
        for each in attack:
            each.cancel()
        await asyncio.gather(*attack, return_exceptions=True)


async def test_when_the_sender_has_gone_nothing_of_it_is_examined(api: Api) -> None:
    async with client_at(api, "127.0.0.1") as attacker:
        attack = [asyncio.create_task(ask(attacker, "guided_grammar", costly(100 + each))) for each in range(HOSTILE)]
        await until(lambda: any(each.done() for each in attack))
        for each in attack:
            each.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
    async with client_at(api, "127.0.0.1") as client:
        assert (await ask(client, "guided_regex", "[0-9]+")).status_code == 200
    checker = api.constraints
    assert checker is not None
    await until(lambda: not len(checker))


async def test_an_examination_leaves_no_process(api: Api) -> None:
    checker = api.constraints
    assert checker is not None

    def examining() -> int:
        return 0 if checker.pid is None else len(psutil.Process(checker.pid).children())

    async with client_at(api, "127.0.0.1") as attacker:
        attack = asyncio.create_task(ask(attacker, "guided_grammar", costly(300)))
        await until(lambda: examining() == 1)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        await until(lambda: examining() == 0)
    assert not len(checker)
