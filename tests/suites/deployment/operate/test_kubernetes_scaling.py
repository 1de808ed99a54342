"""The components for autoscalers: each metric that they name exists, and proposes the replicas that it should."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from tests.suites.deployment.operate.files import PROMETHEUS, load_yaml, rules
from tests.suites.deployment.operate.manifests import KUBECTL, Manifests, variant, with_components
from tests.suites.deployment.operate.promql import selectors
from tests.suites.deployment.operate.test_kubernetes import KUBERNETES
from tests.suites.deployment.operate.test_rules import needs_promtool, promtool

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")

QUEUE, BLOCKS, SEQUENCES, REQUESTS = (
    "pool:queue:per_worker",
    "pool:kv_cache_usage:sum",
    "pool:sequences:sum",
    "router:requests:sum",
)
# Kubernetes does nothing while a ratio is as near to 1.
TOLERANCE: Final = Decimal("0.1")

Target = tuple[str, Decimal]


@pytest.fixture(scope="module")
def autoscale(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("autoscale"), "autoscale")


@pytest.fixture(scope="module")
def keda(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("keda"), "keda")


def recorded() -> set[str]:
    return {rule["record"] for rule in rules("record")}


def adapted() -> dict[str, str]:
    """Return the recorded value behind each metric that prometheus-adapter serves."""
    return {rule["name"]["as"]: rule["seriesQuery"] for rule in load_yaml(PROMETHEUS / "adapter.yml")["externalRules"]}


def amount(text: str) -> Decimal:
    """Return a quantity of Kubernetes: 750m is 0.75."""
    return Decimal(text.removesuffix("m")) / 1000 if text.endswith("m") else Decimal(text)


def targets(autoscaler: dict[str, Any]) -> dict[str, Target]:
    """Return kind and value of the target of each recorded value that an autoscaler follows, and of the CPU."""
    found: dict[str, Target] = {}
    for metric in autoscaler["spec"]["metrics"]:
        if metric["type"] == "Resource":
            target = metric["resource"]["target"]
            found[metric["resource"]["name"]] = (target["type"], Decimal(target["averageUtilization"]))
        else:
            target = metric["external"]["target"]
            value = target["value" if target["type"] == "Value" else "averageValue"]
            found[adapted()[metric["external"]["metric"]["name"]]] = (target["type"], amount(value))
    return found


# ---------------------------------------------------------------- the metrics


def test_the_adapter_serves_recorded_values_and_asks_for_nothing_else() -> None:
    """What the recorded values are made of is exported: test_figures.py asks a running suite."""
    for rule in load_yaml(PROMETHEUS / "adapter.yml")["externalRules"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"]).replace("<<.LabelMatchers>>", "")
        assert [each.name for each in selectors(query)] == [rule["seriesQuery"]]
        assert rule["resources"] == {"namespaced": False}, "the values have no label `namespace`"
    assert set(adapted().values()) == {QUEUE, BLOCKS, SEQUENCES, REQUESTS} <= recorded()


@needs_kubectl
def test_autoscalers_ask_for_each_metric_of_the_adapter_and_for_no_other(autoscale: Manifests) -> None:
    asked = {
        metric["external"]["metric"]["name"]
        for each in autoscale.of("HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
        if metric["type"] != "Resource"
    }
    assert asked == set(adapted())


@needs_promtool
def test_recorded_values_add_up_over_the_pool(tmp_path: Path) -> None:
    """Two routers and three workers, one of which cannot be scraped; KV managers have figures of the same names."""
    waiting, running, usage = "quire:num_requests_waiting", "quire:num_requests_running", "quire:kv_cache_usage_perc"
    series = {
        **{f'up{{job="gpuworker",instance="{name}"}}': value for name, value in (("a", 1), ("b", 1), ("c", 0))},
        **{f'{waiting}{{job="router",instance="{name}"}}': value for name, value in (("r", 5), ("s", 2))},
        **{f'{running}{{job="router",instance="{name}"}}': value for name, value in (("r", 30), ("s", 20))},
        **{f'{waiting}{{job="gpuworker",instance="{name}"}}': value for name, value in (("a", 3), ("b", 0))},
        **{f'{running}{{job="gpuworker",instance="{name}"}}': value for name, value in (("a", 40), ("b", 10))},
        **{f'{usage}{{job="gpuworker",instance="{name}"}}': value for name, value in (("a", 0.5), ("b", 0.25))},
        f'{usage}{{job="kvmanager",worker="a"}}': 0.9,
        f'{waiting}{{job="kvmanager",worker="a",reason="capacity"}}': 99,
        f'{running}{{job="kvmanager",worker="a"}}': 99,
    }
    wanted = {QUEUE: 5, BLOCKS: 0.75, SEQUENCES: 60, REQUESTS: 57}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value}x8"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": name, "eval_time": "1m", "exp_samples": [{"labels": name, "value": value}]}
            for name, value in wanted.items()
        ],
    }
    case = {"rule_files": [str(PROMETHEUS / "rules/recording.yml")], "evaluation_interval": "15s", "tests": [test]}
    written = tmp_path / "case.yml"
    written.write_text(json.dumps(case))
    promtool("test", "rules", written)


# ---------------------------------------------------------------- what they propose


def proposed(target: Target, value: Decimal, ready: int) -> int:
    """Return the replicas that Kubernetes makes of an external metric, where all replicas are ready."""
    kind, wanted = target
    ratio = value / wanted if kind == "Value" else value / (wanted * ready)
    return ready if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready)


def desired(autoscaler: dict[str, Any], values: dict[str, Decimal], ready: int) -> int:
    """Return the greatest proposal within the bounds."""
    spec = autoscaler["spec"]
    most = max(proposed(target, values[name], ready) for name, target in targets(autoscaler).items() if name in values)
    return int(min(max(most, spec["minReplicas"]), spec["maxReplicas"]))


@needs_kubectl
@pytest.mark.parametrize(
    ("queue", "blocks", "sequences", "ready", "wanted"),
    [
        ("0", "0", "0", 4, 2),  # idle: the least
        ("0", "3.0", "100", 4, 4),  # blocks as full as they should be
        ("0", "3.9", "100", 4, 6),  # the blocks of four workers are all but used up
        ("0", "1.2", "192", 4, 4),  # as many sequences as four workers should have
        ("0", "1.2", "256", 4, 6),  # no worker takes another sequence, though blocks are free
        ("2", "2.0", "100", 4, 8),  # requests wait, whatever they wait for
        ("1", "2.0", "100", 4, 4),  # a short queue is not a reason
        ("50", "8.0", "900", 8, 8),  # never more than the most
        ("0", "0.7", "40", 4, 2),  # a lull
    ],
)
def test_workers_follow_the_queue_the_blocks_and_the_sequences(
    autoscale: Manifests, queue: str, blocks: str, sequences: str, ready: int, wanted: int
) -> None:
    values = {QUEUE: Decimal(queue), BLOCKS: Decimal(blocks), SEQUENCES: Decimal(sequences)}
    scaler = autoscale.one("HorizontalPodAutoscaler", "gpuworker")
    assert set(targets(scaler)) == set(values)
    assert desired(scaler, values, ready) == wanted


@needs_kubectl
@pytest.mark.parametrize(("requests", "wanted"), [(0, 2), (3000, 2), (4000, 3), (6001, 5), (60_000, 6)])
def test_routers_follow_the_requests_that_they_hold(autoscale: Manifests, requests: int, wanted: int) -> None:
    assert desired(autoscale.one("HorizontalPodAutoscaler", "router"), {REQUESTS: Decimal(requests)}, 2) == wanted


# ---------------------------------------------------------------- the manifests


@needs_kubectl
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(autoscale: Manifests, version: str) -> None:
    for each in autoscale.all:
        kubernetes_validate.validate(each, version, strict=True)
    assert {each["metadata"].get("namespace") for each in autoscale.all if each["kind"] != "Namespace"} == {"quire"}


@needs_kubectl
def test_an_apply_does_not_reset_what_an_autoscaler_has_set(autoscale: Manifests, keda: Manifests) -> None:
    for manifests, kind in ((autoscale, "HorizontalPodAutoscaler"), (keda, "ScaledObject")):
        scaled = {each["spec"]["scaleTargetRef"]["name"] for each in manifests.of(kind)}
        assert scaled == {"gpuworker", "router"}
        for name in scaled:
            assert "replicas" not in manifests.one("Deployment", name)["spec"]
    assert "replicas" in variant("base").one("Deployment", "gpuworker")["spec"], "without an autoscaler it has some"


@needs_kubectl
def test_keda_scales_as_the_other_component_does(autoscale: Manifests, keda: Manifests) -> None:
    assert keda.of("HorizontalPodAutoscaler") == [], "two autoscalers of one Deployment would contend"
    for name in ("gpuworker", "router"):
        scaler, scaled = autoscale.one("HorizontalPodAutoscaler", name)["spec"], keda.one("ScaledObject", name)["spec"]
        assert scaled["scaleTargetRef"] == scaler["scaleTargetRef"]
        assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (scaler["minReplicas"], scaler["maxReplicas"])
        assert scaled["advanced"] == {"horizontalPodAutoscalerConfig": {"behavior": scaler["behavior"]}}
        assert dict(map(_triggered, scaled["triggers"])) == targets({"spec": scaler})


def _triggered(trigger: dict[str, Any]) -> tuple[str, Target]:
    """Return what a trigger of KEDA follows, and its target."""
    about = trigger["metadata"]
    if trigger["type"] == "cpu":
        return "cpu", (trigger["metricType"], Decimal(about["value"]))
    assert set(about) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
    assert about["ignoreNullValues"] == "false", "a value that is missing would count as 0, and stop workers"
    (selector,) = selectors(about["query"])
    return selector.name, (trigger["metricType"], Decimal(about["threshold"]))


@needs_kubectl
def test_the_components_go_with_each_other(tmp_path: Path) -> None:
    built = with_components(
        tmp_path, "standby", "autoscale", "decision-log", "tracing", "prefill", "prometheus-operator"
    )
    assert len(built.of("HorizontalPodAutoscaler")) == 2
