"""nginx before a router, with the lines that docs/exposing.md has: so these lines are what is attacked."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from cli.suite.stack import free_ports

# Of gRPC and of HTTP.
Ports = tuple[int, int]
_PAGE: Final = Path(__file__).parents[2] / "docs/exposing.md"
_LINES: Final = re.compile(r"^```\n(limit_conn_zone .*?)^```$", re.MULTILINE | re.DOTALL)
# Of the page, by what replaces it here. Before nginx 1.25 HTTP/2 is a word of `listen`, and a port of plain text has it
# alone or not at all.
_LISTEN: Final = "listen 443 ssl;\n    http2 on;"
_HTTP, _GRPC = "127.0.0.1:8000", "127.0.0.1:50051"
_AROUND: Final = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 4096; }}
http {{
access_log off;
client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
{lines}
}}
"""
_START_S: Final = 30.0


def program() -> str | None:
    """Return nginx's path, None where it is not installed. Debian keeps it where PATH often has no folder."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def configuration(folder: Path, own: Ports, routers: Ports) -> str:
    """Return a configuration for a router on these ports of loopback. Raises ValueError if the page lacks the lines."""
    found = _LINES.search(_PAGE.read_text())
    lines = found[1] if found else ""
    for of_page, here in (
        (_LISTEN, f"listen 127.0.0.1:{own[0]} http2; listen 127.0.0.1:{own[1]};"),
        (_HTTP, f"127.0.0.1:{routers[1]}"),
        (_GRPC, f"127.0.0.1:{routers[0]}"),
    ):
        if of_page not in lines:
            raise ValueError(f"{_PAGE.name} has no lines of nginx with {of_page!r}")
        lines = lines.replace(of_page, here)
    return _AROUND.format(folder=folder, lines=lines)


@asynccontextmanager
async def nginx(routers: Ports) -> AsyncIterator[Ports]:
    """Run nginx before a router; yield its ports. Raises FileNotFoundError without nginx."""
    if (path := program()) is None:
        raise FileNotFoundError("nginx is not installed (Debian: apt-get install nginx-light)")
    grpc_port, http_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="quire-nginx-") as name:
        file = Path(name) / "nginx.conf"
        file.write_text(configuration(Path(name), (grpc_port, http_port), routers))
        process = await asyncio.create_subprocess_exec(path, "-c", str(file), "-e", f"{name}/errors")
        try:
            await _answering(http_port, process)
            yield grpc_port, http_port
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _answering(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"nginx ended with status {process.returncode}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
