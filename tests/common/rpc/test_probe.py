"""The probe of containers: its answer and its exit status, against real servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from common.process.metrics import MetricsServer, new_registry
from common.rpc.probe import main
from common.rpc.server import RpcServer

SERVICE = "quire.test.v1.TestService"


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    """A server that listens and is not ready yet."""
    running = RpcServer([SERVICE])
    await running.start("127.0.0.1", 0)
    yield running
    await running.stop(0.0)


async def probe(*words: str) -> int:
    """Run the probe beside the server's event loop; return its exit status."""
    return await asyncio.to_thread(main, words)


async def test_a_server_that_is_not_ready_fails_the_probe(
    server: RpcServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await probe(f"127.0.0.1:{server.port}") == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"


async def test_a_server_that_serves_passes_as_a_whole_and_by_service(
    server: RpcServer, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.ready()
    assert [await probe(f"127.0.0.1:{server.port}"), await probe(f"127.0.0.1:{server.port}", SERVICE)] == [0, 0]
    assert capsys.readouterr().out == "SERVING\nSERVING\n"


async def test_a_server_that_drains_fails_the_probe(server: RpcServer) -> None:
    await server.ready()
    await server.health.drain()
    assert await probe(f"127.0.0.1:{server.port}") == 1


async def test_an_unknown_service_is_named_by_its_status(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    await server.ready()
    assert await probe(f"127.0.0.1:{server.port}", "quire.test.v1.NoSuchService") == 1
    assert capsys.readouterr().out.startswith("NOT_FOUND: ")


def test_nobody_there_fails_the_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.startswith("UNAVAILABLE: ")


def test_without_an_address_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "HOST:PORT [SERVICE]" in capsys.readouterr().err


async def test_it_is_a_command_of_its_own(server: RpcServer) -> None:
    await server.ready()
    command = [sys.executable, "-I", "-m", "common.rpc.probe", f"127.0.0.1:{server.port}"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "SERVING\n")


@pytest.mark.parametrize(
    ("path", "well", "status", "answer"),
    [
        ("/health", True, 0, "SERVING"),
        ("/health", False, 1, "NOT_SERVING"),
        ("/live", False, 0, "SERVING"),
        ("/nothing", True, 1, "HTTP 404"),
    ],
)
async def test_a_port_without_certificates_answers_by_http(
    path: str, well: bool, status: int, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = MetricsServer(new_registry(), lambda: well)
    port = await metrics.start("127.0.0.1", 0)
    assert await probe(f"http://127.0.0.1:{port}{path}") == status
    assert capsys.readouterr().out == f"{answer}\n"
    await metrics.stop()


def test_nobody_there_fails_the_probe_by_http(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1/health"]) == 1
    assert capsys.readouterr().out.startswith("UNAVAILABLE: ")
