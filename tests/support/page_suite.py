"""A suite of two simulated workers under a load that has something of everything, for the page and its pictures."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from tests.support.simulated import seeded
from tests.support.suite import PATIENCE, Suite, running_suite

WORKERS = 2
BLOCKS = 288
_BUSY_STATUSES = (429, 503)
_BUSY = "base=14ms,prefill=120us"
# Lengths of the prompts that many requests begin with.
_SYSTEMS = (96, 160, 224)


@asynccontextmanager
async def page_suite(state_dir: Path, step_costs: str = _BUSY) -> AsyncIterator[tuple[Suite, str]]:
    """Run the suite; yield it with the URL of the page. No step takes less than `step_costs` say."""
    flags = ("--kv-blocks", f"{BLOCKS}", "--simulate", step_costs, "--max-num-seqs", "24")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags)
    async with running_suite(state_dir, options) as suite:
        await suite.until_connected(WORKERS)
        yield suite, f"http://{metrics_addresses(suite.stack.options)[0]}/page/"


async def answer_of(url: str, parameters: Mapping[str, object]) -> httpx.Response:
    """Return the page's answer to a question; ask again while the router or the manager is too busy for it."""
    given = {key: str(value) for key, value in parameters.items()}
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(timeout=PATIENCE) as client:
        while True:
            answer = await client.get(url, params=given)
            if answer.status_code not in _BUSY_STATUSES:
                return answer
            await asyncio.sleep(0.2)


def request_of(number: int, draw: random.Random) -> pb.GenerateRequest:
    """Return one request of the load: most share the begin of their prompts, some are long, some go first."""
    kind = draw.randrange(len(_SYSTEMS))
    prompt = [100 + kind] * _SYSTEMS[kind] + [draw.randrange(100, 400) for _ in range(draw.randrange(8, 160))]
    if number % 9 == 4:
        prompt = [draw.randrange(100, 400) for _ in range(draw.randrange(260, 420))]
    request = seeded(prompt, draw.randrange(24, 120), seed=number + 1)
    request.request_id = f"chat-{number:04d}"
    request.priority = 5 if number % 13 == 6 else 0
    return request


@asynccontextmanager
async def load(suite: Suite, at_once: int) -> AsyncIterator[None]:
    """Keep so many requests running; the last ones end before the block does."""
    draw, numbers, ends = random.Random(7), itertools.count(), asyncio.Event()

    async def client() -> None:
        while not ends.is_set():
            await suite.generate(request_of(next(numbers), draw), timeout=PATIENCE)

    tasks = [asyncio.create_task(client()) for _ in range(at_once)]
    try:
        yield
    finally:
        ends.set()
        await asyncio.gather(*tasks)
