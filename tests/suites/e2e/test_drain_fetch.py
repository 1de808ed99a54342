"""A drain moves K/V too: the worker that takes over a stream fetches its blocks from the one that drains."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from tests.support.direct_worker import records_of
from tests.support.load import kill, until_restarted
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Outcome, running_suite
from tests.support.waiting import until

PROMPT, COUNT, BLOCK = 160, 1200, 16

pytestmark = pytest.mark.rest


async def test_a_stream_that_a_drain_moves_brings_its_blocks_along(tmp_path: Path) -> None:
    """Steps take 10 ms, so the stream runs for 12 s; it is moved once some tokens of it have come."""
    steps = ("--simulate", "base=10ms,prefill=2ms", "--kv-blocks", "256", "--max-model-len", "2048")
    flags = (*steps, "--host-memory", "4MiB", "--drain", "migrate")
    options = StackOptions(model=CHECKPOINT, workers=2, data_ports=(0, 0), worker_flags=flags, drain_timeout=PATIENCE)
    async with running_suite(tmp_path, options) as suite:
        prompt = [random.Random(4).randrange(100, 200) for _ in range(PROMPT)]
        request, first, outcome = seeded(prompt, COUNT), asyncio.Event(), Outcome()
        request.request_id = "moves"
        task = asyncio.create_task(suite.generate(request, first_token=first, outcome=outcome))
        await first.wait()
        await until(lambda: len(outcome.tokens), lambda found: found > 2 * BLOCK, seconds=PATIENCE)
        (grant,) = await records_of(suite, "moves", "grant")
        left, pid = grant.worker, suite.stack.children[grant.worker].pid
        kill(suite, left, signal.SIGTERM)
        assert (await task).tokens == expected(prompt, COUNT)
        await until_restarted(suite, left, pid)
        begun, taken = await records_of(suite, "moves", "grant")
        assert (begun.worker, "fetched_blocks" in begun.figures) == (left, False)
        assert taken.worker != left
        assert taken.figures["fetched_blocks"] >= PROMPT // BLOCK + 2, "those of the prompt, and of what it had sampled"
        assert any(f"came from {left}" in reason for reason in taken.reasons), taken.reasons


async def test_nothing_comes_ahead_of_need_to_a_worker_that_drains(tmp_path: Path) -> None:
    """The worker ends its stream itself, and serves meanwhile; the manager has heard that it drains."""
    steps = ("--simulate", "base=10ms", "--kv-blocks", "256", "--max-model-len", "2048", "--host-memory", "4MiB")
    options = StackOptions(model=CHECKPOINT, workers=2, data_ports=(0, 0), worker_flags=steps, drain_timeout=PATIENCE)
    async with running_suite(tmp_path, options) as suite:
        prompt, admin = [100] * PROMPT, rpc.InferenceServiceStub(suite.admin)
        request, first = seeded(prompt, COUNT), asyncio.Event()
        request.request_id = "runs"
        task = asyncio.create_task(suite.generate(request, first_token=first))
        await first.wait()
        (grant,) = await records_of(suite, "runs", "grant")
        other = pb.Prompt(token_ids=pb.TokenIds(ids=[*prompt, *prompt]))
        asked = pb.PrefetchRequest(prompt=other, worker_id=grant.worker)

        async def reason() -> str:
            return (await admin.Prefetch(asked, timeout=PATIENCE)).reason

        assert "the worker drains" not in await reason()
        kill(suite, grant.worker, signal.SIGTERM)
        await until(reason, lambda found: "the worker drains" in found, seconds=PATIENCE)
        assert not task.done()
        await admin.Abort(pb.AbortRequest(request_id="runs"), timeout=PATIENCE)
        await asyncio.wait([task])
