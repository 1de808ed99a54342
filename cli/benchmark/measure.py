"""Runs `quire bench`: a suite as `quire serve` starts it, the planned runs, then a second suite for each alternative.

The suites of a comparison take turns, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc
import psutil

from cli.benchmark.advice import Alternative, Comparison, Setting, advise, alternatives
from cli.benchmark.closed_loop import Record, decode_rate
from cli.benchmark.limits import Measured, limits
from cli.benchmark.machine import machine, read_rate
from cli.benchmark.plan import (
    DECODE_PROMPT,
    MOST_REPEATS,
    PROMPTS,
    Capacity,
    FirstRequest,
    LeftOut,
    Plan,
    Run,
    compared_run,
    plan,
    seconds_of_comparison,
    slots_in,
)
from cli.benchmark.report import Figure, Report
from cli.benchmark.requests import equal_requests
from cli.benchmark.served import FIRST_WORKER, MIB, ServedSuite, served_suite
from common.contracts.errors import DeadlineExceeded, QuireError, Unavailable
from common.process.cores import usable_cores
from common.settings.config import load
from gpuworker.config import GpuWorkerSettings
from quire.api.status import error_from_rpc
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.workers.codec import facts_from_proto

STOP_SECONDS: Final = 8.0
"""Kept of the time for stopping."""
_FIRST_OUTPUT: Final = 8
_SECOND_TRY_SECONDS: Final = 3.0
_PATH: Final = re.compile(r"runs on (the native \w+ path|transformers)")
_NATIVE: Final = "the native CPU path"
_READ_BYTES: Final = 256 << 20
_COPY_SLACK: Final = 1.15


Stage = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to measure: the model, the flags of `quire serve` for it, the seconds for everything."""

    model: str
    flags: tuple[str, ...]
    seconds: float
    compare: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """The flags of the suite, which runs as `quire serve` does, TLS between its services included."""
        return ("--no-insecure", "--model", self.model, "--drain-timeout", "1", *self.flags)


@dataclass(frozen=True, slots=True)
class Served:
    """A running suite, its capacity and its settings."""

    suite: ServedSuite
    capacity: Capacity
    setting: Setting
    vocabulary: int
    weight_bytes: int
    dtype: str
    path: str
    # Tokens that the pool holds in sequences as long as the longest prompt.
    longest_slots: int

    @staticmethod
    def of(suite: ServedSuite, worker: pb.GetWorkerResponse, path: str) -> Served:
        info, program = worker.info, suite.worker_program
        settings = load(GpuWorkerSettings, program.flags, {**os.environ, **program.environment})
        setting = Setting(
            device=info.device,
            native=path == _NATIVE,
            quantization=settings.quantization,
            threads=settings.threads or 1,
            cores=usable_cores(),
            kv_dtype=info.identity.kv_geometry.dtype,
            block_size=info.identity.block_size,
        )
        pool = facts_from_proto(info).capacity
        # Short sequences take most pages a token.
        capacity = Capacity(info.max_model_len, info.max_num_seqs, slots_in(pool, pool.block_size))
        weights, longest = worker.memory.weights, slots_in(pool, min(max(PROMPTS), info.max_model_len))
        return Served(suite, capacity, setting, info.vocab_size, weights, info.dtype, path, longest)

    def words(self, wish: Wish) -> dict[str, str | int | float]:
        """Return the description of model and suite for the report."""
        return {
            "model": wish.model,
            "path": self.path,
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
            "kv_slots": self.capacity.slots,
            "max_model_len": self.capacity.max_model_len,
            "start_s": round(self.suite.start_seconds, 3),
            "worker_rss_mib": round(self.suite.peak_rss()[FIRST_WORKER], 1),
        }


@dataclass(slots=True)
class Bench:
    """One run of `quire bench`. `stage` gets what happens now, and which turn of it."""

    wish: Wish
    stage: Stage
    figures: list[Figure] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    busy: tuple[int, float] | None = None
    _began: float = field(default_factory=time.monotonic)
    _path: str = ""
    _starting: bool = False

    def left(self) -> float:
        """Return the seconds until the suites must be stopped."""
        return self.wish.seconds - STOP_SECONDS - (time.monotonic() - self._began)

    async def report(self) -> Report:
        """Measure everything. Raises Unavailable, with the reason, when the model is not served in time."""
        self.stage("checking the options", "")
        async with served_suite(self.wish.options, self._hear, self.left()) as suite:
            served = Served.of(suite, await suite.worker(), self._path)
            reading = await self._read_rate(served.setting)
            first = await self._first(served)
            await self._run_all(served, plan(served.capacity, first, self.left()))
            if self.wish.compare:
                await self._compare_all(served, first)
            words = served.words(self.wish)
            self.stage("stopping", "")
        return self._report(served, words, reading)

    def _hear(self, _: str, line: str) -> None:
        """Note that the suite starts, and which way the model runs."""
        if not self._starting:
            self._starting = True
            self.stage("starting the suite", "")
        if not self._path and (found := _PATH.search(line)):
            self._path = found[1]

    def _report(self, served: Served, words: dict[str, str | int | float], reading: float | None) -> Report:
        speeds = {each.run.streams: each.median for each in self.figures if each.run.kind == "streams"}
        measured = Measured(
            read_rate=reading,
            weight_bytes=served.weight_bytes,
            one_stream=speeds.get(1),
            cores=served.setting.cores,
            cores_busy=None if self.busy is None else self.busy[1],
            busy_streams=0 if self.busy is None else self.busy[0],
            slots=served.longest_slots,
            max_model_len=served.capacity.max_model_len,
            max_num_seqs=served.capacity.max_num_seqs,
        )
        found = limits(measured)
        blocks_bind = any(each.binds for each in found if each.name == "KV blocks")
        return Report(
            machine=machine(),
            served=words,
            setting=served.setting,
            figures=tuple(self.figures),
            limits=tuple(found),
            comparisons=tuple(self.comparisons),
            advice=tuple(advise(served.setting, self.comparisons, blocks_bind)),
            left_out=tuple(self.left_out),
            seconds=time.monotonic() - self._began,
        )

    # ------------------------------------------------------------ the suite's figures

    async def _read_rate(self, setting: Setting) -> float | None:
        """Return how fast memory is read while the suite idles; None on a device with memory of its own."""
        if not setting.on_cpu:
            return None
        self.stage("reading memory", "")
        size = min(_READ_BYTES, psutil.virtual_memory().available // 8)
        return await asyncio.to_thread(read_rate, setting.threads, size)

    async def _first(self, served: Served) -> FirstRequest:
        """Return the times of a first request; of a second one where the first, which finds all cold, is quick."""
        prompt = max(1, min(DECODE_PROMPT, served.capacity.max_model_len // 2))
        output = max(2, min(_FIRST_OUTPUT, served.capacity.max_model_len - prompt))
        run, began = Run("streams", 1, prompt, output, 1, 0.0), time.monotonic()
        self.stage("a first request", "")
        records = await self._in_time(served, run, "first")
        if records is not None and time.monotonic() - began < _SECOND_TRY_SECONDS:
            records = await self._in_time(served, run, "second")
        if records is None:
            what = f"the first request ({prompt} tokens and {output} more)"
            raise DeadlineExceeded(f"{what} did not end within {self.wish.seconds:g} s; give more with --seconds")
        return FirstRequest.seen(prompt, records[0].submitted, records[0].times)

    async def _run_all(self, served: Served, planned: Plan) -> None:
        self.left_out += planned.left_out
        for run in planned.runs:
            values = await self._repeat(served, run)
            if values:
                self.figures.append(Figure(run, tuple(values)))

    async def _repeat(self, served: Served, run: Run) -> list[float]:
        """Return the value of each repeat: as many as are planned, and more while the planned time lasts."""
        values: list[float] = []
        began, longest = time.monotonic(), 0.0
        while len(values) < run.repeats or (
            len(values) < MOST_REPEATS and time.monotonic() - began + longest < run.seconds
        ):
            self.stage(run.name, f"turn {len(values) + 1}")
            turn = time.monotonic()
            value = await self._value(served, run, f"{run.kind}-{run.streams}-{run.prompt}-{len(values)}")
            if value is None:
                break
            values.append(value)
            longest = max(longest, time.monotonic() - turn)
        return values

    async def _value(self, served: Served, run: Run, salt: str) -> float | None:
        """Return tokens a second, or seconds to the first token; None when the time is over."""
        busy = served.suite.cpu_seconds() + time.process_time()
        began = time.perf_counter()
        records = await self._in_time(served, run, salt)
        if records is None:
            self.left_out.append(LeftOut(run.name, "did not end in time"))
            return None
        if run.kind == "ttft":
            return records[0].first_token
        busy = served.suite.cpu_seconds() + time.process_time() - busy
        self.busy = max(self.busy or (0, 0.0), (run.streams, busy / (time.perf_counter() - began)))
        return decode_rate(records)

    async def _in_time(self, served: Served, run: Run, salt: str) -> list[Record] | None:
        """Return what the requests of a run saw, or None when the time is over."""
        workload = equal_requests(run.streams, run.prompt, run.output, seed=1, vocabulary=served.vocabulary)
        try:
            async with asyncio.timeout(max(0.0, self.left())):
                _, records = await served.suite.run(workload, salt)
        except TimeoutError:
            return None
        except ExceptionGroup as failed:
            raise _cause(failed) from failed
        return list(records.values())

    # ------------------------------------------------------------ alternatives

    async def _compare_all(self, served: Served, first: FirstRequest) -> None:
        run = compared_run(served.capacity, first)
        needed = seconds_of_comparison(run, first, served.suite.start_seconds)
        for each in alternatives(served.setting):
            why = self._why_not(served, needed)
            if not why:
                self.stage(f"comparing {each.words}", "")
                why = await self._compare(served, each, run)
            if why:
                self.left_out.append(LeftOut(each.words, why))

    def _why_not(self, served: Served, needed: float) -> str:
        """Return why no further suite is started; empty if one is."""
        if self.left() < needed:
            return f"takes up to {needed:.0f} s, and {max(0.0, self.left()):.0f} s are left"
        copy = _COPY_SLACK * served.suite.peak_rss()[FIRST_WORKER]
        free = psutil.virtual_memory().available / MIB
        if free < copy:
            return f"a second worker takes about {copy:,.0f} MiB, and {free:,.0f} are free"
        return ""

    async def _compare(self, served: Served, alternative: Alternative, run: Run) -> str:
        """Measure an alternative; return why that was impossible, or nothing."""
        try:
            async with (
                asyncio.timeout(self.left()),
                served_suite((*self.wish.options, *alternative.flags), ready_seconds=self.left()) as suite,
            ):
                other = Served.of(suite, await suite.worker(), served.path)
                comparison = await self._in_turns(served, other, alternative, run)
        except TimeoutError:
            return "did not end in time"
        except QuireError as error:
            return _last_line(error)
        if comparison is None:
            return "did not end in time"
        self.comparisons.append(comparison)
        return ""

    async def _in_turns(self, served: Served, other: Served, alternative: Alternative, run: Run) -> Comparison | None:
        speeds: dict[int, list[float]] = {0: [], 1: []}
        pair = (served, other)
        for turn in range(run.repeats + 1):  # the first one fills the prefix caches
            for which in (0, 1) if turn % 2 else (1, 0):
                records = await self._in_time(pair[which], run, "compared")
                if records is None:
                    return None
                if turn:
                    speeds[which].append(decode_rate(records))
        room = other.capacity.slots / served.capacity.slots if alternative.option == "kv_cache_dtype" else 1.0
        return Comparison(alternative, tuple(speeds[0]), tuple(speeds[1]), room)


def _cause(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of the first request that failed."""
    first: BaseException = failed
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return error_from_rpc(first) if isinstance(first, grpc.aio.AioRpcError) else first


def _last_line(error: QuireError) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "failed")


async def measure(wish: Wish, stage: Stage) -> Report:
    """Return what a machine gets with a model. Raises QuireError, with the reason, when it cannot be measured."""
    try:
        return await Bench(wish, stage).report()
    except TimeoutError:
        raise Unavailable(f"{wish.model} is not served within {wish.seconds:g} s; give more with --seconds") from None
