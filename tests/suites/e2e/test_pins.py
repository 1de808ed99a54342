"""An operator pins a prompt of a tenant on a running suite: it outlives a crowd and the manager."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2 as kv
from tests.support.load import kill
from tests.support.suite import PATIENCE, greedy
from tests.support.tenants import TenantSuite, random_prompts, tenant_suite
from tests.support.up_harness import quire
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS, BLOCKS = 2, 64
SMALL = ("--kv-blocks", str(BLOCKS), "--simulate", "base=1ms,prefill=10us")
HANDBOOK = "You answer questions about the handbook of a small company. " * 12
SEEDS = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    stack = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=SMALL)
    async with tenant_suite(tmp_path_factory.mktemp("pins"), {"red": "", "blue": ""}, stack) as running:
        yield running


async def command(tenants: TenantSuite, *words: str) -> subprocess.CompletedProcess[str]:
    stack = tenants.suite.stack
    where = ("--admin-address", stack.admin_address, "--state-dir", str(stack.options.state_dir))
    return await asyncio.to_thread(quire, *words, *where)


async def pinned(tenants: TenantSuite, *words: str) -> dict[str, Any]:
    """Pin with these flags, and return the answer."""
    done = await command(tenants, "pin", "--json", *words)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def question(text: str, request_id: str = "") -> pb.GenerateRequest:
    """Return a chat that begins with the handbook."""
    messages = [pb.ChatMessage(role="system", content=HANDBOOK), pb.ChatMessage(role="user", content=text)]
    request = greedy([], 1)
    request.prompt.chat.CopyFrom(pb.Chat(messages=messages, add_generation_prompt=True))
    request.request_id = request_id
    return request


async def crowd(tenants: TenantSuite) -> None:
    """Serve prompts that nobody sends again until each pool has been filled twice."""
    for prompt in random_prompts(4 * WORKERS, 16 * (BLOCKS // 2), seed=next(SEEDS)):
        await tenants.ask("blue", greedy(prompt, 1))
    await tenants.suite.until_all_free(WORKERS)


async def hits(tenants: TenantSuite, request_id: str = "", tenant: str = "red") -> int:
    """Return the cached tokens of a question."""
    admitted = (await tenants.ask(tenant, question(f"What is rule {next(SEEDS)}?", request_id))).admitted
    assert admitted is not None
    return admitted.cached_tokens


async def until_attached(tenants: TenantSuite, kept: int) -> None:
    """Wait until a new manager has all workers and so many pinned blocks on each."""
    await until(
        lambda: pools_or_none(tenants),
        lambda pools: [pool.kept_pinned for pool in pools] == [kept] * WORKERS,
        every=0.05,
        seconds=PATIENCE,
    )


async def pools_or_none(tenants: TenantSuite) -> Sequence[kv.Pool]:
    try:
        return await tenants.suite.pools()
    except aio.AioRpcError:
        return ()


async def test_a_pinned_system_prompt_outlives_a_crowd_and_the_manager(tenants: TenantSuite, tmp_path: Path) -> None:
    file = tmp_path / "handbook.txt"
    file.write_text(HANDBOOK)
    answer = await pinned(tenants, "--system", f"@{file}", "--tenant", "red", "--name", "handbook", "--compute", "9")
    blocks = answer["num_blocks"]
    assert (answer["name"], answer["durable"]) == ("handbook", True)
    assert sorted(answer["computed_on"]) == ["worker-0", "worker-1"]
    assert answer["not_computed"] == "there are 2 workers"
    assert 4 <= blocks <= BLOCKS // 4, "the text fits the share of a tenant"
    await tenants.suite.until_all_free(WORKERS)
    await crowd(tenants)
    assert [pool.kept_pinned for pool in await tenants.suite.pools()] == [blocks] * WORKERS
    assert await hits(tenants) >= 16 * blocks
    assert await hits(tenants, tenant="blue") == 0, "another tenant's blocks are its own"
    await tenants.suite.until_all_free(WORKERS)
    kill(tenants.suite, "kvmanager")
    await until_attached(tenants, blocks)
    await crowd(tenants)
    assert await hits(tenants) >= 16 * blocks
    listed = await command(tenants, "pins")
    assert f"handbook: {blocks} blocks of" in listed.stdout
    assert f"  worker-1: {blocks} there" in listed.stdout
    done = await command(tenants, "unpin", "handbook")
    assert (done.returncode, done.stdout) == (0, "unpinned handbook\n"), done.stderr
    async with asyncio.timeout(5 * PATIENCE):  # a crowd is many requests
        while await hits(tenants):
            await crowd(tenants)
    assert "nothing is pinned" in (await command(tenants, "pins")).stdout


async def test_an_evicted_pinned_prefix_names_why(tenants: TenantSuite) -> None:
    """A request that needs nearly the whole pool is never refused for a pin."""
    await tenants.suite.until_all_free(WORKERS)
    answer = await pinned(tenants, "--system", HANDBOOK, "--tenant", "red", "--compute", "2")
    blocks = answer["num_blocks"]
    assert len(answer["computed_on"]) == WORKERS
    await tenants.suite.until_all_free(WORKERS)
    before = {pool.worker_id: pool.pinned_evictions for pool in await tenants.suite.pools()}
    async with asyncio.timeout(PATIENCE):
        while min(pool.pinned_evictions - before[pool.worker_id] for pool in await tenants.suite.pools()) < blocks:
            # One for each worker at once: an eviction is remembered until the pool has been filled four times more.
            prompts = random_prompts(WORKERS, 16 * BLOCKS - 8, seed=next(SEEDS))
            await asyncio.gather(*(tenants.ask("blue", greedy(each, 1)) for each in prompts))
    await tenants.suite.until_all_free(WORKERS)
    await hits(tenants, "evicted-pin")
    why = await command(tenants, "why", "evicted-pin")
    assert "an operator pinned it, and no block without a pin was left" in why.stdout, why.stdout
    records = await command(tenants, "decisions", "--kind", "pin")
    assert "pinned pin-" in records.stdout, records.stdout + records.stderr
    assert (await command(tenants, "unpin", answer["name"])).returncode == 0


@pytest.mark.parametrize(
    ("words", "ends", "said"),
    [
        (("--text", "Hi"), 2, "expected a block of 16 at least: a shorter prompt is never cached"),
        (("--text", "word " * 400), 2, "of at most 16, 0.25 of 64 blocks"),
        (("--text", HANDBOOK, "--name", "two words"), 2, "--name: is not 1 to 64 printable ASCII characters"),
        (("--text", HANDBOOK, "--for", "-1"), 2, "--for: is -1; expected seconds above 0"),
        (("--text", HANDBOOK, "--shared-domain", "none"), 1, "shared domain 'none' is not open"),
        (("--text", HANDBOOK, "--chat", "-"), 2, "2 of them are given; expected one"),
        (("--text", HANDBOOK, "--tenant", "green"), 2, "--tenant: is 'green'; name the tenant"),
    ],
    ids=["short", "long", "name", "duration", "domain", "twice", "tenant"],
)
async def test_a_wrong_pin_is_refused_in_words(
    tenants: TenantSuite, words: tuple[str, ...], ends: int, said: str
) -> None:
    owner = () if "--tenant" in words else ("--tenant", "red")
    done = await command(tenants, "pin", *words, *owner)
    assert (done.returncode, "Traceback" in done.stderr) == (ends, False)
    assert said in done.stderr


async def test_the_public_port_pins_nothing(tenants: TenantSuite) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await tenants.suite.inference.Pin(pb.PinRequest(), metadata=tenants.metadata("red"))
    assert "Pin is for operators" in str(refused.value.details())
