"""Other engines as processes: each driver loads its engine once, prints READY, and answers WORKLOAD SCALE with figures.

A peers folder has a virtual environment, `hf`, `ov` or `vllm`, and the drivers that run in it. `bench_naive.py` runs
transformers' generate on static batches, `bench_hfcb.py` transformers' continuous batching. `bench_openvino.py` and
`bench_vllm.py` run the engines that they name. It also has the checkpoint, which both the peers and Quire load. A
checkpoint with a text (`TEXT`) is run on passages of it, in place of random tokens.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from common.contracts.errors import Unavailable
from common.process import die_with_parent

TEXT: Final = "text.json"
"""The file in a checkpoint's folder with a text for its workloads, as token ids."""
READY_SECONDS: Final = 400.0
RUN_SECONDS: Final = 1800.0
_END_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 0.5
_SHOWN_BYTES: Final = 2000
_LONGEST_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """A driver, its environment, and whether it has a prefix cache."""

    environment: str
    driver: str
    caches: bool = True


PEERS: Final = {
    "naive": Peer("hf", "bench_naive.py", caches=False),
    "hf-cb": Peer("hf", "bench_hfcb.py"),
    "openvino": Peer("ov", "bench_openvino.py"),
    "vllm": Peer("vllm", "bench_vllm.py"),
}


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The options of a driver. `model` is a folder below `folder`; `scratch` takes its errors and outputs."""

    folder: Path
    scratch: Path
    model: str = "model"
    dtype: str = "float32"
    prefix_caching: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the flags of a driver; sizes are those of `bench.lib.flags.worker_options`."""
        caching = "on" if self.prefix_caching else "off"
        text = self.folder / self.model / TEXT
        return (
            *(("--text", str(text)) if text.is_file() else ()),
            *("--stdin", "--model", self.model, "--dtype", self.dtype, "--prefix-caching", caching),
            *("--kv-gib", "1", "--max-seqs", "64", "--max-batched-tokens", "2048"),
        )


class PeerProcess:
    """One loaded engine; between its runs it is stopped (SIGSTOP), so that it takes no time from the others.

    `start_seconds` is from its first instruction to READY, which follows a few requests that warm it up.
    """

    def __init__(self, name: str, options: PeerOptions) -> None:
        self.name, self.options = name, options
        self.start_seconds = 0.0
        self._errors = options.scratch / f"{name}.err"
        self._outputs = options.scratch / f"{name}.json"
        self._first: dict[str, list[int]] | None = None
        self._seen: set[psutil.Process] = set()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> PeerProcess:
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def run(self, workload: str, scale: float) -> dict[str, Any]:
        """Run a share of a workload; return the driver's figures.

        Raises Unavailable, with the driver's last lines, if it ends or prints nothing for RUN_SECONDS.
        """
        process = self._running()
        assert process.stdin is not None
        self._signal(signal.SIGCONT)
        process.stdin.write(f"{workload} {scale:g}\n".encode())
        try:
            async with asyncio.timeout(RUN_SECONDS):
                line = await self._line_that(lambda text: text.startswith("{"))
        except TimeoutError:
            raise Unavailable(f"{self.name} said nothing for {RUN_SECONDS:g} s; {self._last_words()}") from None
        if self._first is None:
            self._first = await self._written_outputs()
        self._signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(line)
        return found

    def first_outputs(self) -> dict[str, list[int]]:
        """Return the tokens of the driver's first run, by request; drivers keep no later ones."""
        return self._first or {}

    async def _written_outputs(self) -> dict[str, list[int]]:
        """Return the outputs that the driver writes after the figures of its first run."""
        async with asyncio.timeout(_END_SECONDS):
            while True:
                with suppress(FileNotFoundError, json.JSONDecodeError):
                    return {name: each["ids"] for name, each in json.loads(self._outputs.read_text()).items()}
                await asyncio.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------ the process

    async def _start(self) -> None:
        peer, options = PEERS[self.name], self.options
        python = options.folder / peer.environment / "bin" / "python"
        command = [str(python), str(options.folder / peer.driver), *options.arguments, "--outputs", str(self._outputs)]
        began = time.perf_counter()
        with self._errors.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent.command(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=options.folder,
                limit=_LONGEST_LINE,
            )
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._line_that(lambda text: text == "READY")
        except TimeoutError:
            raise Unavailable(f"{self.name} was not ready after {READY_SECONDS:g} s; {self._last_words()}") from None
        self.start_seconds = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "a peer is run inside its `async with`"
        return self._process

    async def _line_that(self, fits: Callable[[str], bool]) -> str:
        while line := await self._next_line():
            text = line.decode(errors="replace").strip()
            if fits(text):
                return text
        raise Unavailable(f"the driver of {self.name} ended; {self._last_words()}")

    def _last_words(self) -> str:
        said = self._errors.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
        return f"its last words:\n{said}"

    async def _next_line(self) -> bytes:
        """Return a line, b"" once the driver has ended; an engine that outlives it may still have its output open."""
        process = self._running()
        assert process.stdout is not None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    return await process.stdout.readline()
            if process.returncode is not None:
                return b""

    def _tree(self) -> list[psutil.Process]:
        """Return the driver and its descendants. Earlier ones are remembered: they may outlive their parent."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._running().pid)
            self._seen.update([root, *root.children(recursive=True)])
        return [each for each in self._seen if each.is_running()]

    def _signal(self, number: signal.Signals) -> None:
        for each in self._tree():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    async def _end(self) -> None:
        """Close the driver's input, which ends it; then kill the processes that outlive it, its engines included."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        tree = self._tree()
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                # `wait` would also wait for other processes that have its output open.
                while process.returncode is None:  # noqa: ASYNC110 - the event loop sets it without an event
                    await asyncio.sleep(_POLL_SECONDS)
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        await process.communicate()


def missing(folder: Path, names: Sequence[str], model: str) -> Iterator[str]:
    """Yield what a peers folder lacks for these peers."""
    for name in names:
        peer = PEERS[name]
        for path in (folder / peer.environment / "bin" / "python", folder / peer.driver):
            if not path.exists():
                yield str(path)
    if not (folder / model / "config.json").is_file():
        yield str(folder / model / "config.json")
