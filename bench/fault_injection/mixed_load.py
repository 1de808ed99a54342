"""A mixed load on a running suite: good requests whose tokens are compared, and among them all kinds of others.

Of ten requests eight are good streams. The others go to /v1/messages; are cancelled, refused or no
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
from typing import Any, Final

import httpx
from grpc import aio

from bench.attack import wire
from bench.attack.kinds import Target, outcome, posted, streamed, unary
from bench.attack.victim import Victim
from bench.fault_injection.streams import RecordedReference, Reference, SimulatedReference, Stream, prompts
from common.rpc.server import open_channel
from gpuworker.simulated.tokens import SimulatedTokens, readable_ids
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.tokenizer import Tokenizer

_PATIENCE_S: Final = 240.0
_MOST_TOKENS: Final = 80
_MOST_GOOD: Final = 400
_WORDS: Final = 60
_OK: Final = 200
_WHOLE: Final = "max_tokens"


# Requests of the Messages API, streamed or not, whose text is compared with the one that must come.
# Only a gRPC client resumes by itself. Here an answer may end early with its router, which is not an error. The part
# that came must be right all the same.
class Messages:
    """Sends requests; `compared` counts answers whose text was compared, `differing` the tokens that were not right."""

    def __init__(self, client: httpx.AsyncClient, tokens: SimulatedTokens, model: Path, rng: random.Random) -> None:
        tokenizer = Tokenizer.load(model)
        assert tokenizer is not None
        self._client, self._tokens, self._tokenizer, self._rng = client, tokens, tokenizer, rng
        self.compared = self.differing = 0

    async def whole(self) -> str:
        """Ask for an answer as one body; return how it ended."""
        return await self._asked(stream=False)

    async def streamed(self) -> str:
        """Ask for an answer as events; return how it ended."""
        return await self._asked(stream=True)

    async def _asked(self, stream: bool) -> str:
        seed, count = self._rng.randrange(1 << 30), self._rng.randrange(1, _MOST_TOKENS)
        body = {
            "messages": [{"role": "user", "content": f"Tell me of number {self._rng.randrange(100)}."}],
            "max_tokens": count,
            "seed": seed,
            "stream": stream,
        }
        answer = Answer(stream)
        try:
            async with asyncio.timeout(_PATIENCE_S), self._client.stream("POST", "/v1/messages", json=body) as response:
                if response.status_code != _OK:
                    return f"HTTP_{response.status_code}"
                async for line in response.aiter_lines():
                    answer.take(line)
        except (httpx.HTTPError, TimeoutError) as error:
            answer.broken = type(error).__name__
        if not answer.begun:
            return answer.broken or "empty"
        self.compared += 1
        if differing := self._differing(answer, seed, count):
            self.differing += differing
            print(f"  {differing} of {count} tokens of a message differ: {answer.text[:_WORDS]!r}", flush=True)
        return answer.broken or ("OK" if answer.reason else "ended early")

    def _differing(self, answer: Answer, seed: int, count: int) -> int:
        """Return how many tokens are not those that must come; missing ones count where the answer ended."""
        ids = self._tokens.expected(seed, answer.prompt_tokens, count)
        texts = [self._tokenizer.decode(ids[:end]) for end in range(1, count + 1)]
        if not answer.reason:  # its end is missing
            return int(not texts[-1].startswith(answer.text))
        right = sum(map(answer.text.startswith, texts))
        wrong_end = answer.text != texts[-1] or answer.reason != _WHOLE or answer.output_tokens != count
        return max(count - right, int(wrong_end))


class Answer:
    """What has come of one answer. `begun` is whether the number of its prompt's tokens has."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self.text = self.reason = self.broken = ""
        self.begun, self.prompt_tokens, self.output_tokens = False, 0, 0

    def take(self, line: str) -> None:
        """Take a line of the body; a whole answer is one line."""
        if not self._streamed:
            self._whole(json.loads(line))
        elif line.startswith("data: "):
            self._event(json.loads(line.removeprefix("data: ")))

    def _whole(self, message: dict[str, Any]) -> None:
        self.begun = True
        self.text = "".join(block["text"] for block in message["content"])
        self._end(message["stop_reason"], message["usage"])

    def _event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self.begun = True
                self._count(event["message"]["usage"])
            case "content_block_delta":
                self.text += event["delta"]["text"]
            case "message_delta":
                self._end(event["delta"]["stop_reason"], event["usage"])
            case "error":
                self.broken = event["error"]["type"]

    def _end(self, reason: str, usage: dict[str, int]) -> None:
        self.reason = reason
        self._count(usage)

    def _count(self, usage: dict[str, int]) -> None:
        self.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        self.output_tokens = usage["output_tokens"]


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
        recorded: RecordedReference | None = None,
    ) -> None:
        """`channel` and `http` are for requests whose end does not count: they do not try again.

        Workers are simulated, unless `recorded` has the tokens of real ones. Then its prompts are asked alone, and no
        messages, whose text nobody knows.
        """
        self._target = Target(channel, suite.host, suite.grpc_port, suite.http_port, random.Random(seed))
        self._suite, self._clients, self._rng = suite, clients, random.Random(f"soak/{seed}")
        made = [[40 + self._rng.randrange(20)] * 48 + each for each in prompts(self._rng, PROMPTS)]
        self._prompts = made if recorded is None else recorded.prompts
        self._most_tokens = _MOST_GOOD if recorded is None else recorded.count
        checkpoint = read_checkpoint(model)
        self._tokens = SimulatedTokens(readable_ids(model, checkpoint.vocab_size, checkpoint.eos_token_ids))
        self._reference: Reference = recorded or SimulatedReference(self._tokens)
        self.messages = Messages(http, self._tokens, model, self._rng)
        self._numbers, self._open, self._running = itertools.count(), asyncio.Event(), 0
        self._open.set()
        messages = (("message", self.messages.whole), ("message_streamed", self.messages.streamed))
        self._others: tuple[tuple[str, Callable[[], Coroutine[object, object, str]]], ...] = (
            *(messages if recorded is None else ()),
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
        self.streams = self.broken = self.differing = self.cached = 0
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
        count = self._rng.randrange(1, self._most_tokens)
        stream = Stream(self._rng.randrange(1 << 30), self._rng.choice(self._prompts))
        await stream.run(client, count)
        self.streams += 1
        self.became["good broken" if stream.broken else "good OK"] += 1
        if stream.broken:
            self.broken += 1
            print(f"  a stream broke after {len(stream.tokens)} of {count} tokens: {stream.broken}", flush=True)
            return
        self.cached += stream.cached
        self.gaps.append(stream.longest_gap)
        if differing := stream.differing(self._reference, count):
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
