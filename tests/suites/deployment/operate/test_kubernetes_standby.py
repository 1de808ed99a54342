"""The component for a second KV manager: a group of two with names that workers and router know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from common.settings.config import load
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.operate.manifests import KUBECTL, Manifests, selects, with_components
from tests.suites.deployment.operate.network import NAMESPACE_NAME, Pod, edges
from tests.suites.deployment.operate.test_kubernetes import KUBERNETES, image_environment

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")

GRPC_PORT = 50052


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("standby"), "standby")


def managers(manifests: Manifests) -> dict[str, Any]:
    found: dict[str, Any] = manifests.one("StatefulSet", "kvmanager")["spec"]
    return found


def names(manifests: Manifests) -> tuple[str, ...]:
    """Return HOST:PORT of each manager, as Kubernetes names the pods of a stateful set."""
    spec = managers(manifests)
    return tuple(f"kvmanager-{index}.{spec['serviceName']}:{GRPC_PORT}" for index in range(spec["replicas"]))


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(manifests: Manifests, version: str) -> None:
    for each in manifests.all:
        kubernetes_validate.validate(each, version, strict=True)
    assert {each["metadata"].get("namespace") for each in manifests.all if each["kind"] != "Namespace"} == {"quire"}


def test_two_managers_of_one_group_take_the_place_of_the_one(manifests: Manifests) -> None:
    spec = managers(manifests)
    assert (spec["replicas"], "strategy" in spec) == (2, False)
    assert [each["metadata"]["name"] for each in manifests.of("Deployment")] == ["gpuworker", "redis", "router"]
    settings = load(KvManagerSettings, environ=image_environment("kvmanager") | manifests.environment("kvmanager"))
    assert (settings.group, settings.host, settings.group_address) == ("quire", "0.0.0.0", None)


@pytest.mark.parametrize(("name", "kind"), [("router", RouterSettings), ("gpuworker", GpuWorkerSettings)])
def test_workers_and_routers_know_both_managers_by_name(
    manifests: Manifests, name: str, kind: type[RouterSettings | GpuWorkerSettings]
) -> None:
    settings = load(kind, environ=image_environment(name) | manifests.environment(name))
    assert settings.manager == names(manifests)


def test_a_manager_keeps_its_name_while_it_is_not_ready(manifests: Manifests) -> None:
    """A Service with one address for both would lead workers to the standby, so there is none."""
    pod, spec = manifests.pods()["kvmanager"], managers(manifests)
    of_managers = [
        each
        for each in manifests.of("Service")
        if selects({"matchLabels": each["spec"]["selector"]}, pod["metadata"]["labels"])
    ]
    (service,) = of_managers
    assert service["metadata"]["name"] == spec["serviceName"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [port["port"] for port in service["spec"]["ports"]] == [GRPC_PORT]


def test_one_manager_stops_at_a_time_and_the_other_one_is_ready_by_then(manifests: Manifests) -> None:
    spec, pod = managers(manifests), manifests.pods()["kvmanager"]
    budget = manifests.one("PodDisruptionBudget", "kvmanager")["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (budget["selector"], spec["selector"]):
        chosen = [name for name, each in manifests.pods().items() if selects(selector, each["metadata"]["labels"])]
        assert chosen == ["kvmanager"]
    # The default of a stateful set: one pod after the other, each once the one before is ready.
    assert "updateStrategy" not in spec
    (container,) = pod["spec"]["containers"]
    asked = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert asked == {"startup": "/live", "readiness": "/health", "liveness": "/live"}
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], pod["metadata"]["labels"])
    assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_the_standby_may_follow_the_leader_and_no_other_edge_is_new(manifests: Manifests) -> None:
    here = {NAMESPACE_NAME: "quire"}
    labels = {name: pod["metadata"]["labels"] for name, pod in manifests.pods().items()}
    pods = [Pod(name, labels[name], here, ours=True) for name in ("router", "gpuworker", "redis")]
    pods += [Pod(f"kvmanager-{index}", labels["kvmanager"], here, ours=True) for index in range(2)]
    found = set(edges(manifests.of("NetworkPolicy"), pods, {6379, 50050, 50051, GRPC_PORT, 50053, 51052}))
    both = [("kvmanager-0", "kvmanager-1", GRPC_PORT), ("kvmanager-1", "kvmanager-0", GRPC_PORT)]
    of_managers = {
        edge
        for index in range(2)
        for edge in (
            ("gpuworker", f"kvmanager-{index}", GRPC_PORT),
            ("router", f"kvmanager-{index}", GRPC_PORT),
            (f"kvmanager-{index}", "redis", 6379),
        )
    }
    assert found == {*both, *of_managers, ("router", "gpuworker", 50053), ("router", "redis", 6379)}


@pytest.mark.parametrize("order", [("standby", "decision-log"), ("decision-log", "standby")])
def test_both_managers_keep_a_decision_log_where_there_is_one(tmp_path: Path, order: tuple[str, ...]) -> None:
    pod = with_components(tmp_path, *order).pods()["kvmanager"]
    assert "decisions" in {volume["name"] for volume in pod["spec"]["volumes"]}
