"""Two workers without engines: a source whose images are made of their hashes, and a destination that fetches them.

`python -m tests.support.gpuworker.peers` is a source in a process of its own: it prints its port, and answers a hash
that begins with HELD only once a line comes on its standard input.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from common.contracts.transfer_tokens import TokenScope, make_token, serve_key_of
from common.contracts.transfers import ImageName, Medium, PeerSource, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId
from common.process import die_with_parent
from gpuworker.peers.carriers import Image, host_key
from gpuworker.peers.client import ClientLimits, EndedTransfer, PeerClient
from gpuworker.peers.nixl import Carriers, NixlStation
from gpuworker.peers.server import Deliver, PeerServer, ServerLimits, ServesTls, listen
from gpuworker.peers.wire import PeerIdentity

PATIENCE: Final = 60.0
IMAGE_BYTES: Final = 6000
STAGING_BYTES: Final = 1 << 20
FORMAT: Final = b"image format 1.."
SOURCE: Final = PeerIdentity("worker-s", b"incarnation of S", FORMAT, IMAGE_BYTES)
DESTINATION: Final = PeerIdentity("worker-d", b"incarnation of D", FORMAT, IMAGE_BYTES)
SERVE_KEY: Final = serve_key_of(b"the key of the pool", SOURCE.incarnation)
# What a hash begins with of which the source has no block, or whose answer it holds back.
MISSING: Final = b"-"
HELD: Final = b"+"


def image_of(key: BlockHash, size: int = IMAGE_BYTES, page: int = 0) -> bytes:
    """Return what a page of the content with this key holds at every source here."""
    return hashlib.shake_128(key + bytes(page)).digest(size)


def hashes_of(count: int, mark: bytes = b"") -> tuple[BlockHash, ...]:
    return tuple(BlockHash(mark + number.to_bytes(16 - len(mark), "big")) for number in range(count))


def moves_of(hashes: Sequence[BlockHash]) -> list[Transfer]:
    parent = BlockHash(bytes(16))
    return [
        Transfer(number, each, parent, 0, Place(Medium.BLOCK, FrameId(0)), Place(Medium.HOST, FrameId(number)))
        for number, each in enumerate(hashes)
    ]


def answer_images(names: Sequence[ImageName], deliver: Deliver) -> None:
    """Hand over all images at once, as an engine does between two steps."""
    deliver([None if each.key.startswith(MISSING) else image_of(each.key, page=each.page) for each in names])


@dataclass
class Holding:
    """A source whose engine answers one hash at a time, and those of HELD once it is released."""

    released: threading.Event = field(default_factory=threading.Event)
    asked: list[BlockHash] = field(default_factory=list)

    def take_images(self, names: Sequence[ImageName], deliver: Deliver) -> None:
        self.asked += [each.key for each in names]

        def answer() -> None:
            for each in names:
                if each.key.startswith(HELD):
                    self.released.wait()
                answer_images([each], deliver)

        threading.Thread(target=answer, daemon=True).start()


def threads_of(prefix: str) -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(prefix)]


@contextmanager
def serving(
    take_images: Callable[[Sequence[ImageName], Callable[[Sequence[Image | None]], None]], None] = answer_images,
    identity: PeerIdentity = SOURCE,
    bounds: ServerLimits | None = None,
    key: bytes = SERVE_KEY,
    tls: ServesTls | None = None,
    shared: bytes = b"",
    nixl: NixlStation | None = None,
) -> Iterator[PeerServer]:
    """Yield a source that listens on loopback. It has no thread left afterwards."""
    listener = listen("127.0.0.1", 0, secure=tls is not None)
    carriers = Carriers(shared, nixl)
    server = PeerServer(listener, lambda: identity, take_images, lambda: [key], tls, carriers, bounds)
    try:
        server_port = server.port
        yield server
    finally:
        server.close(PATIENCE)
        assert not threads_of(f"peer-{server_port}-")


class Destination:
    """A worker that fetches, and waits for what has landed."""

    def __init__(
        self,
        who: PeerIdentity = DESTINATION,
        bounds: ClientLimits | None = None,
        host_key: bytes = b"",
        nixl: NixlStation | None = None,
        **options: Any,
    ) -> None:
        self.who, self._woken = who, threading.Event()
        carriers = Carriers(host_key, nixl)
        self.client = PeerClient(lambda: self.who, self._woken.set, carriers=carriers, bounds=bounds, **options)

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close(PATIENCE)
        assert not threads_of(f"peer-fetch-{id(self.client):x}-")

    def source(self, port: int, hashes: Sequence[BlockHash], key: bytes = SERVE_KEY, **changed: Any) -> PeerSource:
        expires = int(time.time()) + 600
        scope = TokenScope(self.who.worker_id, self.who.incarnation, SOURCE.incarnation, expires, hashes)
        named: dict[str, Any] = {
            "worker_id": SOURCE.worker_id,
            "public_incarnation": SOURCE.incarnation,
            "address": f"127.0.0.1:{port}",
            "token": make_token(key, scope),
            "expires": expires,
        }
        return PeerSource(**(named | changed))

    def fetch(self, port: int, hashes: Sequence[BlockHash], patience: float = PATIENCE, **changed: Any) -> None:
        self.client.fetch(self.source(port, hashes, **changed), moves_of(hashes), patience)

    def landed(self, count: int) -> list[EndedTransfer]:
        """Wait until so many transfers have ended, and return them by the numbers of the transfers."""
        found: list[EndedTransfer] = []
        until = time.monotonic() + PATIENCE
        while len(found) < count:
            assert self._woken.wait(max(0.0, until - time.monotonic())), f"{len(found)} of {count} transfers ended"
            self._woken.clear()
            found += self.client.poll()
        return sorted(found, key=lambda moved: moved.transfer.id)

    def fetched(
        self, port: int, hashes: Sequence[BlockHash], patience: float = PATIENCE, **changed: Any
    ) -> list[TransferEnd]:
        """Fetch, wait for all, check the images of what is DONE, and return the ends."""
        self.fetch(port, hashes, patience, **changed)
        return ends_of(self.landed(len(hashes)))


def ends_of(landed: Sequence[EndedTransfer]) -> list[TransferEnd]:
    """Return the ends, after a look at every image."""
    for moved in landed:
        if moved.end is TransferEnd.DONE:
            assert moved.image is not None
            assert bytes(moved.image) == image_of(moved.transfer.hash)
        else:
            assert moved.image is None
    return [moved.end for moved in landed]


class SourceProcess:
    """A source in a process of its own, which can be stopped and killed; with `nixl`, one that has an agent of it."""

    def __init__(self, nixl: bool = False) -> None:
        argv = [sys.executable, "-m", "tests.support.gpuworker.peers", *(["nixl"] if nixl else [])]
        self._process = subprocess.Popen(
            die_with_parent.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self) -> None:
        """Let it answer what it holds back."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def wait(self) -> None:
        self._process.wait(PATIENCE)


def main() -> None:
    holding = Holding()
    station = NixlStation(STAGING_BYTES) if "nixl" in sys.argv else None
    with serving(holding.take_images, shared=host_key(), nixl=station) as server:
        print(server.port, flush=True)  # noqa: T201
        while sys.stdin.readline():
            holding.released.set()


if __name__ == "__main__":
    main()
