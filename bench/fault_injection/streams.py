"""Streams that run while something fails: their tokens against those that must come, and the pauses between them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.fault_injection.failure import InjectionFailed
from gpuworker.simulated.tokens import SimulatedTokens
from quire.api.errors import QuireError
from quire.client import AsyncClient, Retry

# A client that waits for as long as a suite takes to start a process anew.
RETRY = Retry(attempts=12, max_backoff=2.0, budget=1e6, resumes=60)
PATIENCE_S = 240.0


class Reference(Protocol):
    """Knows the tokens that must come."""

    def expected(self, seed: int, prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """Return those at the places of `tokens`, which have come."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedReference:
    """Those of simulated workers."""

    of: SimulatedTokens

    def expected(self, seed: int, prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        return self.of.expected(seed, len(prompt), len(tokens))


class RecordedReference:
    """Those of real workers, as an earlier run of the same prompts gave them: greedy, so the seed changes nothing."""

    def __init__(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Each of the prompts is recorded for so many tokens, which is the most that can be compared."""
        self.prompts, self.count = prompts, count
        self._tokens: dict[tuple[int, ...], Sequence[int]] = {}

    async def record(self, clients: Sequence[AsyncClient]) -> None:
        """Run each prompt to its end, one at a time at each client. Raises InjectionFailed where one breaks."""
        waiting = list(self.prompts)

        async def run(client: AsyncClient) -> None:
            while waiting:
                stream = Stream(0, waiting.pop())
                await stream.run(client, self.count)
                if stream.broken or len(stream.tokens) != self.count:
                    came = stream.broken or f"{len(stream.tokens)} tokens"
                    raise InjectionFailed(f"{self.count} tokens of an undisturbed stream", came)
                self._tokens[tuple(stream.prompt)] = stream.tokens

        await asyncio.gather(*map(run, clients))

    def expected(self, seed: int, prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        return self._tokens[tuple(prompt)][: len(tokens)]


@dataclass
class Stream:
    """One request: what has come of it."""

    seed: int
    prompt: Sequence[int]
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    broken: str = ""
    longest_gap: float = 0.0
    cached: int = 0  # tokens of the prompt that were not computed
    _last: float = 0.0

    async def run(self, client: AsyncClient, count: int, timeout: float = PATIENCE_S) -> None:
        """Read the request to its end; an error is noted."""
        options: dict[str, object] = {"seed": self.seed, "max_tokens": count, "ignore_eos": True, "timeout": timeout}
        options["temperature"] = 0
        if self.request_id:
            options["request_id"] = self.request_id
        try:
            async with client.stream(list(self.prompt), **options) as chunks:  # type: ignore[arg-type]
                async for chunk in chunks:
                    self._take(chunk.token_ids)
                self.cached = chunks.completion.cached_tokens
        except QuireError as error:
            self.broken = str(error)

    def _take(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        now = time.monotonic()
        if self.tokens:
            self.longest_gap = max(self.longest_gap, now - self._last)
        self.tokens.extend(token_ids)
        self._last = now

    def differing(self, reference: Reference, count: int) -> int:
        """Return how many tokens are not those that a worker must give; missing ones count too."""
        return self.wrong(reference) + abs(count - len(self.tokens))

    def wrong(self, reference: Reference) -> int:
        """Return how many tokens are not those that a worker must give; missing ones do not count."""
        expected = reference.expected(self.seed, self.prompt, self.tokens)
        return sum(ours != theirs for ours, theirs in zip(self.tokens, expected, strict=True))


def prompts(rng: random.Random, count: int, scale: int = 1) -> list[list[int]]:
    """Return prompts of which every other one shares a prefix with others; lengths are times `scale`."""
    return [
        [40 + number % 4] * (48 * scale if number % 2 else 0)
        + rng.choices(range(8, 200), k=rng.randrange(8, 64) * scale)
        for number in range(count)
    ]


async def until_tokens(streams: Sequence[Stream], each: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all streams have begun and have so many tokens on average, or have ended."""
    while not all(task.done() for task in tasks):
        if all(stream.tokens for stream in streams) and sum(len(one.tokens) for one in streams) >= each * len(streams):
            return
        await asyncio.sleep(0.005)
