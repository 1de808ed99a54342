"""The stack on a real Docker engine: Compose as a person would call it, a transcript with times, a load to watch."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import grpc

from quire.inference.v1 import inference_pb2, inference_pb2_grpc
from quire.types.v1 import types_pb2

REPOSITORY: Final = Path(__file__).resolve().parents[5]
PROJECT: Final = "quire-test"
_POLL_SECONDS: Final = 0.1
_KILL_SERVICE: Final = """
import os, pathlib, signal
for each in pathlib.Path('/proc').glob('[0-9]*'):
    words = (each / 'cmdline').read_bytes().split(b'\\0')
    if each.name != '1' and any(b'/quire-' in word for word in words[1:2]):
        os.kill(int(each.name), signal.SIGKILL)
"""
FILES: Final = ("compose.yaml", "tests/suites/deployment/docker/engine/load.compose.yaml")


@dataclass(frozen=True, slots=True)
class Ended:
    """How many tokens of a stream came, its finish reason, and when it ended, in seconds of the clock."""

    tokens: int
    reason: int
    at: float


class Transcript:
    """Prints the events, with the seconds since the beginning, on standard output and to `file`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._began, self._file = time.monotonic(), file

    def say(self, text: str) -> None:
        """Print some lines, with the present time first."""
        clock = f"[{time.monotonic() - self._began:7.1f} s] "
        lines = f"\n{' ' * len(clock)}".join(text.rstrip().splitlines())
        for out in (sys.stdout, self._file):
            if out is not None:
                out.write(f"{clock}{lines}\n")
                out.flush()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Print the begin of something, and at its end the time that it took."""
        self.say(f"{what} ...")
        began = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s")


class Stack:
    """One Compose project with ports of its own, and the engine's view of its containers.

    `files` are given to Compose in this order, `variables` beside those of every stack.
    """

    def __init__(
        self, transcript: Transcript, project: str = PROJECT, files: Sequence[str] = FILES, **variables: str
    ) -> None:
        self.transcript, self._project, self._files = transcript, project, files
        self.grpc_port, self.http_port = _free_port(), _free_port()
        # The caller's build variables count; the caller's choice of a model does not.
        kept = {key: value for key, value in os.environ.items() if key not in ("MODEL_DIR", "MODEL_NAME")}
        self._environment = kept | {
            "BIND_ADDRESS": "127.0.0.1",
            "GRPC_PORT": str(self.grpc_port),
            "HTTP_PORT": str(self.http_port),
            # With more than one core each, three workers and the rest would compete for a small machine.
            "WORKER_CPUS": os.environ.get("WORKER_CPUS", "1"),
            "WORKER_MEMORY": os.environ.get("WORKER_MEMORY", "2G"),
            **variables,
        }

    def compose(self, *words: str, timeout: float = 300.0) -> str:
        """Run `docker compose`; return what it printed. Fails the test, with that, when it fails."""
        files = [word for file in self._files for word in ("-f", str(REPOSITORY / file))]
        return self._run(["docker", "compose", "-p", self._project, *files, *words], timeout)

    def docker(self, *words: str) -> str:
        return self._run(["docker", *words], 60.0)

    def _run(self, command: list[str], timeout: float) -> str:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """Return a project's containers, those that have ended included, as `docker compose ps` lists them."""
        lines = self.compose("ps", "--all", "--format", "json", *([service] if service else [])).splitlines()
        return [json.loads(line) for line in lines]

    def workers(self) -> list[str]:
        """Return the worker ids of the running workers: each is named after its container, and its port."""
        ids = self.compose("ps", "--quiet", "gpuworker").split()
        return sorted(f"{each[:12]}-50053" for each in ids)

    def container(self, service: str) -> str:
        """Return the id of the first running container of a service."""
        return self.compose("ps", "--quiet", service).split()[0]

    def inspect(self, container: str) -> dict[str, Any]:
        """Return the engine's description of a container."""
        found: dict[str, Any] = json.loads(self.docker("inspect", container))[0]
        return found

    async def stop_amid_streams(self, count: int, tokens: int) -> list[Ended]:
        """Stop everything once so many streams run; return how each of them ended."""
        firsts = [asyncio.Event() for _ in range(count)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            streams = [asyncio.create_task(_stream(stub, tokens, first)) for first in firsts]
            await asyncio.gather(*(first.wait() for first in firsts))
            await asyncio.to_thread(self.compose, "stop")
            return await asyncio.gather(*streams)

    def take_down(self) -> None:
        """Remove containers, networks and volumes of the project, whatever state they are in."""
        self.compose("--profile", "test", "down", "--volumes", "--remove-orphans")

    async def until_all_run(self, workers: int, seconds: float = 60.0) -> None:
        """Wait until the router sees so many workers with sequences running on each."""
        async with asyncio.timeout(seconds), grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while True:
                status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=10.0)
                if sum(worker.running_sequences > 0 for worker in status.workers) >= workers:
                    return
                await asyncio.sleep(_POLL_SECONDS)

    def until_logged(self, container: str, words: str, seconds: float = 60.0) -> None:
        """Wait until a container has printed some words."""
        command = ["docker", "logs", "--follow", container]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as logs:
            assert logs.stdout is not None
            giving_up = threading.Timer(seconds, logs.kill)
            giving_up.start()
            found = any(words in line for line in logs.stdout)
            giving_up.cancel()
            logs.kill()
        assert found, f"{container} never said {words!r}"

    def crash(self, container: str) -> None:
        """Kill the service in a container as a crash would: the process itself, not the init above it."""
        self.docker("exec", "--detach", container, "python", "-c", _KILL_SERVICE)

    def until_restarted(self, container: str, seconds: float = 120.0) -> None:
        """Wait until the engine has started a container again, by its restart policy, and it is healthy."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.inspect(container)
            if found["RestartCount"] == 1 and found["State"]["Health"]["Status"] == "healthy":
                return
            assert time.monotonic() < deadline, found["State"]
            time.sleep(_POLL_SECONDS)

    def python(self, service: str, script: str) -> str:
        """Run a line of Python inside a service's container; return what it printed."""
        return self.compose("exec", "-T", service, "python", "-c", script).strip()

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Keep the client's streams going for the length of the block, then check that each ended as it should."""
        self.compose("up", "--detach", "--no-deps", "--force-recreate", "client")
        command = ["docker", "logs", "--follow", self.compose("ps", "--quiet", "client").strip()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as logs:
            running = Load(logs)
            try:
                running.until(lambda tally: tally["finished"] > 0, "a first stream has finished")
                yield running
            finally:
                self.compose("stop", "client")
                running.ended()
        last = running.tally
        self.transcript.say(
            f"load: {last['finished']} streams of {last['tokens'] // last['finished']} tokens finished, "
            f"{last['failed']} failed, {last['wrong']} with other tokens; by worker {last['by_worker']}"
        )
        assert (last["failed"], last["wrong"], last["running"]) == (0, 0, 0), last["errors"]


class Load:
    """The last report of the client in its container."""

    def __init__(self, logs: subprocess.Popen[str]) -> None:
        self._logs, self._changed = logs, threading.Condition()
        self.tally: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._logs.stdout is not None
        for line in self._logs.stdout:
            with self._changed:
                self.tally = json.loads(line)
                self._changed.notify_all()

    def until(self, true: Callable[[dict[str, Any]], bool], what: str, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until the tally fulfils a condition; return it. Fails the test when a stream fails meanwhile."""

        def settled() -> bool:
            return bool(self.tally) and (self.tally["failed"] > 0 or self.tally["wrong"] > 0 or true(self.tally))

        with self._changed:
            assert self._changed.wait_for(settled, seconds), f"not within {seconds:g} s: {what}; {self.tally}"
            assert (self.tally["failed"], self.tally["wrong"]) == (0, 0), self.tally
            return self.tally

    def more(self, streams: int, worker: str | None = None) -> None:
        """Wait until so many more streams have finished: in all, or by one worker."""

        def count(tally: dict[str, Any]) -> int:
            return int(tally["finished"] if worker is None else tally["by_worker"].get(worker, 0))

        wanted = count(self.tally) + streams
        self.until(lambda tally: count(tally) >= wanted, f"{streams} more streams of {worker or 'any worker'}")

    def ended(self) -> None:
        """Wait for the client's last line."""
        self._reader.join(60.0)
        assert not self._reader.is_alive()


async def _stream(stub: inference_pb2_grpc.InferenceServiceStub, tokens: int, first: asyncio.Event) -> Ended:
    """Run one stream; `first` is set with its first token."""
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompt = inference_pb2.Prompt(text="Count as far as you can.")
    came, reason = 0, 0
    async for event in stub.Generate(inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling), timeout=120.0):
        came += len(event.tokens.token_ids)
        if came:
            first.set()
        reason = reason or event.finished.reason
    return Ended(came, reason, time.time())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
