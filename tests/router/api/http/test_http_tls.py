"""HTTP over TLS on a real server: the certificate of the public ports, renewed while the server runs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

from fastapi import FastAPI

from cli.certificates.authority import Wanted, make, wanted
from cli.certificates.folder import CertificateFolder
from common.rpc.tls import PublicCertificate
from router.api.http.http_server import serve_http

PATIENCE = 60.0
REQUEST = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def answer(port: int, ca: Path) -> tuple[str, str]:
    """Return the server's certificate and the body of its answer, over a new connection."""
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
        connection.sendall(REQUEST)
        received = b""
        while part := connection.recv(4096):
            received += part
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown), received.decode().rpartition("\r\n\r\n")[2]


async def test_http_has_the_public_certificate_and_takes_a_renewed_one(tmp_path: Path) -> None:
    app, folder = FastAPI(), CertificateFolder(tmp_path)
    app.get("/hello")(lambda: "hello")
    todo: list[Wanted] = wanted(folder, [], public=["localhost"])
    make(folder, todo)
    leaf = folder.public
    server = await serve_http(app, "127.0.0.1", 0, tls=PublicCertificate.of(leaf.cert, leaf.key))
    shown = []
    for _ in range(2):
        expected = leaf.cert.read_text()
        assert await asyncio.to_thread(answer, server.port, leaf.ca) == (expected, '"hello"')
        shown.append(expected)
        make(folder, todo)
    await server.stop()
    assert shown[0] != shown[1]
