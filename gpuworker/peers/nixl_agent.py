"""A process with a NIXL agent and nothing else: `python -m gpuworker.peers.nixl_agent CONTROL STAGING`.

A peer that has an agent's metadata reads and writes all memory of the agent's process, not what is registered alone:
where UCX has no hardware for it (TCP), the other end copies to and from whatever address is asked for. Metadata that
are not right abort the process. So the agent has a process of its own. It holds staging memory, which both it and the
worker have open, and knows no keys, no tokens, no blocks.

It has a socket to the worker, CONTROL, whose messages stand below, and the file of the staging memory, STAGING.

    it      ready     1 | name of the agent 16 | address of the staging memory u64 | metadata
    it      failed    2 | why, as text                                                 and it ends
    it      over      3 | well u8 | ticket u32

    worker  load      1 | ticket u32 | name of an agent 16 | its metadata
    worker  read      2 | ticket u32 | name of an agent 16 | its address u64 | place in the staging u64 | length u64
    worker  forget    3 | 0 u32      | name of an agent 16

Each load and each read is answered once, a read when the library says that it is over. A read is never cancelled: after
`releaseXferReq` of NIXL 1.5.1 had said SUCCESS, bytes of the read still came.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import select
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from gpuworker.peers.wire import MAX_METADATA_BYTES

NAME_BYTES: Final = 16
MAX_MESSAGE_BYTES: Final = MAX_METADATA_BYTES + 256
READY: Final = struct.Struct(f"<B{NAME_BYTES}sQ")
OVER: Final = struct.Struct("<BBI")
COMMAND: Final = struct.Struct(f"<BI{NAME_BYTES}s")
READ: Final = struct.Struct("<QQQ")
PACKAGE: Final = "nixl-cu12"
# Agents of peers that are known at a time.
_MOST_PEERS: Final = 256
# Microseconds between two looks of the library's own thread, which serves peers. With 0 it takes a whole core.
_PROGRESS_DELAY: Final = 100
# Seconds between two looks at reads that are under way.
_SHORTEST_LOOK, _LONGEST_LOOK = 20e-6, 1e-3


class AgentKind(IntEnum):
    """What the agent says."""

    READY = 1
    FAILED = 2
    OVER = 3


class CommandKind(IntEnum):
    """What the worker says."""

    LOAD = 1
    READ = 2
    FORGET = 3


@dataclass(slots=True)
class _Peer:
    """An agent of a peer: how many loads are not forgotten, and how many reads are under way."""

    digest: bytes
    loads: int = 1
    reads: int = 0


@dataclass(slots=True)
class _Reads:
    """Reads under way: their handles and peers, by ticket."""

    handles: dict[int, tuple[int, str]] = field(default_factory=dict)
    look: float = _SHORTEST_LOOK


class NixlAgent:
    """The library's agent, its peers, and reads of their memory. For one thread."""

    def __init__(self, library: Any, memory: mmap.mmap) -> None:
        """Register the staging memory. Raises what the library raises."""
        address, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        config = library.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.pthrDelay = True, False, _PROGRESS_DELAY
        self.name = secrets.token_bytes(NAME_BYTES)
        self._library, self._memory, self.address, self._size = library, memory, address, size
        self._agent = library.nixlAgent(self.name.hex(), config)
        if "UCX" not in self._agent.getAvailPlugins():
            raise OSError("its plugin for UCX is missing")
        self._backend = self._agent.createBackend("UCX", {})
        registered = library.nixlRegDList(library.DRAM_SEG)
        registered.addDesc((address, size, 0, ""))
        self._agent.registerMem(registered, [self._backend])
        self.metadata = bytes(self._agent.getLocalMD())
        self._peers = dict[str, _Peer]()
        self._reads = _Reads()

    def look_seconds(self) -> float | None:
        """Return how long to wait for a command; None where no read is under way."""
        if not self._reads.handles:
            return None
        look, self._reads.look = self._reads.look, min(_LONGEST_LOOK, 2 * self._reads.look)
        return look

    def load(self, name: str, metadata: bytes) -> bool:
        """Make an agent of a peer known. Raises OSError where its metadata are those of another agent."""
        digest, known = hashlib.sha256(metadata).digest(), self._peers.get(name)
        if known is not None:
            known.loads += known.digest == digest
            return known.digest == digest
        if len(self._peers) >= _MOST_PEERS:
            return False
        try:
            found = self._agent.loadRemoteMD(metadata)
        except Exception:  # noqa: BLE001 - of the library's own tree, which it does not export
            return False
        if found.decode("latin-1") != name:
            raise OSError("a peer sent metadata of another agent than it named")
        self._peers[name] = _Peer(digest)
        return True

    def read(self, ticket: int, name: str, remote: int, place: int, length: int) -> bool:
        """Begin a read; return whether it is under way."""
        peer = self._peers.get(name)
        if peer is None or not 0 < length <= self._size - place:
            return False
        handle = None
        try:
            ours, theirs = (self._library.nixlXferDList(self._library.DRAM_SEG) for _ in range(2))
            ours.addDesc((self.address + place, length, 0))
            theirs.addDesc((remote, length, 0))
            handle = self._agent.createXferReq(self._library.NIXL_READ, ours, theirs, name, "", [self._backend])
            self._agent.postXferReq(handle)
        except Exception:  # noqa: BLE001
            if handle is not None:
                self._release(handle)
            return False
        self._reads.handles[ticket], self._reads.look = (handle, name), _SHORTEST_LOOK
        peer.reads += 1
        return True

    def ended_reads(self) -> list[tuple[int, bool]]:
        """Return the tickets of reads that are over since the last call, and whether all bytes came."""
        ended = list[tuple[int, bool]]()
        for ticket, (handle, name) in list(self._reads.handles.items()):
            try:
                state = self._agent.getXferStatus(handle)
            except Exception:  # noqa: BLE001 - the peer is gone
                state = None
            if state == self._library.NIXL_IN_PROG:
                continue
            del self._reads.handles[ticket]
            self._release(handle)
            ended.append((ticket, state == self._library.NIXL_SUCCESS))
            self._peers[name].reads -= 1
            self._drop_unused(name)
        return ended

    def forget(self, name: str) -> None:
        """Take back one load. The agent of the peer is dropped behind the last one, once no read is under way."""
        if (peer := self._peers.get(name)) is not None:
            peer.loads -= 1
            self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        peer = self._peers[name]
        if peer.loads <= 0 and not peer.reads:
            del self._peers[name]
            with suppress(Exception):  # it has dropped a peer by itself that was gone
                self._agent.invalidateRemoteMD(name)

    def _release(self, handle: int) -> None:
        with suppress(Exception):  # it is over in any case
            self._agent.releaseXferReq(handle)


def serve_worker(control: socket.socket, agent: NixlAgent) -> None:
    """Carry out what the worker says until it closes the socket. Raises OSError."""
    while True:
        readable, _, _ = select.select([control], [], [], agent.look_seconds())
        if readable:
            message = control.recv(MAX_MESSAGE_BYTES)
            if not message:
                return
            _carry_out(control, agent, message)
        for ticket, well in agent.ended_reads():
            control.send(OVER.pack(AgentKind.OVER, well, ticket))


def _carry_out(control: socket.socket, agent: NixlAgent, message: bytes) -> None:
    kind, ticket, raw = COMMAND.unpack_from(message)
    name, rest = raw.hex(), message[COMMAND.size :]
    if kind == CommandKind.LOAD:
        control.send(OVER.pack(AgentKind.OVER, agent.load(name, rest), ticket))
    elif kind == CommandKind.READ:
        if not agent.read(ticket, name, *READ.unpack(rest)):
            control.send(OVER.pack(AgentKind.OVER, False, ticket))
    elif kind == CommandKind.FORGET:
        agent.forget(name)


def _agent_of(staging: int) -> NixlAgent:
    """Return an agent with the staging memory. Raises OSError in words for operators."""
    try:
        from nixl_cu12 import _bindings as library  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise OSError(f"{PACKAGE} cannot be imported ({error}); pip install 'quire-llm[nixl]' adds it") from None
    try:
        agent = NixlAgent(library, mmap.mmap(staging, os.fstat(staging).st_size))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001
        what = f"NIXL cannot make an agent with UCX ({type(error).__name__}: {error})"
        raise OSError(f"{what}; what UCX logged says why, and UCX_TLS and UCX_NET_DEVICES choose networks") from None
    if len(agent.metadata) > MAX_METADATA_BYTES:
        raise OSError(f"its metadata have {len(agent.metadata)} bytes; expected at most {MAX_METADATA_BYTES}")
    return agent


def main(words: list[str]) -> int:
    control = socket.socket(fileno=int(words[0]))
    try:
        agent = _agent_of(int(words[1]))
        control.send(READY.pack(AgentKind.READY, agent.name, agent.address) + agent.metadata)
        serve_worker(control, agent)
    except OSError as error:
        with suppress(OSError):
            control.send(bytes([AgentKind.FAILED]) + str(error).encode()[:1000])
        return 1
    return 0


if __name__ == "__main__":
    # Threads of the library are left as they are: nothing of theirs is to be kept.
    os._exit(main(sys.argv[1:]))
