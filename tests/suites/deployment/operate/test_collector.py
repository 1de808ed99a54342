"""The configurations of collector and Jaeger: each part that is defined is used, each that is used is defined.

Neither program is installed here to read its own configuration; these checks work without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_spans_go_to_jaeger_alone_as_the_services_send_theirs_to_the_router_too() -> None:
    config = load_yaml(OBSERVABILITY / "otel-collector.yaml")
    jaeger = load_yaml(OBSERVABILITY / "jaeger.yaml")
    port = jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    targets = {name: each["endpoint"] for name, each in config["exporters"].items()}
    assert targets == {"otlp/jaeger": f"jaeger:{port}"}
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
        assert services()[service]["environment"]["QUIRE_TRACE_ENDPOINT"] == "router:50050"


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
