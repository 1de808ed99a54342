"""Load for tests that disturb a running suite: prompts that share prefixes, streams that all run, a kill by name."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence

from cli.demo_model.prompts import questions, system_text
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.reference import chat_tokens
from tests.support.suite import PATIENCE, Outcome, Suite, greedy


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return chats over parts of one text, every other one with a prefix that others share."""
    rng = random.Random(seed)
    asked = questions(8)
    text = system_text()
    return [chat_tokens(asked[i % 8].text, text[: 400 if i % 2 else rng.randrange(50, 300)]) for i in range(count)]


async def all_started(suite: Suite, asked: Sequence[list[int]], count: int) -> list[asyncio.Task[Outcome]]:
    """Start a greedy stream for each prompt; return when every one has its first token."""
    return await started(suite, [greedy(prompt, count) for prompt in asked])


async def started(suite: Suite, requests: Sequence[pb.GenerateRequest]) -> list[asyncio.Task[Outcome]]:
    """Start a stream for each request; return when every one has its first token."""
    firsts = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(suite.generate(request, first_token=first))
        for request, first in zip(requests, firsts, strict=True)
    ]
    await asyncio.gather(*(first.wait() for first in firsts))
    return tasks


def kill(suite: Suite, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    pid = suite.stack.children[name].pid
    assert pid is not None
    os.kill(pid, number)


async def epoch(suite: Suite) -> int:
    """Return the manager's epoch, which a manager has from the first worker on that attaches."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await suite.manager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=PATIENCE, wait_for_ready=True)
            if answer.epoch:
                return int(answer.epoch)
            await asyncio.sleep(0.02)
