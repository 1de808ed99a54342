"""OpenAI's files and batches on a real suite with keys: a router that is killed, one that stops, load, a lost key."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from router.tenants.keys import new_key
from tests.support.load import kill, until_restarted
from tests.support.suite import PATIENCE
from tests.support.tenants import TenantSuite, tenant_suite, write_tenants
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = ("--kv-blocks", "1024", "--simulate", "base=10ms,prefill=10us", "--max-num-seqs", "4")
TENANTS = {"red": "", "blue": "", "narrow": "streams = 1"}
OVER = ("completed", "failed", "expired", "cancelled")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    folder = tmp_path_factory.mktemp("batches")
    stack = StackOptions(model=CHECKPOINT, worker_flags=SLOW, router_flags=("--batch-dir", str(folder / "uploads")))
    async with tenant_suite(folder, TENANTS, stack) as running:
        yield running


class Client:
    """The official client with the key of a tenant. It tries again while no router is there."""

    def __init__(self, url: str, key: str) -> None:
        self.openai = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=10)

    async def begin(self, lines: Sequence[dict[str, Any]]) -> Batch:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self.openai.files.create(file=("in.jsonl", content), purpose="batch")
        return await self.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

    async def counted(self, batch: Batch) -> int:
        counts = (await self.openai.batches.retrieve(batch.id)).request_counts
        assert counts is not None
        return counts.completed

    async def ended(self, batch: Batch) -> Batch:
        ask = self.openai.batches.retrieve
        return await until(lambda: ask(batch.id), lambda found: found.status in OVER, every=0.1, seconds=PATIENCE)

    async def complete(self, line: dict[str, Any]) -> None:
        """Ask a line as a request of its own."""
        body = dict(line["body"])
        named = {name: body.pop(name) for name in ("prompt", "max_tokens", "temperature")}
        await self.openai.completions.create(model="checkpoint", **named, extra_body=body)

    async def answered(self, batch: Batch) -> set[str]:
        """Return the ids of the answers of a batch that has ended; each has one line, with a text."""
        assert batch.output_file_id is not None
        lines = (await self.openai.files.content(batch.output_file_id)).text.splitlines()
        found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, lines)}
        assert len(found) == len(lines)
        assert all(body["choices"][0]["text"] for body in found.values())
        return set(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tenants: TenantSuite) -> AsyncIterator[dict[str, Client]]:
    """A client of each tenant."""
    url = f"{tenants.suite.stack.http_url}/v1"
    made = {name: Client(url, key) for name, key in tenants.keys.items()}
    yield made
    for client in made.values():
        await client.openai.close()


def completion(custom_id: str, max_tokens: int = 8, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"Anna {custom_id}", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_a_router_that_ends_goes_on_with_its_batch_and_loses_no_line(
    tenants: TenantSuite, clients: dict[str, Client], number: signal.Signals
) -> None:
    client, names = clients["red"], [f"n{each}" for each in range(120)]
    batch = await client.begin([completion(name) for name in names])
    await until(lambda: client.counted(batch), lambda found: found > 10, every=0.05, seconds=PATIENCE)
    pid = tenants.suite.stack.children["router"].pid
    kill(tenants.suite, "router", number)
    await until_restarted(tenants.suite, "router", pid)
    ended = await client.ended(batch)
    assert (ended.status, ended.error_file_id) == ("completed", None)
    assert await client.answered(ended) == set(names)
    await tenants.suite.until_all_free(1)


async def test_routers_of_one_folder_run_a_batch_once_and_one_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    folder = ("--batch-dir", str(tmp_path / "uploads"))
    ports = tuple(free_ports(2))
    stack = StackOptions(model=CHECKPOINT, worker_flags=SLOW, router_flags=folder, own_ports=ports)
    async with tenant_suite(tmp_path, TENANTS, stack) as tenants:
        client, names = Client(f"{tenants.suite.stack.http_url}/v1", tenants.keys["red"]), [f"n{n}" for n in range(80)]
        batch = await client.begin([completion(name) for name in names])
        await until(lambda: client.counted(batch), lambda found: found > 10, every=0.05, seconds=PATIENCE)
        (runs,) = {line.partition(":")[0] for line in tenants.suite.lines if "a batch is run" in line}
        kill(tenants.suite, runs)
        ended = await client.ended(batch)
        assert (ended.status, await client.answered(ended)) == ("completed", set(names))
        await client.openai.close()
    began = [line for line in tenants.suite.lines if "a batch is run" in line]
    assert len(began) == 2


async def test_a_client_who_waits_passes_a_batch(tenants: TenantSuite, clients: dict[str, Client]) -> None:
    """The worker has four slots, and all requests of the batch want one."""
    client, other = clients["red"], clients["blue"]
    batch = await client.begin([completion(f"n{each}", 200) for each in range(60)])
    await until(lambda: client.counted(batch), lambda found: found >= 4, every=0.05, seconds=PATIENCE)
    for asking in (client, other):
        await asking.complete(completion("x", 4))
    now = await client.openai.batches.retrieve(batch.id)
    assert now.request_counts is not None
    assert (now.status, now.request_counts.completed < 30) == ("in_progress", True), "60 requests wait for places"
    await client.openai.batches.cancel(batch.id)
    ended = await client.ended(batch)
    assert ended.status == "cancelled"
    assert ended.request_counts is not None
    assert ended.request_counts.completed + ended.request_counts.failed == 60
    await tenants.suite.until_all_free(1)


async def test_a_tenant_with_one_stream_is_answered_in_the_end(clients: dict[str, Client]) -> None:
    client = clients["narrow"]
    batch = await client.begin([completion(f"n{each}") for each in range(4)])
    ended = await client.ended(batch)
    assert (ended.status, len(await client.answered(ended))) == ("completed", 4)


async def test_tenants_do_not_see_each_others_batches(clients: dict[str, Client]) -> None:
    batch = await clients["red"].begin([completion("a")])
    with pytest.raises(openai.NotFoundError):
        await clients["blue"].openai.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        await clients["blue"].openai.files.content(batch.input_file_id)
    assert (await clients["red"].ended(batch)).status == "completed"


async def test_a_key_that_is_taken_away_ends_its_batches(tenants: TenantSuite, clients: dict[str, Client]) -> None:
    """The tenant has another key then, by which it sees what became of them."""
    client, second = clients["blue"], new_key()
    batch = await client.begin([completion(f"n{each}", 400) for each in range(40)])
    await until(lambda: client.openai.batches.retrieve(batch.id), lambda found: found.status == "in_progress")
    write_tenants(tenants.file, dict(tenants.keys) | {"blue": second}, TENANTS)
    renewed = client.openai.with_options(api_key=second)

    async def status() -> str:
        try:
            return (await renewed.batches.retrieve(batch.id)).status
        except openai.AuthenticationError:
            return ""  # the router has not read the file yet

    found = await until(status, lambda found: found in OVER, every=0.1, seconds=PATIENCE)
    write_tenants(tenants.file, tenants.keys, TENANTS)
    assert found == "failed"
    await tenants.suite.until_all_free(1)


async def test_large_files_come_and_go(clients: dict[str, Client], tmp_path: Path) -> None:
    """Of 20 MB: more than any body that is read as a whole."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for each in range(2_000):
            file.write(json.dumps(completion(f"n{each}", prompt="word " * 2_000)) + "\n")
    client = clients["red"].openai
    with path.open("rb") as file:
        stored = await client.files.create(file=file, purpose="batch")
    assert (stored.bytes, stored.filename) == (path.stat().st_size, "large.jsonl")
    content = await client.files.content(stored.id)
    assert await asyncio.to_thread(path.read_bytes) == content.content
    assert (await client.files.delete(stored.id)).deleted
