"""What operators ask of a running suite of two routers: resets, aborts, loads, events, the tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc import aio
from tokenizers import Tokenizer

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from common.contracts import errors
from common.contracts.types import BlockHash
from common.rpc.roles import Role
from common.rpc.server import open_channel
from common.wire.packing import unpack_hashes
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2 as kv
from quire.kvmanager.v1 import kvmanager_pb2_grpc
from tests.support.load import kill
from tests.support.suite import PATIENCE, greedy, operator_channel
from tests.support.tenants import TenantSuite, random_prompts, tenant_suite
from tests.support.up_harness import quire
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTERS, WORKERS = 2, 2
# Tokens of a stream that a test ends: a minute of them.
LONG = 3000
SLOW = ("--kv-blocks", "1024", "--simulate", "base=20ms,prefill=10us")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    stack = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=SLOW, own_ports=(0,) * ROUTERS)
    options = {"red": "", "blue": "", "boss": "admin = true"}
    async with tenant_suite(tmp_path_factory.mktemp("operation"), options, stack) as running:
        yield running


async def begun(tenants: TenantSuite, tenant: str, prompt: list[int], **fields: Any) -> Any:
    """Return a long stream after its first token."""
    request = greedy(prompt, LONG)
    request.MergeFrom(pb.GenerateRequest(**fields))
    call: Any = tenants.suite.inference.Generate(request, timeout=PATIENCE, metadata=tenants.metadata(tenant))
    while (await call.read()).WhichOneof("event") != "tokens":
        pass
    return call


async def refusal(call: Any) -> errors.QuireError:
    """Return the error with which a call ends."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    return error_from_rpc(refused.value)


async def rest(call: Any) -> int:
    """Read a stream to its end; return how many tokens came."""
    count = 0
    while (event := await call.read()) is not aio.EOF:
        count += len(event.tokens.token_ids)
    return count


def operators(tenants: TenantSuite) -> rpc.InferenceServiceStub:
    return rpc.InferenceServiceStub(tenants.suite.admin)


def manager(tenants: TenantSuite) -> kvmanager_pb2_grpc.KvManagerServiceStub:
    """Return the KV manager's calls as the router's admin plane passes them on."""
    return kvmanager_pb2_grpc.KvManagerServiceStub(tenants.suite.admin)


async def idle(tenants: TenantSuite) -> None:
    await tenants.suite.until_all_free(WORKERS)


async def cached(tenants: TenantSuite) -> int:
    return sum(pool.cached for pool in await tenants.suite.pools())


# ------------------------------------------------------------ reset


async def test_a_reset_over_http_drops_what_no_request_uses_and_the_others_go_on(tenants: TenantSuite) -> None:
    first, second = random_prompts(2, 64, seed=1)
    await tenants.ask("red", greedy(first, 4))
    await idle(tenants)
    running = await begun(tenants, "red", second)
    before, earlier = await cached(tenants), await recorded_drops(tenants)
    assert before >= 4
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        response = await client.post(f"http://{metrics_addresses(tenants.suite.stack.options)[0]}/reset_prefix_cache")
    answer = response.json()
    assert (response.status_code, answer["dropped_blocks"], answer["index_current"]) == (200, before, True)
    assert [each["confirmed"] for each in answer["workers"]] == [True] * WORKERS
    assert sum(each["blocks_in_use"] for each in answer["workers"]) >= 4
    assert await cached(tenants) == 0
    assert (await tenants.probe("red", first)).cached_tokens == 0
    assert (await running.read()).WhichOneof("event") == "tokens", "the running request goes on"
    running.cancel()
    await idle(tenants)
    assert await cached(tenants) >= 4 + 4, "its blocks and those of the request after the reset are cached"
    assert await recorded_drops(tenants) == earlier + before


async def recorded_drops(tenants: TenantSuite) -> float:
    """Return how many blocks resets have dropped, by the decisions of the manager."""
    async with operator_channel(tenants.suite.stack.options, manager_address(tenants), Role.MANAGER) as channel:
        stub = decision_pb2_grpc.DecisionServiceStub(channel)
        found = await stub.ListDecisions(decision_pb2.ListDecisionsRequest(kind="reset"), timeout=PATIENCE)
    return sum(record.figures["dropped"] for record in found.decisions)


def manager_address(tenants: TenantSuite) -> str:
    return f"127.0.0.1:{tenants.suite.stack.options.manager_port}"


async def test_a_reset_by_command_and_a_manager_that_is_killed_bring_nothing_back(tenants: TenantSuite) -> None:
    (prompt,) = random_prompts(1, 160, seed=2)
    await tenants.ask("red", greedy(prompt, 1))
    await idle(tenants)
    before = await cached(tenants)
    options = tenants.suite.stack.options
    words = ("reset-cache", "--admin-address", tenants.suite.stack.admin_address, "--state-dir", str(options.state_dir))
    done = await asyncio.to_thread(quire, *words, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["dropped_blocks"], answer["index_current"]) == (0, before, True), done.stderr
    old = {pool.worker_id for pool in await tenants.suite.pools()}
    kill(tenants.suite, "kvmanager")
    await until(
        lambda: pools_or_none(tenants),
        lambda pools: {pool.worker_id for pool in pools} == old,
        every=0.05,
        seconds=PATIENCE,
    )
    assert await cached(tenants) == 0, "no inventory brings back what a reset dropped"
    assert (await tenants.probe("red", prompt)).cached_tokens == 0
    await idle(tenants)


async def pools_or_none(tenants: TenantSuite) -> list[kv.Pool]:
    """Return the pools of a manager that may be starting."""
    try:
        return await tenants.suite.pools()
    except aio.AioRpcError:
        return []


# ------------------------------------------------------------ abort


async def test_a_tenant_aborts_its_own_request_through_any_router_and_no_other(tenants: TenantSuite) -> None:
    prompt, other = random_prompts(2, 32, seed=3)
    mine = await begun(tenants, "red", prompt, request_id="one")
    theirs = await begun(tenants, "blue", other, request_id="one")
    asked = pb.AbortRequest(request_id="one")
    async with AsyncExitStack() as stack:
        # The kernel gives each connection to either router; both must do, whichever has the stream.
        stubs = [
            rpc.InferenceServiceStub(await stack.enter_async_context(open_channel(tenants.suite.stack.address)))
            for _ in range(8)
        ]
        for stub in stubs:
            unknown = pb.AbortRequest(request_id="none")
            assert isinstance(
                await refusal(stub.Abort(unknown, timeout=PATIENCE, metadata=tenants.metadata("red"))), errors.NotFound
            )
        answer = await stubs[0].Abort(asked, timeout=PATIENCE, metadata=tenants.metadata("red"))
    assert answer.aborted == 1
    assert isinstance(await refusal(rest(mine)), errors.Cancelled)
    assert (await mine.code(), await mine.details()) == (
        grpc.StatusCode.CANCELLED,
        "the request was aborted by another call",
    )
    assert (await theirs.read()).WhichOneof("event") == "tokens", "another tenant's request with this id goes on"
    boss = await tenants.suite.inference.Abort(asked, timeout=PATIENCE, metadata=tenants.metadata("boss"))
    assert boss.aborted == 1
    assert isinstance(await refusal(rest(theirs)), errors.Cancelled)
    await idle(tenants)


async def test_each_router_ends_the_streams_of_the_other(tenants: TenantSuite) -> None:
    prompts = random_prompts(8, 32, seed=4)
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(tenants.suite.stack.address)) for _ in prompts]
        calls: list[Any] = [
            rpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(
                    request_id=f"r{number}", prompt=greedy(prompt, LONG).prompt, sampling=greedy(prompt, LONG).sampling
                ),
                timeout=PATIENCE,
                metadata=tenants.metadata("red"),
            )
            for number, (channel, prompt) in enumerate(zip(channels, prompts, strict=True))
        ]
        for call in calls:
            assert (await call.read()).WhichOneof("event") == "admitted"
        for number in range(len(prompts)):
            answer = await operators(tenants).Abort(pb.AbortRequest(request_id=f"r{number}"), timeout=PATIENCE)
            assert answer.aborted == 1
        ends = [await refusal(rest(call)) for call in calls]
    assert {type(each) for each in ends} == {errors.Cancelled}
    await idle(tenants)


async def test_what_is_no_request_id_is_refused_by_name(tenants: TenantSuite) -> None:
    bad = await refusal(operators(tenants).Abort(pb.AbortRequest(request_id="a b"), timeout=PATIENCE))
    assert isinstance(bad, errors.InvalidRequest)
    assert bad.violations[0].field == "request_id"


# ------------------------------------------------------------ loads


async def test_loads_show_what_each_worker_has_to_do_and_how_fast_it_is(tenants: TenantSuite) -> None:
    await idle(tenants)
    streams = [await begun(tenants, "red", prompt) for prompt in random_prompts(4, 32, seed=5)]
    reading = [asyncio.create_task(rest(call)) for call in streams]
    async with asyncio.timeout(PATIENCE):
        while True:
            loads = await operators(tenants).GetLoads(pb.GetLoadsRequest(), timeout=PATIENCE)
            running = sum(each.running_sequences for each in loads.workers)
            if running == 4 and all(
                each.output_tokens_per_second > 0 for each in loads.workers if each.running_sequences
            ):
                break
            await asyncio.sleep(0.05)
    assert loads.running_requests == 4, "those of both routers"
    assert {each.state for each in loads.workers} == {"connected"}
    for each in loads.workers:
        assert each.used_blocks + each.free_blocks == each.num_blocks == 1024
        assert each.computed_tokens_per_second >= each.output_tokens_per_second
        assert each.address
    one = await operators(tenants).GetLoads(pb.GetLoadsRequest(worker_id="worker-1"), timeout=PATIENCE)
    assert [each.worker_id for each in one.workers] == ["worker-1"]
    unknown = operators(tenants).GetLoads(pb.GetLoadsRequest(worker_id="worker-9"), timeout=PATIENCE)
    assert isinstance(await refusal(unknown), errors.NotFound)
    for call in streams:
        call.cancel()
    with suppress(asyncio.CancelledError, aio.AioRpcError):
        await asyncio.gather(*reading, return_exceptions=True)
    await idle(tenants)


async def test_loads_are_for_operators(tenants: TenantSuite) -> None:
    public = tenants.suite.inference
    call = public.GetLoads(pb.GetLoadsRequest(), timeout=PATIENCE, metadata=tenants.metadata("red"))
    assert isinstance(await refusal(call), errors.PermissionDenied)
    assert isinstance(await refusal(public.GetLoads(pb.GetLoadsRequest(), timeout=PATIENCE)), errors.Unauthenticated)
    boss = await public.GetLoads(pb.GetLoadsRequest(), timeout=PATIENCE, metadata=tenants.metadata("boss"))
    assert len(boss.workers) == WORKERS


# ------------------------------------------------------------ the tokenizer


async def test_a_client_gets_the_tokenizer_whole_and_once(tenants: TenantSuite) -> None:
    files: dict[str, bytes] = {}
    fingerprints = set()
    metadata = tenants.metadata("red")
    async for piece in tenants.suite.inference.GetTokenizer(
        pb.GetTokenizerRequest(), timeout=PATIENCE, metadata=metadata
    ):
        fingerprints.add(piece.fingerprint)
        files[piece.file] = files.get(piece.file, b"") + piece.content
        if piece.end_of_file:
            assert piece.sha256 == hashlib.sha256(files[piece.file]).digest()
    ids = Tokenizer.from_str(files["tokenizer.json"].decode()).encode("Anna has a dog.").ids
    asked = pb.TokenizeRequest(prompt=pb.Prompt(text="Anna has a dog."))
    served = await tenants.suite.inference.Tokenize(asked, timeout=PATIENCE, metadata=metadata)
    assert list(served.token_ids) == ids
    (fingerprint,) = fingerprints
    known = pb.GetTokenizerRequest(known_fingerprint=fingerprint)
    again = [piece async for piece in tenants.suite.inference.GetTokenizer(known, timeout=PATIENCE, metadata=metadata)]
    assert again == [pb.GetTokenizerResponse(fingerprint=fingerprint)]


# ------------------------------------------------------------ events


class Mirror:
    """A subscriber's view of the caches, made of events alone."""

    def __init__(self) -> None:
        self.hashes: dict[str, set[BlockHash]] = {}
        self.at: dict[str, kv.KvPosition] = {}

    def take(self, message: kv.SubscribeKvEventsResponse) -> None:
        worker = message.worker_id
        last = self.at.get(worker)
        match message.WhichOneof("event"):
            case "snapshot":
                part = set(unpack_hashes(message.snapshot.block_hashes))
                fresh = last is None or (last.stream, last.number) != (message.stream, message.number)
                self.hashes[worker] = part | (set() if fresh else self.hashes[worker])
            case "changes":
                assert last is not None
                assert last.stream == message.stream
                assert message.number == last.number + len(message.changes.changes), "no number is missing"
                for change in message.changes.changes:
                    self._change(worker, change)
            case "detached":
                del self.hashes[worker], self.at[worker]
                return
        self.at[worker] = kv.KvPosition(worker_id=worker, stream=message.stream, number=message.number)

    def _change(self, worker: str, change: kv.KvChange) -> None:
        match change.WhichOneof("change"):
            case "stored":
                self.hashes[worker].add(BlockHash(change.stored.block_hash))
            case "removed":
                self.hashes[worker].remove(BlockHash(change.removed.block_hash))
            case "cleared":
                self.hashes[worker].clear()

    @property
    def blocks(self) -> int:
        return sum(map(len, self.hashes.values()))

    async def until(self, call: Any, blocks: int) -> None:
        """Follow a subscription until the view has so many blocks, of all workers."""
        async with asyncio.timeout(PATIENCE):
            while len(self.hashes) < WORKERS or self.blocks != blocks:
                self.take(await call.read())


async def test_events_mirror_the_caches_through_stores_resets_and_a_resumed_stream(tenants: TenantSuite) -> None:
    first, second = random_prompts(2, 64, seed=6)
    await manager(tenants).ResetPrefixCache(kv.ResetPrefixCacheRequest(), timeout=PATIENCE)
    await tenants.ask("red", greedy(first, 1))
    await idle(tenants)
    mirror, present = Mirror(), await cached(tenants)
    assert present == 4
    call = manager(tenants).SubscribeKvEvents(kv.SubscribeKvEventsRequest(), timeout=PATIENCE)
    await mirror.until(call, present)
    await tenants.ask("blue", greedy(second, 1))
    await mirror.until(call, 8)
    call.cancel()
    await tenants.ask("blue", greedy([*second, *first], 1))
    await idle(tenants)
    after = kv.SubscribeKvEventsRequest(after=mirror.at.values())
    again = manager(tenants).SubscribeKvEvents(after, timeout=PATIENCE)
    await mirror.until(again, await cached(tenants))
    assert mirror.blocks > 8
    await manager(tenants).ResetPrefixCache(kv.ResetPrefixCacheRequest(), timeout=PATIENCE)
    await mirror.until(again, 0)
    again.cancel()


async def test_the_public_port_has_no_events_and_no_resets(tenants: TenantSuite) -> None:
    public = kvmanager_pb2_grpc.KvManagerServiceStub(tenants.suite.channel)
    for call in (
        public.ResetPrefixCache(kv.ResetPrefixCacheRequest(), timeout=PATIENCE, metadata=tenants.metadata("boss")),
        rest_of_events(public.SubscribeKvEvents(kv.SubscribeKvEventsRequest(), timeout=PATIENCE)),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def rest_of_events(call: Any) -> None:
    async for _ in call:
        pass
