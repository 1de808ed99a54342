"""What `gpuworker/peers/nixl_agent.py` uses of nixl-cu12, as the library behaves; a test says when reads go on.

Memory is read by the file that is mapped there, of the other process. While the file that NIXL_DOUBLE_HOLD names is
there, no read that was posted goes on. NIXL_DOUBLE_LACKS names what the library lacks. Metadata that begin
with "abort" end the process, as some do that the library cannot read.
"""

from __future__ import annotations

import ctypes
import json
import os
from itertools import count
from pathlib import Path
from typing import Any, Final

DRAM_SEG, NIXL_READ = "DRAM", "READ"
NIXL_SUCCESS, NIXL_IN_PROG = "SUCCESS", "IN_PROG"
_HOLD: Final = os.environ.get("NIXL_DOUBLE_HOLD", "")
_LACKS: Final = os.environ.get("NIXL_DOUBLE_LACKS", "")


class BackendError(Exception):
    """The library's errors have a tree of their own."""


class nixlAgentConfig:  # noqa: N801
    """Options of an agent."""

    useProgThread = useListenThread = False  # noqa: N815
    pthrDelay = 0  # noqa: N815


class nixlRegDList:  # noqa: N801
    """Places in memory."""

    def __init__(self, _: str) -> None:
        self.places: list[tuple[Any, ...]] = []

    def addDesc(self, place: tuple[Any, ...]) -> None:
        self.places.append(place)


nixlXferDList = nixlRegDList  # noqa: N816


class nixlAgent:  # noqa: N801
    """An agent whose peers are processes of this host."""

    def __init__(self, name: str, _: nixlAgentConfig) -> None:
        self._name, self._numbers = name, count(1)
        self._peers: dict[str, dict[str, Any]] = {}
        self._reads: dict[int, tuple[str, int, int, int]] = {}
        self._registered: tuple[Any, ...] = ()

    def getAvailPlugins(self) -> list[str]:
        return [] if _LACKS == "plugin" else ["UCX"]

    def createBackend(self, name: str, _: dict[str, str]) -> int:
        if _LACKS == "backend":
            raise BackendError("NIXL_ERR_BACKEND")
        return 1

    def registerMem(self, places: nixlRegDList, _: list[int]) -> None:
        [self._registered] = places.places

    def getLocalMD(self) -> bytes:
        address, size, *_ = self._registered
        file = next(each for each in os.listdir("/proc/self/fd") if "quire-nixl" in _target(each))
        return json.dumps([self._name, os.getpid(), file, address, size]).encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        if metadata.startswith(b"abort"):
            os.abort()
        try:
            name, process, file, address, size = json.loads(metadata)
        except (ValueError, TypeError):
            raise BackendError("NIXL_ERR_MISMATCH") from None
        self._peers[name] = {"path": f"/proc/{process}/fd/{file}", "address": address, "size": size}
        return str(name).encode()

    def invalidateRemoteMD(self, name: str) -> None:
        del self._peers[name]

    def createXferReq(self, *given: Any) -> int:
        _, ours, theirs, name, *_ = given
        [(local, size, _)], [(remote, _, _)] = ours.places, theirs.places
        peer = self._peers[name]
        if not peer["address"] <= remote <= peer["address"] + peer["size"] - size:
            raise BackendError("NIXL_ERR_NOT_FOUND")
        handle = next(self._numbers)
        self._reads[handle] = (name, local, remote, size)
        return handle

    def postXferReq(self, handle: int) -> str:
        return NIXL_IN_PROG

    def getXferStatus(self, handle: int) -> str:
        if _HOLD and Path(_HOLD).exists():
            return NIXL_IN_PROG
        name, local, remote, size = self._reads[handle]
        peer = self._peers[name]
        try:
            file = os.open(peer["path"], os.O_RDONLY)
        except OSError:
            raise BackendError("NIXL_ERR_REMOTE_DISCONNECT") from None
        try:
            ctypes.memmove(local, os.pread(file, size, remote - peer["address"]), size)
        finally:
            os.close(file)
        return NIXL_SUCCESS

    def releaseXferReq(self, handle: int) -> str:
        return NIXL_SUCCESS


def _target(file: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""
