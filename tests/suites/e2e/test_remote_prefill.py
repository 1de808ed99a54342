"""Prompts are computed at prefill workers and served by decode workers: tokens and hits, over kills of each."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from common.rpc.server import open_channel
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill, until_restarted
from tests.support.routers import ALONE, killed
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Suite, cached_tokens, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import quire_why

PASSES = ("--host-memory", "64MiB", "--data-port", "0")
ALWAYS = ("--remote-prefill", "always")
TOKENS = 12
DECODE = ("worker-2", "worker-3")


@asynccontextmanager
async def simulated(folder: Path, prefill: str = "200us") -> AsyncIterator[Suite]:
    """Run two workers for prompts, and two that decode; a token of a prompt takes `prefill`."""
    costs = ("--kv-blocks", "2048", "--simulate", f"base=4ms,prefill={prefill}", *PASSES)
    options = StackOptions(model=CHECKPOINT, workers=4, prefill_workers=2, worker_flags=costs, router_flags=ALWAYS)
    async with running_suite(folder, options) as suite:
        await suite.until_connected(4)
        yield suite


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    draw = random.Random(seed)
    return [[draw.randrange(6, 500) for _ in range(tokens)] for _ in range(count)]


def named(prompt: list[int], name: str) -> pb.GenerateRequest:
    request = seeded(prompt, TOKENS)
    request.request_id = name
    return request


async def test_prompts_pass_from_two_workers_to_two_others(tmp_path: Path) -> None:
    asked = prompts(16, 200, seed=3)
    async with simulated(tmp_path, prefill="2ms") as suite:
        status = await suite.status()
        roles = {each.worker_id: each.disaggregation for each in status.workers}
        assert roles == {"worker-0": "prefill", "worker-1": "prefill", "worker-2": "decode", "worker-3": "decode"}
        outcomes = await asyncio.gather(*(suite.generate(seeded(prompt, TOKENS)) for prompt in asked))
        assert [list(each.tokens) for each in outcomes] == [expected(prompt, TOKENS) for prompt in asked]
        assert {each.admitted.worker_id for each in outcomes if each.admitted} == set(DECODE)
        assert [cached_tokens(each) for each in outcomes] == [(len(prompt) - 1) // 16 * 16 for prompt in asked]
        await suite.until_all_free(4)


async def test_why_names_the_worker_that_computed_the_prompt(tmp_path: Path) -> None:
    async with simulated(tmp_path) as suite:
        outcome = await suite.generate(named(prompts(1, 200, seed=4)[0], "elsewhere"))
        assert outcome.admitted is not None
        status, out, err = await quire_why(suite, "elsewhere")
        assert (status, err) == (0, "")
        found = " ".join(out.split())
        words = rf"worker-[01] computed 192 tokens of its prompt, for {outcome.admitted.worker_id} to fetch"
        assert re.search(words, found), out
        assert "computing its prompt elsewhere" in found


@pytest.mark.parametrize("killed", [("worker-0", "worker-1"), ("worker-2",)], ids=["prefill", "decode"])
async def test_workers_that_die_amid_prompts_cost_no_token(killed: tuple[str, ...], tmp_path: Path) -> None:
    """Prompts take 0.4 s each, one after the other: some are computed, some under way and some not begun."""
    asked = prompts(24, 2000, seed=5)
    async with simulated(tmp_path) as suite:
        tasks = [asyncio.create_task(suite.generate(seeded(prompt, TOKENS))) for prompt in asked]
        await until_busy(suite, killed)
        pids = {worker: suite.stack.children[worker].pid for worker in killed}
        for worker in killed:
            kill(suite, worker)
        outcomes = await asyncio.gather(*tasks)
        assert [list(each.tokens) for each in outcomes] == [expected(prompt, TOKENS) for prompt in asked]
        for worker, pid in pids.items():
            await until_restarted(suite, worker, pid)
        await suite.until_connected(4)
        await suite.until_all_free(4)


async def until_busy(suite: Suite, workers: tuple[str, ...]) -> None:
    """Wait until each of the workers has a sequence; its levels are those of before a long step."""

    def run(status: pb.GetStatusResponse) -> bool:
        there = [each for each in status.workers if each.worker_id in workers]
        return all(each.running_sequences + each.waiting_sequences for each in there)

    await until(suite.status, run, every=0.02, seconds=PATIENCE)


async def test_without_a_worker_that_decodes_those_for_prompts_serve_whole_requests(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "2048", "--simulate", "base=1ms", *PASSES, "--disaggregation", "prefill")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=flags, router_flags=ALWAYS)
    (prompt,) = prompts(1, 100, seed=6)
    async with running_suite(tmp_path, options) as suite:
        outcome = await suite.generate(seeded(prompt, TOKENS))
        assert list(outcome.tokens) == expected(prompt, TOKENS)


@pytest.mark.parametrize(
    ("kind", "pages", "hits"),
    [
        ("llama", 64, 36),
        pytest.param("gemma4_text", 300, 36, marks=pytest.mark.rest),
        pytest.param("llama4_text", 240, 36, marks=pytest.mark.rest),
        # The prompt's full blocks end with its last token there, before which the last checkpoint is.
        pytest.param("qwen3_next", 240, 32, marks=pytest.mark.rest),
    ],
)
async def test_a_model_continues_from_blocks_that_another_worker_computed(
    kind: str, pages: int, hits: int, tmp_path: Path
) -> None:
    folder, draw = checkpoint(kind), random.Random(7)
    talks = [[draw.randrange(6, VOCAB_SIZE) for _ in range(37)] for _ in range(6)]
    wanted = [hf_greedy(folder, talk, TOKENS) for talk in talks]
    sizes = ("--dtype", "float32", "--kv-blocks", f"{pages}", "--max-model-len", "64", "--max-num-seqs", "4")
    flags = (*sizes, "--host-memory", "1MiB" if kind == "llama" else "8MiB", "--data-port", "0")
    options = StackOptions(
        model=folder, block_size=4, workers=2, prefill_workers=1, worker_flags=flags, router_flags=ALWAYS
    )
    async with running_suite(tmp_path, options) as suite:
        await suite.until_connected(2)
        first = await asyncio.gather(*(suite.generate(greedy(talk, TOKENS)) for talk in talks[:3]))
        assert [list(each.tokens) for each in first] == wanted[:3]
        assert [cached_tokens(each) for each in first] == [hits] * 3
        assert {each.admitted.worker_id for each in first if each.admitted} == {"worker-1"}
        pid = suite.stack.children["worker-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that none of the next prompts is computed before it is killed
        tasks = [asyncio.create_task(suite.generate(greedy(talk, TOKENS))) for talk in talks[3:]]
        await until(suite.status, lambda status: status.queued_requests == 3, every=0.02, seconds=PATIENCE)
        kill(suite, "worker-0")
        assert [list((await each).tokens) for each in tasks] == wanted[3:]
        await until_restarted(suite, "worker-0", pid)
        await suite.until_connected(2)
        await suite.until_all_free(2)


async def test_a_router_that_dies_while_a_prompt_is_computed_costs_its_client_nothing(tmp_path: Path) -> None:
    """The prompt takes 2 s. It ends with its router, and the client sends its request to the other one."""
    flags = ("--kv-blocks", "2048", "--simulate", "base=4ms,prefill=1ms", *PASSES)
    options = StackOptions(
        model=CHECKPOINT,
        workers=2,
        prefill_workers=1,
        worker_flags=flags,
        router_flags=ALWAYS,
        own_ports=tuple(free_ports(2)),
    )
    (prompt,) = prompts(1, 2000, seed=8)
    async with running_suite(tmp_path, options) as suite:
        await suite.until_connected(2)
        async with AsyncClient([suite.stack.address] * 2) as client:
            running = client.stream(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0, seed=1)
            first = asyncio.ensure_future(anext(running))
            await until_busy(suite, ("worker-0",))
            await killed(suite, await router_with_a_request(suite))
            chunks = [await first, *[chunk async for chunk in running]]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected(prompt, TOKENS)
        await suite.until_all_free(2)


async def router_with_a_request(suite: Suite) -> str:
    """Return the name of the router that has a request."""

    async def busy() -> str:
        for name in ("router-0", "router-1"):
            async with open_channel(suite.stack.children[name].program.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                status = await stub.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE, metadata=ALONE)
            if status.queued_requests:
                return name
        return ""

    return await until(busy, bool, every=0.02, seconds=PATIENCE)
