"""The component for the Prometheus Operator: the targets, labels and rules of the files for a Prometheus without it."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from tests.suites.deployment.operate.files import DOCKER, PROMETHEUS, load_yaml
from tests.suites.deployment.operate.manifests import KUBECTL, SERVICES, Manifests, selects, with_components

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")

_SCRIPT = run_path(str(DOCKER / "prometheus_rule.py"))


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("operator"), "prometheus-operator")


@pytest.fixture(scope="module")
def monitor(manifests: Manifests) -> dict[str, Any]:
    """The monitor, of whose fields this module knows these alone."""
    found = manifests.one("PodMonitor", "quire")
    assert set(found["spec"]) == {"selector", "jobLabel", "podMetricsEndpoints"}
    for endpoint in found["spec"]["podMetricsEndpoints"]:
        assert set(endpoint) == {"port", "interval", "scrapeTimeout", "relabelings"}
    spec: dict[str, Any] = found["spec"]
    return spec


def test_each_service_is_scraped_at_its_port_for_metrics_and_nothing_else_is(
    manifests: Manifests, monitor: dict[str, Any]
) -> None:
    """As the operator does it: an endpoint is a port of a selected pod that has its name."""
    names = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    scraped = {
        name: [port["containerPort"] for port in container["ports"] if port["name"] in names]
        for name, _, container in manifests.containers()
        if selects(monitor["selector"], manifests.pods()[name]["metadata"]["labels"])
    }
    annotations = {name: manifests.pods()[name]["metadata"]["annotations"] for name in SERVICES}
    assert scraped == {name: [int(each["prometheus.io/port"])] for name, each in annotations.items()}


def test_series_have_the_labels_that_rules_and_dashboard_select(monitor: dict[str, Any]) -> None:
    (plain,) = load_yaml(PROMETHEUS / "kubernetes.yml")["scrape_configs"]
    wanted = {
        rule["target_label"]: rule["source_labels"] for rule in plain["relabel_configs"] if "target_label" in rule
    }
    job = "__meta_kubernetes_pod_label_" + monitor["jobLabel"].replace(".", "_").replace("/", "_")
    assert wanted["job"] == [job]
    for endpoint in monitor["podMetricsEndpoints"]:
        assert endpoint["relabelings"] == [{"sourceLabels": wanted["instance"], "targetLabel": "instance"}]


def test_targets_are_scraped_as_often_as_without_the_operator(monitor: dict[str, Any]) -> None:
    plain = load_yaml(PROMETHEUS / "kubernetes.yml")["global"]
    for endpoint in monitor["podMetricsEndpoints"]:
        assert (endpoint["interval"], endpoint["scrapeTimeout"]) == (plain["scrape_interval"], plain["scrape_timeout"])


def test_the_rules_are_those_of_the_files(manifests: Manifests) -> None:
    groups = [group for file in sorted((PROMETHEUS / "rules").glob("*.yml")) for group in load_yaml(file)["groups"]]
    assert len(groups) > 3
    assert manifests.one("PrometheusRule", "quire")["spec"] == {"groups": groups}


def test_the_rules_were_written_from_the_files_as_they_are() -> None:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    written = Path(_SCRIPT["WRITTEN"]).read_text()
    assert written == _SCRIPT["prometheus_rule"](files), "run `python docker/prometheus_rule.py`"


def test_a_group_is_copied_with_its_comments_and_empty_lines() -> None:
    text = (
        "# a file\ngroups:\n  - name: a\n    rules:\n      # why\n\n      - record: b\n        expr: |\n          1\n"
    )
    copied = _SCRIPT["groups"](text)
    assert "        # why\n\n        - record: b\n" in copied
    assert yaml.safe_load("spec:\n  groups:\n" + copied)["spec"]["groups"] == yaml.safe_load(text)["groups"]
