"""The HTTP endpoint of metrics and health, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import Counter

from common.errors import InvalidConfig
from common.process.metrics import MetricsServer, metrics_port, new_registry


class Service:
    """What the endpoint serves: one counter, and health that a test switches."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.steps = Counter("quire:steps", "Steps run.", ["worker"], registry=self.registry)
        self.healthy = False


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[MetricsServer]:
    running = MetricsServer(service.registry, lambda: service.healthy)
    await running.start("127.0.0.1", 0)
    yield running
    await running.stop()


@pytest.fixture
async def client(server: MetricsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as opened:
        yield opened


async def test_metrics_are_in_prometheus_format(client: httpx.AsyncClient, service: Service) -> None:
    service.steps.labels("w0").inc(3)
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'quire:steps_total{worker="w0"} 3.0' in response.text
    assert "process_resident_memory_bytes" in response.text


@pytest.mark.parametrize("escaping", ["", "; escaping=allow-utf-8", "; escaping=underscores"])
async def test_names_are_the_same_in_openmetrics_whoever_asks(
    client: httpx.AsyncClient, service: Service, escaping: str
) -> None:
    service.steps.labels("w0").inc(3, {"trace_id": "ab"})
    accept = f"application/openmetrics-text; version=1.0.0{escaping}, text/plain; version=0.0.4; q=0.5"
    response = await client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert 'quire:steps_total{worker="w0"} 3.0 # {trace_id="ab"} 3.0' in response.text
    assert response.text.endswith("# EOF\n")


async def test_health_follows_the_service(client: httpx.AsyncClient, service: Service) -> None:
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "not ready"})
    service.healthy = True
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
async def test_anything_else_is_refused(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    assert (await client.request(method, path)).status_code == status


async def test_head_has_no_body(client: httpx.AsyncClient) -> None:
    response = await client.head("/metrics")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0


async def test_a_header_without_end_is_cut_off(server: MetricsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"x" * (1 << 16))
    async with asyncio.timeout(60.0):
        try:
            answer = await reader.read()
        except ConnectionError:  # a reset, since not all that was sent was read
            answer = b""
    assert answer == b""
    writer.close()


async def test_a_port_that_is_taken_is_refused(server: MetricsServer, service: Service) -> None:
    with pytest.raises(InvalidConfig, match=f"--metrics-port: cannot listen on 127.0.0.1:{server.port}"):
        await MetricsServer(service.registry, lambda: True).start("127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("configured", "grpc", "port"), [(None, 50052, 51052), (None, 0, 0), (9, 50052, 9), (0, 50052, 0)]
)
def test_the_port_is_a_thousand_above_grpcs(configured: int | None, grpc: int, port: int) -> None:
    assert metrics_port(configured, grpc) == port
