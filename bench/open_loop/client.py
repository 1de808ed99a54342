"""A client process of the load benchmark: reads one plan a line, sends its requests, writes the results to a file.

Latencies count from when a request was due, not from when it was sent. So a client that falls behind does not hide the
wait of its user (no coordinated omission); the result says how far it fell behind.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.open_loop.calls import Api, LoadRequest, open_api
from bench.open_loop.plan import Plan, Seen, Trace
from bench.open_loop.token_check import TokenCheck
from common.process.garbage import collect_rarely
from common.rpc import event_loop
from gpuworker.simulated.plane import simulated_tokens
from gpuworker.simulated.tokens import SimulatedTokens

POISSON = 1.0


# Arrival times of requests in an open loop, from a seed alone: they do not depend on the system under load.
# Gaps between arrivals follow a gamma distribution of mean 1 / rate and a given coefficient of variation (standard
# deviation over mean). At 1 that is the exponential distribution, and the arrivals are a Poisson process. Above 1
# they come in bursts with pauses between them.
def arrivals(rate: float, seconds: float, cv: float = POISSON, seed: int = 0) -> Iterator[float]:
    """Yield the times, in seconds from the start, of all arrivals before `seconds`; `rate` is arrivals a second.

    The gamma distribution of shape k and scale s has mean k s and coefficient of variation k^-0.5.
    """
    rng = random.Random(f"arrivals/{seed}")
    shape = cv**-2.0
    scale = 1.0 / (rate * shape)
    now = rng.gammavariate(shape, scale)
    while now < seconds:
        yield now
        now += rng.gammavariate(shape, scale)


def paced(rate: float, count: int) -> Iterator[float]:
    """Yield `count` times at equal distances: how streams are opened that are all to be open at once."""
    return (index / rate for index in range(count))


_FIRST_ID = 8  # after what checkpoints use for padding, ends and roles


class Client:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # Each run has its own prompts: those of another run would be in the prefix cache by now.
        self._rng = random.Random(f"prompts/{plan.start}/{plan.client}/{plan.seed}")
        self._tokens: SimulatedTokens | None = simulated_tokens(Path(plan.check)) if plan.check else None
        self._seeds = itertools.count(plan.seed * 1_000_003 + plan.client * 10_000_019 + 1)
        self._traces: list[Trace] = []

    async def run(self) -> Seen:
        """Return the traces, once all requests are over or `patience` has passed."""
        plan = self._plan
        async with open_api(plan) as api:
            work = self._closed(api) if plan.streams and not plan.opening else self._open(api, list(self._schedule()))
            collect_rarely()
            await asyncio.sleep(max(0.0, plan.start - time.monotonic()))
            spent = time.process_time()
            await work
            spent = time.process_time() - spent
        took = max((trace.done for trace in self._traces), default=plan.start + 1.0) - plan.start
        return Seen.of(self._traces, spent / took)

    def _schedule(self) -> Iterator[tuple[Trace, LoadRequest]]:
        """Yield this client's requests with the times at which they are due."""
        plan = self._plan
        whole: Iterable[float] = arrivals(plan.rate, plan.seconds, plan.cv, plan.seed)
        if plan.opening:
            whole = paced(plan.opening, plan.streams)
        for due in itertools.islice(whole, plan.client, None, plan.clients):
            yield Trace(plan.start + due), self._request()

    def _request(self) -> LoadRequest:
        plan, seed = self._plan, next(self._seeds)
        prompt = self._rng.choices(range(_FIRST_ID, plan.vocabulary), k=plan.prompt_tokens)
        check = TokenCheck(self._tokens, seed, plan.prompt_tokens) if self._tokens is not None else None
        return LoadRequest(prompt, plan.output_tokens, seed, check)

    async def _open(self, api: Api, schedule: list[tuple[Trace, LoadRequest]]) -> None:
        """Make each request when it is due, whatever the state of earlier ones."""
        running = set()
        for trace, request in schedule:
            await asyncio.sleep(max(0.0, trace.intended - time.monotonic()))
            running.add(asyncio.create_task(self._one(api, trace, request)))
        if running:
            _, unfinished = await asyncio.wait(running, timeout=self._plan.patience)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _closed(self, api: Api) -> None:
        """Keep the streams running: a request follows the end of another."""
        plan = self._plan

        async def stream() -> None:
            while time.monotonic() < plan.start + plan.seconds:
                await self._one(api, Trace(time.monotonic()), self._request())

        count = len(range(plan.client, plan.streams, plan.clients))
        async with asyncio.timeout(plan.seconds + plan.patience):
            await asyncio.gather(*(stream() for _ in range(count)))

    async def _one(self, api: Api, trace: Trace, request: LoadRequest) -> None:
        self._traces.append(trace)
        trace.sent = time.monotonic()
        try:
            await api.call(request, trace)
        finally:
            trace.done = time.monotonic()
            if request.check is not None:
                if trace.status == "OK":
                    request.check.end(request.output_tokens)
                trace.faults.extend(request.check.faults)


async def serve() -> None:
    """Run plans from standard input until it is closed; print an empty line when ready, and after each plan."""
    print(flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        plan = Plan.from_json(line)
        seen = await Client(plan).run()
        gc.unfreeze()
        seen.save(plan.results)
        print(flush=True)


if __name__ == "__main__":
    event_loop.run(serve())
