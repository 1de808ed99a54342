"""The HTTP server's listeners, with real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI, Request

from cli.certificates.authority import Wanted, make, wanted
from cli.certificates.folder import CertificateFolder
from common.contracts import limits
from common.rpc import connections
from common.rpc.tls import PublicCertificate
from router.api.http.http_server import serve_http
from tests.support.turns import until_blocked

OPTIONS = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_server_that_stops_takes_no_connection_from_that_moment(encrypted: bool, tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    todo: list[Wanted] = wanted(folder, [], public=["localhost"])
    make(folder, todo)
    tls = PublicCertificate.of(folder.public.cert, folder.public.key) if encrypted else None
    server = await serve_http(FastAPI(), "127.0.0.1", 0, tls=tls)
    socket.create_connection(("127.0.0.1", server.port)).close()

    def listens() -> bool:  # another process may have the port later: a connection to it would say nothing
        found = psutil.Process().net_connections("tcp")
        return any(each.laddr.port == server.port and each.status == psutil.CONN_LISTEN for each in found)

    assert listens()
    stopping = asyncio.create_task(server.stop())
    await until_blocked(stopping)
    assert not listens()
    await stopping


@pytest.mark.parametrize("name", ["X-Forwarded-For", "X-Real-IP", "Forwarded", "X-Forwarded-Proto"])
async def test_no_header_names_the_address_of_a_client(name: str) -> None:
    app, seen = FastAPI(), list[tuple[str, str]]()

    @app.get("/")
    async def root(request: Request) -> None:
        assert request.client is not None
        seen.append((request.client.host, request.url.scheme))

    server = await serve_http(app, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {name: "https" if name.endswith("Proto") else "203.0.113.9"}
            await client.get(f"http://127.0.0.1:{server.port}/", headers=headers)
    finally:
        await server.stop()
    assert seen == [("127.0.0.1", "http")]


@pytest.mark.skipif(sys.platform != "linux", reason="the option is one of Linux")
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_client_whose_host_vanishes_is_noticed_within_the_time_of_a_slow_one(
    encrypted: bool, tmp_path: Path
) -> None:
    """With data on its way and without. The kernel does it; what is asked of it is read from the accepted socket."""
    folder = CertificateFolder(tmp_path)
    make(folder, wanted(folder, [], public=["localhost"]))
    tls = PublicCertificate.of(folder.public.cert, folder.public.key) if encrypted else None
    server = await serve_http(FastAPI(), "127.0.0.1", 0, tls=tls)
    context = ssl.create_default_context(cafile=str(folder.public.ca)) if encrypted else None
    named = "localhost" if encrypted else None
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname=named)
    writer.write(b"GET /none HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(60):
        await reader.readuntil(b"\r\n\r\n")
    (number,) = connections._find({server.port}, listening=False)[0]
    with socket.socket(fileno=os.dup(number)) as accepted:
        tcp = {name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in OPTIONS}
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert tcp["TCP_USER_TIMEOUT"] == limits.HTTP_STALL_SECONDS * 1000
    assert tcp["TCP_KEEPIDLE"] + tcp["TCP_KEEPINTVL"] < limits.HTTP_STALL_SECONDS
    writer.close()
    await server.stop()


async def test_a_connection_idles_longer_here_than_clients_and_proxies_keep_it() -> None:
    """Where both end it after as many seconds, a request now and then meets a connection that is closed."""
    kept = {"httpx": 5.0, "aiohttp": 15.0, "nginx": 60.0, "a load balancer of AWS": 60.0, "Go": 90.0}
    server = await serve_http(FastAPI(), "127.0.0.1", 0)
    assert httpx.Limits().keepalive_expiry == kept["httpx"]
    assert server._server.config.timeout_keep_alive > max(kept.values())
    await server.stop()


async def test_a_server_ends_without_waiting_for_its_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.http.http_server._DATE_SECONDS", 1e6)
    server = await serve_http(FastAPI(), "127.0.0.1", 0)
    async with asyncio.timeout(60.0), httpx.AsyncClient() as client:
        assert "date" in (await client.get(f"http://127.0.0.1:{server.port}/")).headers
        await server.stop()
