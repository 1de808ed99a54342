"""The configurations of collector and Jaeger: each part that is defined is used, each that is used is defined.

Neither program is installed here to read its own configuration; these checks work without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.rpc.roles import Role, callers_of, dns_name
from tests.suites.deployment.operate.files import OBSERVABILITY, ROOT, load_yaml

FILES = ("otel-collector.yaml", "jaeger.yaml")


def services() -> dict[str, Any]:
    found: dict[str, Any] = load_yaml(ROOT / "compose.yaml")["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_all_parts_are_defined_and_used(name: str) -> None:
    config = load_yaml(OBSERVABILITY / name)
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert set(config[kind]) == {each for pipeline in pipelines for each in pipeline[kind]}
    assert set(config["extensions"]) == set(config["service"]["extensions"])


def test_spans_go_to_jaeger_and_to_the_router_which_answers_quire_trace() -> None:
    config = load_yaml(OBSERVABILITY / "otel-collector.yaml")
    jaeger = load_yaml(OBSERVABILITY / "jaeger.yaml")
    port = jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    targets = {name: each["endpoint"] for name, each in config["exporters"].items()}
    assert targets == {"otlp/jaeger": f"jaeger:{port}", "otlp/router": "router:50050"}
    assert config["service"]["pipelines"]["traces"]["processors"][0] == "memory_limiter"


def test_jaeger_stores_and_asks_in_one_place() -> None:
    config = load_yaml(OBSERVABILITY / "jaeger.yaml")
    (store,) = config["extensions"]["jaeger_storage"]["backends"]
    assert config["exporters"]["jaeger_storage_exporter"]["trace_storage"] == store
    assert config["extensions"]["jaeger_query"]["storage"]["traces"] == store


def test_the_environment_that_turns_it_on_names_the_collector_of_the_profile() -> None:
    lines = (OBSERVABILITY / "on.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    port = load_yaml(OBSERVABILITY / "otel-collector.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert values == {
        "COMPOSE_PROFILES": "observability",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://otel-collector:{port.rpartition(':')[2]}",
    }
    assert services()["otel-collector"]["profiles"] == ["observability"]
    for service in ("router", "kvmanager", "gpuworker"):
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in services()[service]["environment"]


def test_the_collector_has_a_certificate_with_which_the_router_takes_its_spans() -> None:
    tls = load_yaml(OBSERVABILITY / "otel-collector.yaml")["exporters"]["otlp/router"]["tls"]
    (certs,) = [each for each in services()["otel-collector"]["volumes"] if isinstance(each, dict)]
    assert (certs["source"], certs["volume"], certs["read_only"]) == ("certs", {"subpath": Role.COLLECTOR}, True)
    files = [tls[f"{what}_file"] for what in ("ca", "cert", "key")]
    assert files == [f"{certs['target']}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")]
    assert tls["server_name_override"] == dns_name(Role.ROUTER)
    assert not tls.get("insecure")
    assert Role.COLLECTOR in callers_of("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
    assert set(services()["otel-collector"]["depends_on"]) == {"certs"}


def test_what_compose_mounts_is_there_and_is_read() -> None:
    for service in ("otel-collector", "jaeger"):
        (mount,) = [each for each in services()[service]["volumes"] if isinstance(each, str)]
        here, there, _ = mount.split(":")
        assert (ROOT / Path(here)).is_file()
        assert services()[service]["command"] == [f"--config={there}"]


def test_the_collector_keeps_to_the_memory_of_its_container() -> None:
    limit = services()["otel-collector"]["deploy"]["resources"]["limits"]["memory"]
    allowed = load_yaml(OBSERVABILITY / "otel-collector.yaml")["processors"]["memory_limiter"]
    assert allowed["limit_mib"] < int(limit.removesuffix("M"))
