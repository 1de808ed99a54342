"""The HTTP server's listeners, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from fastapi import FastAPI

from cli.certificates.authority import Wanted, make, wanted
from cli.certificates.folder import CertificateFolder
from common.rpc.tls import PublicCertificate
from router.serving.http_server import serve_http


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_server_that_stops_takes_no_connection_from_that_moment(encrypted: bool, tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    todo: list[Wanted] = wanted(folder, [], public=["localhost"])
    make(folder, todo)
    tls = PublicCertificate.of(folder.public.cert, folder.public.key) if encrypted else None
    server = await serve_http(FastAPI(), "127.0.0.1", 0, tls=tls)
    socket.create_connection(("127.0.0.1", server.port)).close()
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    await stopping
