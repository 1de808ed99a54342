"""Workers of two ranks each as processes: whichever rank is killed or stopped, streams move and keep their tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.support.load import prompts, started, until_restarted
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import outcome_of, quire_why

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]
WORKERS, COUNT = 2, 600


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    flags = ("--kv-blocks", "1024", "--dtype", "float32", "-tp", "2", "--threads", "1")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("ranks"), options) as running:
        yield running


def rank_pid(suite: Suite, worker: str, rank: int) -> int:
    pid = suite.stack.children[worker].pid
    assert pid is not None
    if rank == 0:
        return pid
    (other,) = [each for each in psutil.Process(pid).children() if "rank_process" in " ".join(each.cmdline())]
    return other.pid


async def with_a_rank_hit(suite: Suite, rank: int, how: signal.Signals, name: str) -> tuple[list[int], list[str]]:
    """Hit a rank of the worker that serves most of 16 streams; return the pids of its ranks, and who moved.

    On a busy machine the worker may have made all tokens before the rank is hit: then it is done again.
    """
    for turn in itertools.count():
        asked = prompts(16, seed=5)
        requests = [greedy(prompt, COUNT) for prompt in asked]
        for number, request in enumerate(requests):
            request.request_id = f"{name}-{turn}-{number}"
        outcomes = [Outcome() for _ in requests]
        tasks = await started(suite, requests, outcomes)
        serving = Counter(each.admitted.worker_id for each in outcomes if each.admitted and not each.finished)
        if serving:
            ((victim, _),) = serving.most_common(1)
            pids = [rank_pid(suite, victim, each) for each in (0, 1)]
            os.kill(pids[rank], how)
        await asyncio.gather(*tasks)
        assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)
        if not serving:
            continue
        await until_restarted(suite, victim, pids[0])
        moved = [each.request_id for each in requests if (await outcome_of(suite, each)).get("moves")]
        if moved:
            return pids, moved
        await suite.until_connected(WORKERS)
    raise AssertionError


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_streams_outlive_each_rank(suite: Suite, rank: int, how: signal.Signals) -> None:
    name = f"rank{rank}-{how.name}"
    pids, moved = await with_a_rank_hit(suite, rank, how, name)
    await until(lambda: not any(map(psutil.pid_exists, pids)), seconds=PATIENCE)
    await suite.until_connected(WORKERS)
    await suite.until_all_free(WORKERS)
    if rank == 1:
        said = "rank 1 was ended by SIGKILL" if how is signal.SIGKILL else "rank 1 stood still"
        told = [await quire_why(suite, request_id) for request_id in moved]
        assert all(said in out for _, out, _ in told), told
