"""The dashboard and the provisioning around it: Grafana accepts wrong ones without a message, and shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from tests.suites.deployment.operate.files import OBSERVABILITY, ROOT, dashboard, load_yaml, panels, rules

PROVISIONING = OBSERVABILITY / "grafana/provisioning"


def data_sources() -> dict[str, dict[str, Any]]:
    found = load_yaml(PROVISIONING / "datasources/datasources.yml")["datasources"]
    return {each["uid"]: each for each in found}


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in the dashboard."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from nodes(each)


def test_every_data_source_that_is_named_is_provisioned() -> None:
    named = [node["datasource"] for node in nodes(dashboard()) if "datasource" in node]
    assert len(named) > len(panels())
    for each in named:
        assert data_sources()[each["uid"]]["type"] == each["type"]


def test_a_time_leads_to_its_trace() -> None:
    (destination,) = data_sources()["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert data_sources()[destination["datasourceUid"]]["type"] == "jaeger"
    assert destination["name"] == "trace_id"  # the label that router/observe/metrics.py gives its exemplars
    with_traces = [panel["title"] for panel in panels() if any(each.get("exemplar") for each in panel["targets"])]
    assert with_traces == ["Time to first token", "Inter-token latency (ITL)", "End to end", "Where waiting goes"]


def test_panels_have_ids_of_their_own_titles_and_explanations() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    assert [panel["title"] for panel in panels() if len(panel["description"]) < 20 or not panel["targets"]] == []


def test_panels_fill_the_grid_without_overlapping() -> None:
    boxes = [(panel["title"], panel["gridPos"]) for panel in dashboard()["panels"]]
    for (name, a), (other, b) in combinations(boxes, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, f"{name} and {other}"
    assert all(box["x"] + box["w"] <= 24 for _, box in boxes)


def test_alerts_that_a_panel_names_exist() -> None:
    alerts = {rule["alert"] for rule in rules("alert")}
    text = " ".join(panel["description"] for panel in panels())
    named = {word.strip("().:,") for word in text.split() if word.startswith(("Quire", "(Quire")) and len(word) > 8}
    assert named
    assert named <= alerts


def test_compose_mounts_what_is_provisioned() -> None:
    services = load_yaml(ROOT / "compose.yaml")["services"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in services["grafana"]["volumes"])
    assert (ROOT / "docker/observability/grafana/provisioning").is_dir()
    assert mounts["./docker/observability/grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = load_yaml(PROVISIONING / "dashboards/dashboards.yml")["providers"]
    assert provider["options"]["path"] == mounts["./docker/observability/grafana/dashboards"]
    for source in data_sources().values():
        host = source["url"].removeprefix("http://").split(":")[0]
        assert host in services
