"""Innocent streams beside an attack: equal greedy requests whose tokens are compared with those of a quiet run.

Most speak gRPC, every fourth one HTTP. Each sends its request again when its stream has ended, until the attack is
over. A stream that does not end within `PATIENCE_S` counts as failed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from grpc import aio

from bench.attack.wire import http_post
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types

PATIENCE_S: Final = 60.0
_PROMPT_TOKENS: Final = 48
_FIRST_ID, _LAST_ID = 8, 200
_OVER_HTTP: Final = 4
_OK: Final = "OK"


@dataclass
class Streams:
    """What became of the streams: of each innocent its token lists, how many failed and why, and their times."""

    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return sum(map(len, self.tokens.values()))


class Innocents:
    """`count` clients of one router. Their prompts and seeds depend on their numbers alone."""

    def __init__(
        self, host: str, grpc_port: int, http_port: int, count: int, output_tokens: int, key: str = ""
    ) -> None:
        self._address, self._host, self._http_port = f"{host}:{grpc_port}", host, http_port
        self._count, self._output_tokens, self._key = count, output_tokens, key

    async def run(self, over: asyncio.Event | None = None) -> Streams:
        """Run each client's stream once, or again and again until `over` is set."""
        streams = Streams()
        async with open_channel(self._address) as channel:
            clients = (self._client(index, channel, over, streams) for index in range(self._count))
            await asyncio.gather(*clients)
        return streams

    async def _client(self, index: int, channel: aio.Channel, over: asyncio.Event | None, streams: Streams) -> None:
        prompt = random.Random(f"innocent/{index}").choices(range(_FIRST_ID, _LAST_ID), k=_PROMPT_TOKENS)
        first = True
        while first or (over is not None and not over.is_set()):
            first = False
            began = time.monotonic()
            ids: list[tuple[float, int]] = []
            ended = await self._stream(index, channel, prompt, ids)
            if ended != _OK:
                streams.failed[ended] += 1
                await asyncio.sleep(0.1)  # a refusal that comes at once is not to become a flood of its own
                continue
            streams.tokens.setdefault(index, []).append([token for _, token in ids])
            streams.first_tokens.append(ids[0][0] - began if ids else 0.0)
            streams.seconds.append(time.monotonic() - began)

    async def _stream(
        self, index: int, channel: aio.Channel, prompt: Sequence[int], ids: list[tuple[float, int]]
    ) -> str:
        """Run one stream; fill in its tokens with their times, and return how it ended."""
        speak = self._http if index % _OVER_HTTP == _OVER_HTTP - 1 else self._grpc
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await speak(index, channel, prompt, ids)
        except aio.AioRpcError as error:
            return error.code().name
        except TimeoutError:
            return "no end"
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
            return type(error).__name__

    async def _grpc(self, index: int, channel: aio.Channel, prompt: Sequence[int], ids: list[tuple[float, int]]) -> str:
        sampling = types.SamplingParams(
            temperature=0.0, max_tokens=self._output_tokens, ignore_eos=True, seed=1000 + index
        )
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling)
        metadata = [("authorization", f"Bearer {self._key}")] if self._key else []
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for event in stub.Generate(request, timeout=PATIENCE_S, metadata=metadata):
            ids.extend(zip(itertools.repeat(time.monotonic()), event.tokens.token_ids, strict=False))
        return _OK

    async def _http(self, index: int, _: aio.Channel, prompt: Sequence[int], ids: list[tuple[float, int]]) -> str:
        fields = {"temperature": 0, "max_tokens": self._output_tokens, "ignore_eos": True, "seed": 1000 + index}
        body = json.dumps(fields | {"prompt": list(prompt), "stream": True, "return_token_ids": True}).encode()
        reader, writer = await asyncio.open_connection(self._host, self._http_port)
        try:
            writer.write(http_post("/v1/completions", body, self._host, self._key))
            status = (await reader.readline()).split()[1].decode()
            if status != "200":
                return f"HTTP_{status}"
            return await self._events(reader, ids)
        finally:
            writer.close()

    async def _events(self, reader: asyncio.StreamReader, ids: list[tuple[float, int]]) -> str:
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return _OK
            event = json.loads(line[6:])
            if "error" in event:
                return "HTTP_ERROR_EVENT"
            tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            ids.extend(zip(itertools.repeat(time.monotonic()), tokens, strict=False))
        return "HTTP_CUT"


def differing(expected: Streams, found: Streams) -> int:
    """Return the tokens of ended streams that are not those of the quiet run, place by place, missing ones included."""
    total = 0
    for index, (quiet, *_) in expected.tokens.items():
        for tokens in found.tokens.get(index, ()):
            total += sum(a != b for a, b in itertools.zip_longest(quiet, tokens))
    return total
