"""A mixed load on a running suite: good requests whose tokens are compared, and among them all kinds of others.

Of ten requests eight are good streams. The others go to /v1/messages (`messages.py`); are cancelled, refused or no
messages at all; come over HTTP or on a connection of their own, hang up in the middle, bring a new constraint, or ask
the admin plane.

Prompts come again: there are PROMPTS of them. So what the services remember of prompts is full soon. The router forgets
after ten minutes where it sent one, and with ever new prompts its memory would follow the rate of the requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
from grpc import aio

from bench.attack import wire
from bench.attack.kinds import Target, outcome, posted, streamed, unary
from bench.attack.victim import Victim
from bench.fault_injection.messages import Messages
from bench.fault_injection.streams import Stream, prompts
from common.rpc.server import open_channel
from gpuworker.simulated.tokens import SimulatedTokens, readable_ids
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from router.answers.text.checkpoint import read_checkpoint

CLIENTS_A_CHANNEL: Final = 8
PROMPTS: Final = 256
_CANCEL_AFTER_S: Final = 0.3
_EVERY: Final = 5
_FIRST_BYTES: Final = 200
_POLL_S: Final = 0.05
_GENERATE_UNARY: Final = "/quire.inference.v1.InferenceService/GenerateUnary"


class MixedLoad:
    """Clients of one suite; `became` counts the ends of their requests."""

    def __init__(
        self,
        suite: Victim,
        channel: aio.Channel,
        clients: Sequence[AsyncClient],
        http: httpx.AsyncClient,
        model: Path,
        seed: int,
    ) -> None:
        """`channel` and `http` are for requests whose end does not count: they do not try again."""
        self._target = Target(channel, suite.host, suite.grpc_port, suite.http_port, random.Random(seed))
        self._suite, self._clients, self._rng = suite, clients, random.Random(f"soak/{seed}")
        self._prompts = [[40 + self._rng.randrange(20)] * 48 + each for each in prompts(self._rng, PROMPTS)]
        checkpoint = read_checkpoint(model)
        self._tokens = SimulatedTokens(readable_ids(model, checkpoint.vocab_size, checkpoint.eos_token_ids))
        self.messages = Messages(http, self._tokens, model, self._rng)
        self._numbers, self._open, self._running = itertools.count(), asyncio.Event(), 0
        self._open.set()
        self._others: tuple[tuple[str, Callable[[], Coroutine[object, object, str]]], ...] = (
            ("message", self.messages.whole),
            ("message_streamed", self.messages.streamed),
            ("cancelled", self._cancelled),
            ("bad", self._bad),
            ("broken", self._broken),
            ("over_http", self._over_http),
            ("gone", self._gone),
            ("constrained", self._constrained),
            ("new_connection", self._new_connection),
            ("admin", self._admin),
        )
        self.became: Counter[str] = Counter()
        self.streams = self.broken = self.differing = 0
        self.gaps: list[float] = []

    async def client(self, number: int, until: float) -> None:
        """Send one request after the other."""
        while time.monotonic() < until:
            await self._open.wait()
            self._running += 1
            try:
                await self._request(number)
            finally:
                self._running -= 1

    @asynccontextmanager
    async def at_rest(self, patience: float) -> AsyncIterator[bool]:
        """Send nothing meanwhile. Yield whether all requests have ended within so many seconds."""
        self._open.clear()
        end = time.monotonic() + patience
        try:
            while self._running and time.monotonic() < end:  # noqa: ASYNC110 - many tasks count it
                await asyncio.sleep(_POLL_S)
            yield not self._running
        finally:
            self._open.set()

    async def _request(self, number: int) -> None:
        turn = next(self._numbers)
        if turn % _EVERY:
            await self._good(self._clients[number // CLIENTS_A_CHANNEL])
            return
        name, send = self._others[turn // _EVERY % len(self._others)]
        ended = await outcome(lambda _: send(), self._target)
        self.became[f"{name} {ended}"] += 1

    async def _good(self, client: AsyncClient) -> None:
        """Read a stream to its end, over whatever router and worker, and compare it."""
        count = self._rng.randrange(1, 400)
        stream = Stream(self._rng.randrange(1 << 30), self._rng.choice(self._prompts))
        await stream.run(client, count)
        self.streams += 1
        self.became["good broken" if stream.broken else "good OK"] += 1
        if stream.broken:
            self.broken += 1
            print(f"  a stream broke after {len(stream.tokens)} of {count} tokens: {stream.broken}", flush=True)
            return
        self.gaps.append(stream.longest_gap)
        if differing := stream.differing(self._tokens, count):
            self.differing += differing
            print(f"  {differing} of {count} tokens differ", flush=True)

    def _made(self, most: int, **fields: str) -> pb.GenerateRequest:
        ids = self._rng.choice(self._prompts)
        sampling = types.SamplingParams(
            max_tokens=self._rng.randrange(1, most), ignore_eos=True, n=self._rng.choice((1, 1, 1, 3))
        )
        return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), sampling=sampling, **fields)  # type: ignore[arg-type]

    async def _cancelled(self) -> str:
        await streamed(self._target, self._made(2000).SerializeToString(), _CANCEL_AFTER_S)
        return "OK"

    async def _bad(self) -> str:
        """Send a request that is refused, with many mistakes."""
        ids = self._rng.choices(range(1 << 20, 1 << 30), k=200)
        sampling = types.SamplingParams(temperature=-1, top_p=7, n=1000)
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), sampling=sampling)
        await streamed(self._target, request.SerializeToString())
        return "OK"

    async def _broken(self) -> str:
        await unary(self._target, _GENERATE_UNARY, wire.garbage(self._rng))
        return "OK"

    async def _over_http(self) -> str:
        body = b'{"prompt": "Once upon a time", "max_tokens": %d, "stream": true}' % self._rng.randrange(1, 40)
        return await posted(self._target, "/v1/completions", body)

    async def _gone(self) -> str:
        """Begin to read a long answer over HTTP, and hang up."""
        body = {"prompt": f"Once {self._rng.random()}", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        reader, writer = await asyncio.open_connection(self._target.host, self._target.http_port)
        try:
            writer.write(wire.http_post("/v1/completions", json.dumps(body).encode(), self._target.host))
            async with asyncio.timeout(_CANCEL_AFTER_S * 10):
                await reader.readexactly(_FIRST_BYTES)
        finally:
            writer.transport.abort()
        return "OK"

    async def _constrained(self) -> str:
        """Send a constraint for the first time: the router examines it, and simulated workers follow none."""
        request = self._made(20, regex=f"[a-z]{{1,4}}-{self._rng.randrange(1 << 30)}")
        await streamed(self._target, request.SerializeToString())
        return "OK"

    async def _new_connection(self) -> str:
        async with open_channel(f"{self._target.host}:{self._target.grpc_port}") as channel:
            whole = pb.GenerateUnaryRequest(request=self._made(20))
            await rpc.InferenceServiceStub(channel).GenerateUnary(whole, timeout=30.0)
        return "OK"

    async def _admin(self) -> str:
        """Ask the admin plane of a router on a connection of its own."""
        async with self._suite.channel(self._rng.choice(self._suite.routers)) as channel:
            await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5.0)
        return "OK"
