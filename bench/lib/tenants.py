"""A suite with tenants for benchmarks: simulated workers, a key for each tenant, requests that show it."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from cli.demo_model import CHECKPOINT
from cli.suite.preflight import suite_options
from cli.suite.stack import Stack, free_ports
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types
from router.tenants.keys import hash_of, new_key

REQUEST_SECONDS = 600.0
_IDS = range(100, 400)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client can measure: seconds to the first token, cached tokens of the prompt, output tokens."""

    first_token: float
    cached_tokens: int
    tokens: int


class Tenant:
    """A client with a key, on a connection of its own."""

    def __init__(self, channel: aio.Channel, key: str) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def ask_whole(self, prompt: Sequence[int], max_tokens: int, sequences: int) -> int:
        """Make one request that is answered as a whole, which costs little; return its output tokens."""
        whole = pb.GenerateUnaryRequest(request=_request(prompt, max_tokens, sequences))
        answer = await self._stub.GenerateUnary(whole, timeout=REQUEST_SECONDS, metadata=self._metadata)
        return sum(len(output.token_ids) for output in answer.outputs)

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Stream one request of one sequence to its end."""
        request = _request(prompt, max_tokens, 1)
        began, first, cached, tokens = time.perf_counter(), 0.0, 0, 0
        async for event in self._stub.Generate(request, timeout=REQUEST_SECONDS, metadata=self._metadata):
            if event.HasField("admitted"):
                cached = event.admitted.cached_tokens
            elif event.HasField("tokens"):
                first = first or time.perf_counter() - began
                tokens += len(event.tokens.token_ids)
        return Answer(first, cached, tokens)


def _request(prompt: Sequence[int], max_tokens: int, sequences: int) -> pb.GenerateRequest:
    sampling = types.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=sequences)
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling)


def write_tenants(file: Path, tables: Mapping[str, str]) -> dict[str, str]:
    """Write a file of tenants; `tables` are lines of TOML by tenant. Return a new key of each."""
    keys = {name: new_key() for name in tables}
    file.write_text("".join(f'[tenants.{n}]\nkeys = ["{hash_of(keys[n])}"]\n{tables[n]}\n' for n in tables))
    return keys


@asynccontextmanager
async def tenants_on_suite(options: Sequence[str], tables: Mapping[str, str]) -> AsyncIterator[dict[str, Tenant]]:
    """Run a suite of simulated workers, and a client for each tenant; `tables` are lines of TOML by tenant."""
    ports = free_ports(4)
    names = ("--grpc-port", "--port", "--manager-port", "--worker-port")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        file = Path(folder) / "tenants.toml"
        keys = write_tenants(file, tables)
        flags = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
        flags += ["--model", str(CHECKPOINT), "--state-dir", folder, "--tenants", str(file), "--log-level", "warning"]
        async with Stack(suite_options([*options, *flags], os.environ), lambda _name, _line: None) as stack:
            channels = {name: open_channel(stack.address) for name in tables}
            try:
                yield {name: Tenant(channels[name], key) for name, key in keys.items()}
            finally:
                await asyncio.gather(*(channel.close() for channel in channels.values()))


class Prompts:
    """Prompts that differ from each other."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def new(self, tokens: int) -> list[int]:
        return self._rng.choices(_IDS, k=tokens)
