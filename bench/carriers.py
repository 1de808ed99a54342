"""What each carrier of images takes: bytes a second, and processor time of both ends, between two processes of a host.

    python -m bench.carriers --json
    python -m bench.carriers --image-bytes 2097152 --rounds 15

A source in a process of its own answers at once, with images that are in memory. In each round every carrier fetches
the same number of blocks, in turns, each beginning with another one. `shm` is the ring in shared memory, `tcp` and
`tls` the connection, `nixl` is NIXL by what UCX chooses on one host, and `nixl_tcp` is NIXL where it has TCP alone, as
between hosts without RDMA. Both need quire-llm[nixl], and are left out without it. Images are verified, as always.

Processor time is that of both processes, and of the carrier's own agents. Nothing was measured over RDMA.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psutil

from bench.lib.harness import median_interval, parser, progress, report
from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder
from common.contracts.errors import InvalidConfig
from common.contracts.transfer_tokens import TokenScope, make_token, serve_key_of
from common.contracts.transfers import ImageName, Medium, PeerSource, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.roles import Role
from common.rpc.tls import CertificateFiles
from gpuworker.peers.carriers import host_key
from gpuworker.peers.client import PeerClient
from gpuworker.peers.nixl import Carriers, NixlStation
from gpuworker.peers.server import Deliver, PeerServer, listen
from gpuworker.peers.tls import PeerTls
from gpuworker.peers.wire import PeerIdentity

_TICK: Final = 1.0 / os.sysconf("SC_CLK_TCK")
CARRIERS: Final = ("shm", "tcp", "tls", "nixl", "nixl_tcp")
_FORMAT: Final = b"bench.carriers.."
_SOURCE, _DESTINATION = b"incarnation of S", b"incarnation of D"
_KEY: Final = serve_key_of(b"bench", _SOURCE)
_PATIENCE: Final = 120.0
_WAYS: Final = {"nixl": "", "nixl_tcp": "tcp"}


@contextmanager
def station(ways: str) -> Iterator[NixlStation]:
    """Yield a station whose UCX has these ways alone; "": all that it has. Raises InvalidConfig without the library."""
    before = os.environ.pop("UCX_TLS", None)
    if ways:
        os.environ["UCX_TLS"] = ways
    try:
        made = NixlStation()
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before
    try:
        yield made
    finally:
        made.close()


def tls_in(folder: str) -> PeerTls:
    leaf = CertificateFolder(Path(folder)).role(Role.WORKER)
    return PeerTls(CertificateFiles(leaf.cert, leaf.key, leaf.ca))


def serve(image_bytes: int, folder: str, names: Sequence[str]) -> None:
    """Be the source: print for each carrier a port, and the process of its agent or 0; serve until the input ends."""
    image = os.urandom(image_bytes)
    identity = PeerIdentity("source", _SOURCE, _FORMAT, image_bytes)

    def answer(names: Sequence[ImageName], deliver: Deliver) -> None:
        deliver([image] * len(names))

    with ExitStack() as stack:
        for name in names:
            nixl = stack.enter_context(station(_WAYS[name])) if name in _WAYS else None
            carriers, tls = (
                Carriers(host_key() if name == "shm" else b"", nixl),
                tls_in(folder) if name == "tls" else None,
            )
            listener = listen("127.0.0.1", 0, secure=tls is not None)
            server = PeerServer(listener, lambda: identity, answer, lambda: [_KEY], tls, carriers)
            stack.callback(server.close)
            print(server.port, nixl.process_id if nixl is not None else 0, flush=True)
        sys.stdin.read()


class Destination:
    """D's end of one carrier."""

    def __init__(self, name: str, said: str, image_bytes: int, folder: str, nixl: NixlStation | None) -> None:
        """`said` is the source's line about the carrier."""
        port, agent = map(int, said.split())
        who = PeerIdentity("destination", _DESTINATION, _FORMAT, image_bytes)
        self.name, self._port, self._woken = name, port, threading.Event()
        self.agents = [] if nixl is None else [psutil.Process(agent), psutil.Process(nixl.process_id)]
        carriers = Carriers(host_key() if name == "shm" else b"", nixl)
        self._client = PeerClient(
            lambda: who, self._woken.set, tls_in(folder) if name == "tls" else None, carriers=carriers
        )

    def fetch(self, blocks: int) -> float:
        """Fetch so many blocks, in requests of 64, and return the seconds."""
        began = time.perf_counter()
        for first in range(0, blocks, 64):
            hashes = tuple(BlockHash(number.to_bytes(16)) for number in range(first, min(blocks, first + 64)))
            self._fetch(hashes)
        return time.perf_counter() - began

    def _fetch(self, hashes: Sequence[BlockHash]) -> None:
        expires = int(time.time()) + 600
        token = make_token(_KEY, TokenScope("destination", _DESTINATION, _SOURCE, expires, hashes))
        place = Place(Medium.BLOCK, FrameId(0))
        moves = [Transfer(n, each, BlockHash(bytes(16)), 0, place, place) for n, each in enumerate(hashes)]
        self._client.fetch(PeerSource("source", _SOURCE, f"127.0.0.1:{self._port}", token, expires), moves, _PATIENCE)
        landed = 0
        while landed < len(hashes):
            if not self._woken.wait(_PATIENCE):
                raise SystemExit(f"{self.name}: nothing came in {_PATIENCE:g} s")
            self._woken.clear()
            for ended in self._client.poll():
                if ended.end is not TransferEnd.DONE:
                    raise SystemExit(f"{self.name}: a block ended as {ended.end.name}")
                landed += 1

    def check_carrier(self) -> None:
        """Exit where blocks came by another carrier."""
        found, wanted_one = set(self._client.fetched()), {"tls": "tcp", "nixl_tcp": "nixl"}.get(self.name, self.name)
        if found != {wanted_one}:
            raise SystemExit(f"{self.name}: blocks came by {', '.join(sorted(found))}")

    def close(self) -> None:
        self._client.close()


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes]
    return float(sum(each.user + each.system for each in times))


def measure(args: argparse.Namespace, names: Sequence[str], folder: str) -> dict[str, float]:
    command = module_command("bench.carriers", "--serve", folder, "--image-bytes", str(args.image_bytes))
    command += ["--carriers", ",".join(names)]
    rates, costs = ({name: list[float]() for name in names} for _ in range(2))
    with ExitStack() as stack:
        process = subprocess.Popen(
            die_with_parent.command(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.communicate)
        assert process.stdout is not None
        both, ends = [psutil.Process(), psutil.Process(process.pid)], list[Destination]()
        for name in names:
            nixl = stack.enter_context(station(_WAYS[name])) if name in _WAYS else None
            end = Destination(name, process.stdout.readline(), args.image_bytes, folder, nixl)
            stack.callback(end.close)
            end.fetch(args.blocks)  # connects
            ends.append(end)
        size = args.blocks * args.image_bytes
        for number in range(args.rounds):
            first = number % len(ends)
            for end in (*ends[first:], *ends[:first]):
                processes = [*both, *end.agents]
                before = processor_seconds(processes)
                seconds = end.fetch(args.blocks)
                # The clock of processors has ticks: what takes less than one counts as one.
                costs[end.name].append(max(_TICK, processor_seconds(processes) - before) / size * 1e9)
                rates[end.name].append(size / seconds / 1e6)
            progress(f"round {number + 1} of {args.rounds}")
        for end in ends:
            end.check_carrier()
    figures = dict[str, float]()
    for name in names:
        figures[f"mb_s_{name}"] = statistics.median(rates[name])
        figures[f"cpu_s_gb_{name}"] = statistics.median(costs[name])
    for name in names:
        if name != "tcp" and "tcp" in names:
            ratios = [one / other for one, other in zip(costs[name], costs["tcp"], strict=True)]
            middle, low, high = median_interval(ratios)
            figures |= {
                f"cpu_ratio_{name}": middle,
                f"cpu_ratio_{name}_low": low,
                f"cpu_ratio_{name}_high": high,
            }
    return figures


def notes(names: Sequence[str]) -> dict[str, str]:
    found = dict[str, str]()
    for name in names:
        found[f"mb_s_{name}"] = "megabytes a second, verified"
        found[f"cpu_s_gb_{name}"] = "processor seconds a GB, of both ends"
        found[f"cpu_ratio_{name}"] = "of that of tcp"
    return found


def usable(names: Sequence[str]) -> list[str]:
    """Return the carriers that this machine has; say why others are left out."""
    if not _WAYS.keys() & set(names):
        return list(names)
    try:
        with station(""):
            return list(names)
    except InvalidConfig as error:
        print(f"without NIXL: {error}", file=sys.stderr)
        return [name for name in names if name not in _WAYS]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--image-bytes", type=int, default=196_608, help="192 KiB: a block of the 128 M shape")
    flags.add_argument("--blocks", type=int, default=512, help="blocks of each carrier in a round")
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--carriers", default=",".join(CARRIERS), help=f"of {', '.join(CARRIERS)}")
    flags.add_argument("--serve", metavar="DIR", help=argparse.SUPPRESS)
    args = flags.parse_args()
    names = [name for name in args.carriers.split(",") if name in CARRIERS]
    if names != args.carriers.split(","):
        flags.error(f"--carriers {args.carriers}; expected some of {', '.join(CARRIERS)}")
    if args.serve:
        serve(args.image_bytes, args.serve, names)
        return
    names = usable(names)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        certificates = CertificateFolder(Path(folder))
        make(certificates, wanted(certificates, Role))
        figures = measure(args, names, folder)
    report("carriers", figures, notes(names), args.json)


if __name__ == "__main__":
    main()
