"""A KV manager's two workers as processes, of which the second one fetches what the first one has; and their client.

Each worker has one thread, and takes every fetch to pay (`peer_worker.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from grpc import aio

from bench.lib.checkpoints import MEDIUM, SMALL
from bench.lib.harness import parser, progress
from bench.lib.workers import manager_process
from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, root_digest
from common.contracts.types import BlockHash, PoolIdentity
from common.process import die_with_parent
from common.process.ports import free_ports
from common.process.python import module_command
from common.rpc.server import open_channel
from common.wire.identity_codec import identity_from_proto
from common.wire.packing import pack_hashes, unpack_u32
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from quire.types.v1 import types_pb2 as types

BLOCK_SIZE: Final = 16
TAIL: Final = 8
"""Tokens of each prompt that no other one has."""
SHAPES: Final = {"small": SMALL, "128m": MEDIUM}
_LEAST_PRIORITY: Final = 19
_VOCABULARY: Final = 2000
_SOME: Final = 4
"""Tokens after which a stream counts as running."""
_PATIENCE: Final = 600.0


@dataclass(slots=True)
class Answer:
    """When each token of a sequence came, in seconds of its submission, and how many prompt tokens were cached.

    `began` is a reading of time.perf_counter.
    """

    began: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    runs: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the gaps between tokens that end between two readings of time.perf_counter, without the first one."""
        pairs = zip(self.times[1:], self.times[2:], strict=False)
        return [later - earlier for earlier, later in pairs if later > earlier and start < self.began + later < end]


class Process:
    """One worker process, and what it said last of its costs."""

    def __init__(self, folder: Path, name: str, manager: str, flags: Sequence[str]) -> None:
        port, metrics = free_ports(2)
        self.name, self.address, self.costs = name, f"127.0.0.1:{port}", (0.0, 0.0)
        words = ["--worker-id", name, "--port", str(port), "--metrics-port", str(metrics), "--manager", manager]
        words += ["--model", str(folder), "--load-format", "dummy", "--block-size", str(BLOCK_SIZE), "--threads", "1"]
        words += ["--data-port", "0", "--log-level", "warning", "--trace-sample-ratio", "0", *flags]
        command = die_with_parent.command(module_command("bench.lib.peer_worker", *words))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("COSTS "):
                compute, per_block = map(float, line.split()[1:])
                self.costs = compute, per_block

    def yield_processors(self) -> None:
        """Let all threads of the worker run only where nothing else does."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _LEAST_PRIORITY)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


class Worker:
    """The client's end of a worker's stream."""

    def __init__(self, process: Process, stub: rpc.GpuWorkerServiceStub, identity: PoolIdentity) -> None:
        self.process, self._call = process, stub.Stream()
        self._root = root_digest(identity.model_fingerprint, identity.tokenizer_fingerprint, BLOCK_SIZE, b"")
        self._answers = dict[int, Answer]()
        self._ends = dict[int, asyncio.Future[Answer]]()
        self._reader: asyncio.Task[None] | None = None
        self._writes = asyncio.Lock()

    def block_hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return [block_hash_of(digest) for digest in block_digests(self._root, tokens, BLOCK_SIZE)]

    async def open(self) -> None:
        await self._call.write(pb.StreamRequest(hello=pb.Hello(router_id="bench")))
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            now, outputs = time.perf_counter(), response.outputs
            assert not response.HasField("refused"), response.refused
            counts, sampled = iter(unpack_u32(outputs.counts)), iter(unpack_u32(outputs.token_ids))
            for handle in unpack_u32(outputs.handles):
                new = [next(sampled) for _ in range(next(counts))]
                self._answers[handle].tokens += new
                self._answers[handle].times += [now - self._answers[handle].began] * len(new)
                if len(self._answers[handle].times) > _SOME:
                    self._answers[handle].runs.set()
            for admitted in outputs.admitted:
                self._answers[admitted.handle].cached = admitted.cached_tokens
            for end in outputs.finished:
                self._ends[end.handle].set_result(self._answers[end.handle])

    async def answer(self, tokens: Sequence[int], count: int, name: str, runs: asyncio.Event | None = None) -> Answer:
        """Run a greedy sequence of so many tokens to its end; `runs` is set once it has some."""
        handle = len(self._answers) + 1
        digests = block_digests(self._root, tokens, BLOCK_SIZE)
        message = pb.Submit(
            handle=handle,
            request_id=name,
            prompt_token_ids=little_endian_int32(tokens),
            block_hashes=pack_hashes(map(block_hash_of, digests)),
            parent_digest=digests[-1] if digests else self._root,
            sampling=types.SamplingParams(
                temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=count, ignore_eos=True
            ),
        )
        self._ends[handle] = asyncio.get_running_loop().create_future()
        self._answers[handle] = Answer(time.perf_counter(), runs=runs or asyncio.Event())
        async with self._writes:  # gRPC takes one at a time
            await self._call.write(pb.StreamRequest(submit=message))
        async with asyncio.timeout(_PATIENCE):
            return await self._ends[handle]


@dataclass(frozen=True, slots=True)
class Fetch:
    """What the manager's grant says of a fetch, and what it had expected of one, in seconds."""

    blocks: int
    seconds: float
    expected: float


@dataclass
class Pair:
    """Both workers, and their manager."""

    source: Worker
    destination: Worker
    records: decision_pb2_grpc.DecisionServiceStub
    manager: kvmanager_pb2_grpc.KvManagerServiceStub
    fetches: list[Fetch] = field(default_factory=list)
    asked: int = 0

    def prompt(self, length: int) -> list[int]:
        """Return a prefix that nobody has."""
        self.asked += 1
        rng = random.Random(f"prefix/{self.asked}")
        return [rng.randrange(3, _VOCABULARY) for _ in range(length)]

    async def fetched(self, prefix: list[int]) -> float:
        """Return the TTFT of a prompt whose prefix the source has. Raises AssertionError where it was not fetched."""
        name = f"fetched-{self.asked}-{len(self.fetches)}"
        answer = await self.destination.answer([*prefix, *self.prompt(TAIL)], 1, name)
        query = decision_pb2.ListDecisionsRequest(request_id=name, kind="grant")
        (grant,) = (await self.records.ListDecisions(query, timeout=_PATIENCE)).decisions
        blocks, whole = round(grant.figures["fetched_blocks"]), len(prefix) // BLOCK_SIZE
        assert (blocks, answer.cached) == (whole, whole * BLOCK_SIZE), f"{blocks} of {whole} blocks were fetched"
        self.fetches.append(Fetch(blocks, grant.figures["fetch_seconds"], grant.figures["fetch_predicted"]))
        return answer.times[0]

    async def computed(self, length: int) -> float:
        """Return the TTFT of a prompt that nobody has. Raises AssertionError where something was cached."""
        answer = await self.destination.answer(self.prompt(length + TAIL), 1, f"computed-{self.asked}")
        assert answer.cached == 0, "nobody has this prefix"
        return answer.times[0]

    async def have(self, length: int) -> list[int]:
        """Let the source compute a prefix, and return it once the manager knows."""
        prefix = self.prompt(length)
        await self.source.answer([*prefix, 1], 1, f"source-{self.asked}")
        hashes = pack_hashes(self.source.block_hashes(prefix))
        query = kvmanager_pb2.LookupRequest(block_hashes=hashes, num_tokens=length + TAIL, worker_id="source")
        async with asyncio.timeout(_PATIENCE):
            while (await self.manager.Lookup(query)).matches[0].hit_blocks < length // BLOCK_SIZE:  # noqa: ASYNC110 - over gRPC
                await asyncio.sleep(0.005)
        return prefix


async def _until_attached(manager: kvmanager_pb2_grpc.KvManagerServiceStub) -> None:
    """Wait until the manager has both workers."""
    async with asyncio.timeout(_PATIENCE):
        while len((await manager.GetPool(kvmanager_pb2.GetPoolRequest())).pools) < 2:  # noqa: ASYNC110 - over gRPC
            await asyncio.sleep(0.05)


async def _until_serving(stub: rpc.GpuWorkerServiceStub) -> pb.WorkerInfo:
    """Return what a worker is, once it serves and a manager has it."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                found = await stub.GetWorker(pb.GetWorkerRequest(), timeout=_PATIENCE, wait_for_ready=True)
            except aio.AioRpcError:
                await asyncio.sleep(0.2)
            else:
                return found.info


@contextmanager
def _checkpoint(shape: dict[str, object]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        yield Path(folder)


@asynccontextmanager
async def running(manager: str, shape: str, dtype: str, longest: int, blocks: int) -> AsyncIterator[Pair]:
    """Run two workers of a manager, whose pools have so many blocks, and host memory twice as much."""
    model = {**SHAPES[shape], "max_position_embeddings": max(longest, 2048)}
    flags = ["--dtype", dtype, "--kv-blocks", str(blocks), "--max-model-len", str(longest), "--max-num-seqs", "8"]
    flags += ["--host-memory", "2GiB"]
    with ExitStack() as processes:
        folder = processes.enter_context(_checkpoint(model))
        made = [Process(folder, name, manager, flags) for name in ("source", "destination")]
        for each in made:
            processes.callback(each.stop)
        async with AsyncExitStack() as channels:
            workers = []
            for each in made:
                stub = rpc.GpuWorkerServiceStub(await channels.enter_async_context(open_channel(each.address)))
                info = await _until_serving(stub)
                workers.append(Worker(each, stub, identity_from_proto(info.identity)))
                await workers[-1].open()
            channel = await channels.enter_async_context(open_channel(manager))
            source, destination = workers
            pools = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            await _until_attached(pools)
            yield Pair(source, destination, decision_pb2_grpc.DecisionServiceStub(channel), pools)


async def times_to_first_token(pair: Pair, length: int, pairs: int) -> tuple[list[float], list[float]]:
    """Return TTFTs of fetched and of computed prefixes of a length, in interleaved pairs of alternating order."""
    fetched, computed = list[float](), list[float]()
    for index in range(pairs):
        prefix = await pair.have(length)
        for which in ("fetched", "computed") if index % 2 else ("computed", "fetched"):
            if which == "fetched":
                fetched.append(await pair.fetched(prefix))
            else:
                computed.append(await pair.computed(length))
        progress(f"{length} tokens: pair {index + 1} of {pairs}", end=index + 1 == pairs)
    return fetched, computed


def pair_flags(doc: str | None, lengths: str, pairs: str, rounds: str) -> argparse.ArgumentParser:
    """Return flags of a benchmark of such workers; `pairs` and `rounds` say what it counts by these."""
    flags = parser(doc)
    flags.add_argument("--lengths", default=lengths, help="tokens of the prefixes")
    flags.add_argument("--pairs", type=int, default=5, help=pairs)
    flags.add_argument("--rounds", type=int, default=5, help=rounds)
    flags.add_argument("--shape", choices=SHAPES, default="128m", help="the model: a small one, or one of 128 M")
    flags.add_argument("--dtype", default="bfloat16", help="type of weights and of K and V")
    return flags


def measured(
    args: argparse.Namespace, beyond: int, measure: Callable[[Pair, list[int]], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    """Return the figures that `measure` finds at two workers, for sequences `beyond` tokens longer than any prefix."""
    lengths = [int(each) for each in args.lengths.split(",")]
    longest = max(lengths) + beyond

    async def run(manager: str) -> dict[str, float]:
        async with running(manager, args.shape, args.dtype, longest, 4 * -(-longest // BLOCK_SIZE) + 256) as pair:
            return await measure(pair, lengths)

    with manager_process(BLOCK_SIZE) as (manager, _):
        return asyncio.run(run(manager))
