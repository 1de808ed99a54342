"""A prefix that many ask for leaves its busy holder: an idle worker fetches it, and both serve it from then on."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite import programs
from cli.suite.stack import StackOptions
from common.contracts.types import PoolIdentity
from quire.decision.v1 import decision_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.inference.v1 import inference_pb2
from tests.support.direct_worker import records_of, stream_to, submit
from tests.support.index_view import identity_of
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Suite, cached_tokens, running_suite
from tests.support.waiting import until
from tests.support.why import quire_why

BLOCK, TOKENS = 16, 8
PREFIX = 20 * BLOCK
ASKED, LONG = 6, 15
_draw = random.Random(36)

pytestmark = pytest.mark.rest


def fresh(tokens: int) -> list[int]:
    return [_draw.randrange(100, 400) for _ in range(tokens)]


def named(prompt: list[int], name: str) -> inference_pb2.GenerateRequest:
    request = seeded(prompt, TOKENS)
    request.request_id = name
    return request


async def explained(suite: Suite, request: inference_pb2.GenerateRequest) -> pb.ExplainResponse:
    return await suite.decisions.Explain(pb.ExplainRequest(request=request), timeout=PATIENCE)


async def routing_of(suite: Suite, name: str) -> pb.DecisionRecord:
    wanted = pb.ListDecisionsRequest(request_id=name, kind="routing")
    (found,) = (await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions
    return found


def terms_of(record: pb.DecisionRecord, worker: str) -> dict[str, float]:
    return next(dict(each.terms) for each in record.candidates if each.name == worker)


def _command(module: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.gpuworker.peer_worker" if module == "gpuworker" else module]


@asynccontextmanager
async def busy(suite: Suite, worker: str, identity: PoolIdentity) -> AsyncIterator[None]:
    """Give a worker prompts of its own that take it a minute, and cancel them in the end."""
    async with stream_to(suite, worker) as router:
        for handle in range(1, LONG + 1):
            message = submit(fresh(2000), TOKENS, f"long-{handle}", identity)
            message.submit.handle = handle
            await router.send(message)
        yield
        for handle in range(1, LONG + 1):
            await router.send(worker_pb.StreamRequest(cancel=worker_pb.Cancel(handle=handle)))
        await router.until_finished(*range(1, LONG + 1))


async def test_a_hot_prefix_spreads_by_a_fetch_in_place_of_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder computes other prompts for a minute. Meanwhile the prefix is fetched, once for six requests."""
    monkeypatch.setattr(programs, "module_command", _command)
    monkeypatch.setenv("PEER_TEST_PATIENCE", str(PATIENCE))  # a busy machine makes no fetch a miss
    prefix = fresh(PREFIX)
    flags: tuple[str, ...] = ("--kv-blocks", "2048", "--max-model-len", "2048", "--max-num-batched-tokens", "256")
    flags += ("--simulate", "base=4ms,prefill=2ms", "--host-memory", "64MiB", "--data-port", "0")
    async with running_suite(tmp_path, StackOptions(model=CHECKPOINT, workers=2, worker_flags=flags)) as suite:
        await suite.until_connected(2)
        first = await suite.generate(named([*prefix, *fresh(5)], "first"))
        assert first.admitted is not None
        holder = first.admitted.worker_id
        (cold,) = {"worker-0", "worker-1"} - {holder}
        hot = [[*prefix, *fresh(5)] for _ in range(ASKED)]
        await until(
            lambda: explained(suite, seeded(hot[0], TOKENS)), lambda told: told.cached_tokens >= PREFIX,
            every=0.05, seconds=PATIENCE,
        )  # fmt: skip
        async with busy(suite, holder, await identity_of(suite)):
            told = await until(
                lambda: explained(suite, seeded(hot[0], TOKENS)), lambda told: told.worker_id == cold,
                every=0.02, seconds=PATIENCE,
            )  # fmt: skip
            assert {each.name: int(each.figures["hit_blocks"]) for each in told.workers} == {holder: 20, cold: 0}
            asked = [named(prompt, f"hot-{number}") for number, prompt in enumerate(hot)]
            outcomes = await asyncio.gather(*(suite.generate(each) for each in asked))
        assert [list(each.tokens) for each in outcomes] == [expected(prompt, TOKENS) for prompt in hot]
        assert {each.admitted.worker_id for each in outcomes if each.admitted} == {cold}
        assert [cached_tokens(each) for each in outcomes] == [PREFIX] * ASKED
        assert sum(line.startswith(f"{cold}: CARRIER ") for line in suite.lines) == PREFIX // BLOCK, "each block once"
        choices = [await routing_of(suite, f"hot-{number}") for number in range(ASKED)]
        fetches = [terms_of(each, cold).get("fetch", 0.0) for each in choices]
        assert sum(each > 0.0 for each in fetches) == 1, "the others find it there"
        fetching = f"hot-{fetches.index(max(fetches))}"
        (grant,) = await records_of(suite, fetching, "grant")
        assert (grant.worker, grant.figures["fetched_blocks"]) == (cold, PREFIX // BLOCK)
        assert terms_of(choices[0], holder)["queue_delay"] > 10 * max(fetches)
        why = " ".join((await quire_why(suite, fetching))[1].split())
        assert f"goes to {cold}, the least predicted: {cold}" in why
        assert "20 blocks to fetch in" in why
        await suite.until_all_free(2)
