"""A real Prometheus over a running suite: every panel shows data, every rule is healthy, a slow time has a trace.

The configuration is that for clusters, with the suite's processes as pods, so that its relabelling is tested too. The
test takes half a minute, so it runs only on request: `pytest -m prometheus tests/suites/deployment/operate`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from cli.suite.stack import free_ports
from quire.decision.v1 import decision_pb2
from tests.suites.deployment.operate.conftest import burst, cancelled
from tests.suites.deployment.operate.exposition import targets
from tests.suites.deployment.operate.files import PROMETHEUS, load_yaml, panels, rules, without_variables
from tests.support.spans import called
from tests.support.suite import Suite

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (a package of Debian)"),
]
PATIENCE_S = 120.0
LOAD_S = 12.0


@asynccontextmanager
async def prometheus(suite: Suite, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus on the configuration for clusters, with the suite's pods, and a second between scrapes."""
    config = load_yaml(PROMETHEUS / "kubernetes.yml")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules/*.yml")]
    (scraping,) = config["scrape_configs"]
    del scraping["kubernetes_sd_configs"]
    scraping["static_configs"] = [*pods(suite)]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client:
            await _ready(client)
            yield client
    finally:
        process.terminate()
        await process.wait()


def pods(suite: Suite) -> Iterator[dict[str, Any]]:
    """Yield what a cluster would report of the suite's processes: a target for each of a pod's ports."""
    for job, addresses in targets(suite).items():
        for number, address in enumerate(addresses):
            host, _, port = address.rpartition(":")
            about = {
                "annotation_prometheus_io_scrape": "true",
                "annotation_prometheus_io_port": port,
                "ip": host,
                "label_app_kubernetes_io_name": job,
                "name": f"{job}-{number}",
            }
            for name in ("grpc", "metrics"):
                labels = {f"__meta_kubernetes_pod_{key}": value for key, value in about.items()}
                labels["__meta_kubernetes_pod_container_port_name"] = name
                yield {"targets": [f"{host}:1"], "labels": labels}
    yield {"targets": ["127.0.0.1:1"], "labels": {"__meta_kubernetes_pod_container_port_name": "grpc"}}  # no annotation


async def _ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if (await client.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def asked(client: httpx.AsyncClient, path: str, **parameters: str | float) -> Any:
    """Return the data of an answer of Prometheus."""
    answer = (await client.get(f"/api/v1/{path}", params=parameters)).json()
    assert answer["status"] == "success", answer
    return answer["data"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scraped(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus that has watched a loaded suite for some seconds."""
    async with prometheus(suite, tmp_path_factory.mktemp("prometheus")) as client:
        until = time.monotonic() + LOAD_S
        seed = 1
        while time.monotonic() < until:
            await burst(suite, seed)
            await cancelled(suite)
            seed += 1
        yield client


async def test_every_target_answers(scraped: httpx.AsyncClient) -> None:
    active = (await asked(scraped, "targets"))["activeTargets"]
    assert sorted((target["labels"]["instance"], target["labels"]["job"], target["health"]) for target in active) == [
        ("gpuworker-0", "gpuworker", "up"),
        ("gpuworker-1", "gpuworker", "up"),
        ("kvmanager-0", "kvmanager", "up"),
        ("router-0", "router", "up"),
    ]
    assert [target["lastError"] for target in active if target["lastError"]] == []


async def test_every_panel_shows_something(scraped: httpx.AsyncClient) -> None:
    empty = []
    for panel in panels():
        for target in panel["targets"]:
            expression = without_variables(target["expr"], rate_interval="30s")
            result = await asked(scraped, "query", query=expression)
            if not [each for each in result["result"] if each["value"][1] != "NaN"]:
                empty.append(f"{panel['title']}: {expression}")
    assert empty == []


async def test_every_rule_is_evaluated_and_a_healthy_suite_raises_no_alert(scraped: httpx.AsyncClient) -> None:
    groups = (await asked(scraped, "rules"))["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(rules("alert")) + len(rules("record"))
    assert [(rule["name"], rule.get("lastError")) for rule in evaluated if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in evaluated if rule.get("state") == "firing"] == []


async def test_autoscalers_get_one_value_of_each_metric(scraped: httpx.AsyncClient) -> None:
    """By the queries that prometheus-adapter makes of its rules; it takes one value of each."""
    values = {}
    for rule in load_yaml(PROMETHEUS / "adapter.yml")["externalRules"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"]).replace("<<.LabelMatchers>>", "")
        (found,) = (await asked(scraped, "query", query=query))["result"]
        values[rule["name"]["as"]] = float(found["value"][1])
    assert values["quire_kv_cache_usage"] <= 2.0, "two workers are full at most"
    assert min(values.values()) >= 0.0


async def test_a_slow_first_token_leads_to_its_trace(suite: Suite, scraped: httpx.AsyncClient) -> None:
    now = time.time()
    series = await asked(
        scraped,
        "query_exemplars",
        query='quire:time_to_first_token_seconds_bucket{job="router"}',
        start=now - 120,
        end=now,
    )
    exemplars = [exemplar for each in series for exemplar in each["exemplars"]]
    slowest = max(exemplars, key=lambda exemplar: float(exemplar["value"]))
    stub = suite.decisions
    request = decision_pb2.GetTraceRequest(trace_id=slowest["labels"]["trace_id"])
    names: set[str] = set()
    async with asyncio.timeout(PATIENCE_S):
        while not {"inference", "queue", "stream"} <= names:  # the last ones are on their way
            names = {called(span) for span in (await stub.GetTrace(request, timeout=10.0)).spans}
            await asyncio.sleep(0.1)
