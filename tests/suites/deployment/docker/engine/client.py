"""A client in a container of the router's image: one request by gRPC and by HTTP, or many until SIGTERM.

`client.py HOST once` sends one of each kind. `client.py HOST load` sends many at once and reports a JSON line several
times a second. It has bare stubs and no retries: a stream that breaks is seen to break. Prompts are few and greedy, so
every later answer to one must equal the first. It does not matter which worker made it, or what stopped meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types

STREAMS: Final = 12
TOKENS: Final = 1200
REPORT_SECONDS: Final = 0.25
GRPC_PORT, HTTP_PORT = 50051, 8000
_LENGTH: Final = types.FINISH_REASON_LENGTH


@dataclass(slots=True)
class Tally:
    """What happened so far. `failed`: a status or no end; `wrong`: other tokens than the first answer had."""

    finished: int = 0
    failed: int = 0
    wrong: int = 0
    running: int = 0
    tokens: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def line(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def request(number: int) -> pb.GenerateRequest:
    """Return one of STREAMS prompts."""
    text = f"Tell me about number {number % STREAMS}, then about the next one."
    sampling = types.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return pb.GenerateRequest(prompt=pb.Prompt(text=text), sampling=sampling)


async def ask(stub: rpc.InferenceServiceStub, asked: pb.GenerateRequest) -> tuple[str, list[int], pb.Finished]:
    """Return the worker that answered, the output tokens, and how the stream ended."""
    worker, tokens, finished = "", list[int](), pb.Finished()
    async for event in stub.Generate(asked, timeout=120.0):
        match event.WhichOneof("event"):
            case "admitted":
                worker = event.admitted.worker_id
            case "tokens":
                tokens += event.tokens.token_ids
            case "finished":
                finished = event.finished
    return worker, tokens, finished


async def stream_after_stream(
    stub: rpc.InferenceServiceStub, number: int, tally: Tally, stop: asyncio.Event, first: dict[int, list[int]]
) -> None:
    """Ask for the same prompt again and again until `stop`."""
    while not stop.is_set():
        tally.running += 1
        try:
            worker, tokens, finished = await ask(stub, request(number))
        except grpc.aio.AioRpcError as error:
            tally.failed += 1
            tally.errors = [*tally.errors, f"{error.code().name}: {error.details()}"][-5:]
            continue
        finally:
            tally.running -= 1
        if finished.reason != _LENGTH or len(tokens) != TOKENS:
            tally.failed += 1
            tally.errors = [*tally.errors, f"{len(tokens)} tokens, finish reason {finished.reason}"][-5:]
            continue
        tally.finished += 1
        tally.tokens += len(tokens)
        tally.by_worker[worker] += 1
        tally.wrong += tokens != first.setdefault(number, tokens)


async def load(host: str) -> None:
    """Keep STREAMS streams going until SIGTERM, then let them finish; lines of JSON report the progress."""
    stop, tally, first = asyncio.Event(), Tally(), dict[int, list[int]]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with grpc.aio.insecure_channel(f"{host}:{GRPC_PORT}") as channel:
        stub = rpc.InferenceServiceStub(channel)
        streams = [
            asyncio.create_task(stream_after_stream(stub, number, tally, stop, first)) for number in range(STREAMS)
        ]
        everything = asyncio.gather(*streams)
        while not everything.done():
            print(tally.line(), flush=True)  # noqa: T201
            await asyncio.wait([everything], timeout=REPORT_SECONDS)
        await everything
    print(tally.line(), flush=True)  # noqa: T201


async def once(host: str) -> None:
    """Ask once by each API; print both answers as a line of JSON."""
    sampling = types.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), sampling=sampling)
    async with grpc.aio.insecure_channel(f"{host}:{GRPC_PORT}") as channel:
        worker, tokens, finished = await ask(rpc.InferenceServiceStub(channel), asked)
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "quire-demo", "messages": messages, "temperature": 0, "max_completion_tokens": 8}
    url = f"http://{host}:{HTTP_PORT}/v1/chat/completions"
    http = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer: dict[str, Any] = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(http, timeout=60.0)))
    reason = types.FinishReason.Name(finished.reason)
    message = answer["choices"][0]["message"]["content"]
    print(json.dumps({"worker": worker, "tokens": len(tokens), "reason": reason, "http": message}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run({"load": load, "once": once}[sys.argv[2]](sys.argv[1]))
