"""The HTTP endpoint of metrics and health, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
import pytest
from prometheus_client import Counter

from common.contracts.errors import InvalidConfig, QuireError, Unavailable
from common.process.metrics import MetricsServer, is_loopback, metrics_port, new_registry
from common.process.small_http import Reply, Request


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
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0) as opened:
        yield opened


async def test_metrics_are_in_prometheus_format(client: httpx.AsyncClient, service: Service) -> None:
    service.steps.labels("w0").inc(3)
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'quire:steps_total{worker="w0"} 3.0' in response.text
    assert "process_resident_memory_bytes" in response.text
    assert "_created" not in response.text


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


async def test_a_port_that_is_taken_is_refused(server: MetricsServer, service: Service) -> None:
    with pytest.raises(InvalidConfig, match=f"--metrics-port: cannot listen on 127.0.0.1:{server.port}"):
        await MetricsServer(service.registry, lambda: True).start("127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("configured", "grpc", "port"), [(None, 50052, 51052), (None, 0, 0), (9, 50052, 9), (0, 50052, 0)]
)
def test_the_port_is_a_thousand_above_grpcs(configured: int | None, grpc: int, port: int) -> None:
    assert metrics_port(configured, grpc) == port


# ------------------------------------------------------------ actions


class Actions:
    """What POST does here: it counts, or raises what a test sets."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: QuireError | None = None

    async def act(self) -> object:
        if self.error is not None:
            raise self.error
        self.calls += 1
        return {"calls": self.calls}


@pytest.fixture
def actions(server: MetricsServer) -> Actions:
    found = Actions()
    server.add_actions({"/reset": found.act}, from_elsewhere=False)
    return found


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 65_536])
async def test_a_post_acts_and_passes_over_its_body(client: httpx.AsyncClient, actions: Actions, body: bytes) -> None:
    response = await client.post("/reset", content=body)
    assert (response.status_code, response.json()) == (200, {"calls": 1})


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_reading_changes_nothing(client: httpx.AsyncClient, actions: Actions, method: str) -> None:
    assert (await client.request(method, "/reset")).status_code == 405
    assert actions.calls == 0


async def test_a_page_in_a_browser_may_not_act(client: httpx.AsyncClient, actions: Actions) -> None:
    response = await client.post("/reset", headers={"Origin": "http://127.0.0.1"})
    assert (response.status_code, actions.calls) == (403, 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Length": "65537"}, 413), ({"Content-Length": "-1"}, 411), ({"Transfer-Encoding": "chunked"}, 411)],
)
async def test_a_body_without_a_bound_is_refused(
    server: MetricsServer, actions: Actions, headers: dict[str, str], status: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /reset HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    assert (await reader.readline()).split()[1] == str(status).encode()
    writer.close()
    assert actions.calls == 0


async def test_errors_of_an_action_have_their_status_and_words(client: httpx.AsyncClient, actions: Actions) -> None:
    actions.error = Unavailable("no KV manager answers")
    response = await client.post("/reset")
    assert response.status_code == 503
    assert response.json() == {"error": {"message": "no KV manager answers", "code": "unavailable"}}


@pytest.mark.parametrize(
    ("peer", "local"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False), ("", False), ("x", False)],
)
def test_loopback_is_told_from_other_addresses(peer: str, local: bool) -> None:
    assert is_loopback(peer) is local


async def test_a_site_answers_below_its_prefix_with_its_own_headers(
    client: httpx.AsyncClient, server: MetricsServer
) -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Reply(HTTPStatus.OK, "text/plain", b"here", (("X-Content-Type-Options", "nosniff"),))

    server.add_site("/page", answer)
    found = await client.get("/page/data?a=b&c=%20d", headers={"origin": "http://localhost:1"})
    assert (found.text, found.headers["x-content-type-options"]) == ("here", "nosniff")
    (request,) = asked
    assert (request.path, request.query, request.origin) == ("/page/data", "a=b&c=%20d", "http://localhost:1")
    assert request.host == f"127.0.0.1:{server.port}"
    assert (await client.get("/")).headers["location"] == "/page/"
    assert (await client.get("/pages")).text == "/metrics, /health, /work, /page/ and /live are here\n"
    assert (await client.post("/page/data")).status_code == HTTPStatus.METHOD_NOT_ALLOWED
    assert len(asked) == 1
