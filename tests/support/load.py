"""Load for tests that disturb a running suite: prompts that share prefixes, streams that all run, a kill by name."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from grpc import aio

from cli.demo_model.prompts import questions, system_text
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.reference import chat_tokens
from tests.support.suite import PATIENCE, Outcome, Suite, greedy
from tests.support.waiting import until


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return chats over parts of one text, every other one with a prefix that others share."""
    rng = random.Random(seed)
    asked = questions(8)
    text = system_text()
    return [chat_tokens(asked[i % 8].text, text[: 400 if i % 2 else rng.randrange(50, 300)]) for i in range(count)]


async def all_started(suite: Suite, asked: Sequence[list[int]], count: int) -> list[asyncio.Task[Outcome]]:
    """Start a greedy stream for each prompt; return when every one has its first token."""
    return await started(suite, [greedy(prompt, count) for prompt in asked])


async def started(
    suite: Suite, requests: Sequence[pb.GenerateRequest], outcomes: Sequence[Outcome | None] = ()
) -> list[asyncio.Task[Outcome]]:
    """Start a stream for each request; return when every one has its first token.

    Given outcomes, one for each request, show what has come so far.
    """
    firsts = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(suite.generate(request, first_token=first, outcome=outcome))
        for request, first, outcome in zip(requests, firsts, outcomes or [None] * len(firsts), strict=True)
    ]
    await asyncio.gather(*(first.wait() for first in firsts))
    return tasks


def kill(suite: Suite, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    pid = suite.stack.children[name].pid
    assert pid is not None
    os.kill(pid, number)


async def until_restarted(suite: Suite, name: str, pid: int | None) -> None:
    """Wait until the suite runs a process in the place of this one."""
    await until(lambda: suite.stack.children[name].pid not in (None, pid), seconds=PATIENCE)


def placed(outcomes: Sequence[Outcome]) -> set[str]:
    """Return the workers to which the router sent the requests at first."""
    return {outcome.admitted.worker_id for outcome in outcomes if outcome.admitted}


async def until_used(suite: Suite, worker_id: str) -> None:
    """Send requests until this worker serves one: on a busy machine it may look slower than another one."""
    async with asyncio.timeout(PATIENCE):
        for seed in itertools.count(100):
            asked = prompts(16, seed=seed)
            if worker_id in placed(await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))):
                return


async def epoch(suite: Suite) -> int:
    """Return the manager's epoch, which a manager has from the first worker on that attaches."""

    async def now() -> int:
        request = kvmanager_pb2.GetPoolRequest()
        with suppress(aio.AioRpcError):  # a call may still go over the connection to a manager that was just killed
            return int((await suite.manager.GetPool(request, timeout=PATIENCE, wait_for_ready=True)).epoch)
        return 0

    return await until(now, every=0.02, seconds=PATIENCE)


async def until_all_wait(suite: Suite, count: int) -> None:
    """Return when the workers have `count` sequences, none of which has blocks."""

    async def running_and_waiting() -> tuple[int, int]:
        workers = (await suite.inference.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)).workers
        return sum(w.running_sequences for w in workers), sum(w.waiting_sequences for w in workers)

    await until(running_and_waiting, lambda found: found == (0, count), every=0.05, seconds=PATIENCE)


@asynccontextmanager
async def manager_stopped(suite: Suite) -> AsyncIterator[None]:
    """Stop the KV manager: the worker accepts sequences, and starts none before the manager grants blocks again."""
    kill(suite, "kvmanager", signal.SIGSTOP)
    try:
        yield
    finally:
        kill(suite, "kvmanager", signal.SIGCONT)


async def with_a_worker_killed(suite: Suite, requests: Sequence[pb.GenerateRequest]) -> tuple[str, list[Outcome]]:
    """Kill the worker that serves the most streams when every one has its first token; return it and the outcomes.

    The streams themselves say who serves them: the router's count is as old as the worker's last heartbeat. They are
    asked for again if all of them ended before the last one began.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            outcomes = [Outcome() for _ in requests]
            tasks = await started(suite, requests, outcomes)
            serving = Counter(each.admitted.worker_id for each in outcomes if each.admitted and not each.finished)
            if serving:
                break
            await asyncio.gather(*tasks)
    ((victim, _),) = serving.most_common(1)
    kill(suite, victim)
    await asyncio.gather(*tasks)
    return victim, outcomes
