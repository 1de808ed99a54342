"""A rolling restart of all workers under load, with `--drain migrate`: real processes, SIGTERM, real tokens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.load import kill, prompts, started, until_restarted
from tests.support.suite import PATIENCE, Outcome, Suite, running_suite

WORKERS, STREAMS, COUNT = 2, 12, 600
# Longer than any test: what still runs after a drain has moved, and did not just end.
DRAIN_S = 2 * PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two workers whose tokens do not depend on what else runs, to the bit."""
    flags = ("--kv-blocks", "2048", "--deterministic", "--drain", "migrate")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags, drain_timeout=DRAIN_S)
    async with running_suite(tmp_path_factory.mktemp("rolling"), options) as running:
        yield running


def requests() -> list[pb.GenerateRequest]:
    """Return streams of every kind whose state has a position: greedy, seeded, constrained, with log-probabilities."""
    asked: list[pb.GenerateRequest] = []
    for number, prompt in enumerate(prompts(STREAMS, seed=3)):
        sampling = types.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        match number % 4:
            case 1:
                sampling.temperature, sampling.seed = 1.0, number
            case 2:
                sampling.temperature, sampling.seed, sampling.logprobs = 0.8, number, 2
            case 3:
                sampling.temperature, sampling.seed = 1.0, number
                sampling.frequency_penalty = 0.5
        asked.append(pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling))
    asked[0].sampling.n = 2
    asked[-1].sampling.ignore_eos = False
    asked[-1].regex = "([0-9]{3} ){120}"
    return asked


async def _moved(suite: Suite) -> list[decision_pb2.DecisionRecord]:
    wanted = decision_pb2.ListDecisionsRequest(kind="migration", limit=1000)
    return list((await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions)


async def _restart_under(suite: Suite, name: str, asked: Sequence[pb.GenerateRequest]) -> list[Outcome]:
    """Send SIGTERM to a worker that has streams; return the outcomes of all when it is back."""
    while True:
        before, pid = len(await _moved(suite)), suite.stack.children[name].pid
        tasks = await started(suite, asked)
        kill(suite, name, signal.SIGTERM)
        outcomes = await asyncio.gather(*tasks)
        await until_restarted(suite, name, pid)
        await suite.until_connected(WORKERS)
        if len(await _moved(suite)) > before:  # else it had no streams: all are asked for again
            return outcomes


async def test_no_request_fails_and_no_token_is_wrong(suite: Suite) -> None:
    asked = requests()
    undisturbed = await asyncio.gather(*(suite.generate(each) for each in asked))
    for name in ("worker-0", "worker-1", "worker-0"):
        found = await _restart_under(suite, name, asked)
        for number, (was, now) in enumerate(zip(undisturbed, found, strict=True)):
            assert now.sequences == was.sequences, f"stream {number} with {name} restarted"
            assert now.logprobs == was.logprobs
            if len(was.sequences) == 1:  # else the texts of several come in turns
                assert now.text == was.text
            assert now.finished is not None
            assert was.finished is not None
            assert now.finished.reason == was.finished.reason
    moves = await _moved(suite)
    assert {reason.partition(":")[0] for move in moves for reason in move.reasons} == {"drain"}
    assert {move.chosen for move in moves} == {"worker-0", "worker-1"}
    await suite.until_all_free(WORKERS)
