"""`quire up`: the whole suite in the foreground, one readable line an event; Ctrl-C drains and stops it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text

from cli.stack import Stack, StackOptions
from common.config import flag_of, load_or_exit
from common.errors import QuireError
from common.options import BlockSize, Bytes, Count, DType, Fraction, Port, RedisUrl, Settings

_COLOURS = {"redis": "red", "kvmanager": "magenta", "router": "cyan"}
_TO_WORKERS = (
    *("kv_blocks", "kv_memory", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("long_prefill_cap", "device", "dtype", "load_format", "seed"),
)


class UpSettings(Settings):
    """options of the suite"""

    service: ClassVar[str] = "up"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("kv_blocks", "kv_memory", "gpu_memory_utilization"),)

    model: Path = Field(..., description="folder of the checkpoint to serve, in Hugging Face format")
    workers: Count = Field(1, description="GPU workers to start")
    manager: Literal["remote", "embedded"] = Field(
        "remote", description="KV manager as a service of its own, or inside each worker (for comparison)"
    )
    block_size: BlockSize = Field(16, description="slots in a block")
    kv_blocks: Count | None = Field(None, description="size of each worker's KV pool in blocks")
    kv_memory: Bytes | None = Field(None, description="size of each worker's KV pool in bytes, such as 4GiB")
    gpu_memory_utilization: float | None = Field(None, gt=0.0, le=1.0, description="share of a GPU's memory to use")
    max_model_len: Count | None = Field(None, description="longest prompt and output together")
    max_num_seqs: Count | None = Field(None, description="sequences in a step; unset: 256 on a GPU, 64 on a CPU")
    max_num_batched_tokens: Count = Field(2048, description="tokens in a step")
    long_prefill_cap: Count | None = Field(None, description="tokens of one prompt in a step")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: DType = Field("auto", description="type of weights and activations; auto: the checkpoint's own")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy makes random weights")
    seed: int = Field(0, description="seed of dummy weights")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(50051, description="gRPC port of the router")
    http_port: Port = Field(8000, description="HTTP port of the router: OpenAI-compatible API, /metrics, /health")
    manager_port: Port = Field(50052, description="gRPC port of the KV manager")
    worker_port: Port = Field(50053, description="gRPC port of the first worker; the others follow")
    redis_url: RedisUrl | None = Field(
        None, description="Redis to use; unset: one is started", json_schema_extra={"env": "REDIS_URL"}
    )
    state_dir: Path = Field(Path(".quire"), description="folder of files that outlive the processes")
    trace_sample_ratio: Fraction = Field(1.0, description="share of requests that are traced")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line shown")

    def stack_options(self) -> StackOptions:
        """Return the suite that these options describe."""
        shared = ("--log-level", self.log_level, "--trace-sample-ratio", str(self.trace_sample_ratio))
        worker_flags = [
            part
            for key in _TO_WORKERS
            if (value := getattr(self, key)) is not None
            for part in (flag_of(key), str(value))
        ]
        return StackOptions(
            model=self.model,
            workers=self.workers,
            block_size=self.block_size,
            embedded=self.manager == "embedded",
            host=self.host,
            port=self.port,
            http_port=self.http_port,
            manager_port=self.manager_port,
            worker_ports=tuple(range(self.worker_port, self.worker_port + self.workers)),
            redis_url=self.redis_url,
            state_dir=self.state_dir,
            worker_flags=(*shared, *worker_flags),
            router_flags=(*shared, "--load-format", self.load_format),
            manager_flags=shared,
        )


class Lines:
    """Prints what the processes say: time, who, what."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()

    def __call__(self, name: str, line: str) -> None:
        text = Text(f"{time.monotonic() - self._began:8.2f}s  ", style="dim")
        text.append(f"{name:<10}", style=_COLOURS.get(name, "green"))
        text.append(line)
        self._console.print(text, soft_wrap=True)


async def run(options: StackOptions, say: Lines) -> None:
    """Run the suite until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(_start_and_wait(options, say, stop))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        say("quire", "stopping: draining the router, then the workers")
        starting.cancel()
    stopped.cancel()
    await asyncio.gather(starting, return_exceptions=starting.cancelled() or stop.is_set())
    say("quire", "stopped")


async def _start_and_wait(options: StackOptions, say: Lines, stop: asyncio.Event) -> None:
    async with Stack(options, say) as stack:
        say("quire", f"ready: gRPC {stack.address}, HTTP {stack.http_url}; Ctrl-C stops")
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    """Run `quire up`."""
    settings = load_or_exit(UpSettings, argv, prog="quire up")
    say = Lines(Console(highlight=False))
    try:
        asyncio.run(run(settings.stack_options(), say))
    except QuireError as error:
        say("quire", str(error))
        return 1
    return 0
