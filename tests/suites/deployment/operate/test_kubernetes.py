"""The Kubernetes manifests: valid by Kubernetes' own schemas, and in agreement with images, options and each other."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from common.rpc.health import LIVE
from common.rpc.roles import Role, dns_name
from common.settings.config import load
from common.settings.decision_log import DecisionLogSettings
from common.settings.options import ServiceSettings
from gpuworker.config import GpuWorkerSettings
from gpuworker.plane.rank_hosts import Hosts
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.operate.files import DOCKER, ROOT, load_yaml
from tests.suites.deployment.operate.manifests import (
    K8S,
    KUBECTL,
    SERVICES,
    VARIANTS,
    Manifests,
    built,
    selects,
    variant,
    with_components,
)
from tests.suites.deployment.operate.network import NAMESPACE_NAME, Pod, edges

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds kustomizations, is not installed")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "kvmanager": KvManagerSettings,
    "gpuworker": GpuWorkerSettings,
}
# The oldest version with every field used here, and the newest version with published schemas.
KUBERNETES = ("1.30", "1.37")
# What a service may need after its drain_timeout (common.rpc.server, cli.suite.stack).
LAST_REPLIES_S = 5

COMPONENTS = (
    "tracing",
    "cert-manager",
    "decision-log",
    "standby",
    "autoscale",
    "keda",
    "prefill",
    "prometheus-operator",
    "ranks",
)
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture
def manifests(name: str) -> Manifests:
    return variant(name)


@each_variant
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(manifests: Manifests, version: str) -> None:
    for each in manifests.all:
        kubernetes_validate.validate(each, version, strict=True)


@each_variant
def test_a_build_is_always_the_same_and_all_in_one_namespace(name: str, manifests: Manifests) -> None:
    assert Manifests(built(K8S / name)).all == manifests.all
    namespaces = {each["metadata"].get("namespace") for each in manifests.all if each["kind"] != "Namespace"}
    assert namespaces == {manifests.of("Namespace")[0]["metadata"]["name"]}


def test_every_folder_is_built_here() -> None:
    folders = {str(path.parent.relative_to(K8S)) for path in K8S.glob("**/kustomization.yaml")}
    assert folders == {*VARIANTS, *(f"components/{each}" for each in COMPONENTS)}


# ---------------------------------------------------------------- images and ports


def exposed_ports(service: str) -> list[int]:
    """Return gRPC's port and the one for HTTP, as the image says."""
    (ports,) = re.findall(r"^EXPOSE (\d+) (\d+)$", (DOCKER / f"{service}.Dockerfile").read_text(), re.MULTILINE)
    return [int(port) for port in ports]


@each_variant
def test_images_are_those_of_the_compose_stack(manifests: Manifests) -> None:
    built_by_compose = {service["image"] for service in load_yaml(ROOT / "compose.yaml")["services"].values()}
    assert {container["image"] for _, _, container in manifests.containers()} <= built_by_compose


DATA_PORT = 50054
"""Where workers fetch blocks from each other."""


@each_variant
def test_ports_are_those_of_the_images(manifests: Manifests) -> None:
    for name in SERVICES:
        ports = exposed_ports(name)
        grpc, figures = ports
        if name == "router":  # its image does not expose the admin plane
            settings = RouterSettings(model=Path())
            figures = settings.used_admin_http_port
            ports = [*ports, settings.used_admin_port, figures]
        if name == "gpuworker":  # nor that of peers
            ports = [*ports, DATA_PORT]
        (container,) = manifests.pods()[name]["spec"]["containers"]
        assert [port["containerPort"] for port in container["ports"]] == ports
        way, port = {"router": ("grpc", grpc)}.get(name, ("httpGet", "metrics"))
        assert {probe[way]["port"] for probe in probes(container).values()} == {port}
        assert manifests.pods()[name]["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(figures),
        }


@each_variant
def test_services_lead_to_ports_of_pods_that_exist(manifests: Manifests) -> None:
    for service in manifests.of("Service"):
        (pod,) = [
            pod
            for pod in manifests.pods().values()
            if selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
        ]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


@each_variant
def test_whatever_selects_pods_selects_those_of_one_deployment(manifests: Manifests) -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in manifests.pods().items()}
    for kind in ("Deployment", "PodDisruptionBudget"):
        for each in manifests.of(kind):
            name = each["metadata"]["name"]
            assert [pod for pod in pods if selects(each["spec"]["selector"], pods[pod])] == [name]
    for name, pod in manifests.pods().items():
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            assert [other for other in pods if selects(spread["labelSelector"], pods[other])] == [name]
    assert [each["spec"]["scaleTargetRef"]["name"] for each in manifests.of("HorizontalPodAutoscaler")] == ["router"]
    assert "replicas" not in manifests.one("Deployment", "router")["spec"]


# ---------------------------------------------------------------- options


def image_environment(service: str) -> dict[str, str]:
    """Return the options that an image sets for its process, not those of a build's step."""
    text = (DOCKER / f"{service}.Dockerfile").read_text()
    return dict(re.findall(r"^(?:ENV| ) +(QUIRE_\w+)=(\S+)", text, re.MULTILINE))


@each_variant
@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_an_option_with_a_value_that_it_takes(manifests: Manifests, service: str) -> None:
    load(SETTINGS[service], environ=image_environment(service) | manifests.environment(service))


def test_a_worker_shows_its_pods_name_and_address() -> None:
    settings = load(
        GpuWorkerSettings, environ=image_environment("gpuworker") | variant("base").environment("gpuworker")
    )
    assert settings.worker_id == "the-metadata.name"
    assert settings.advertise == f"the-status.podIP:{exposed_ports('gpuworker')[0]}"


@each_variant
def test_services_find_each_other_by_the_services_of_the_cluster(manifests: Manifests) -> None:
    def address(name: str) -> str:
        service = manifests.one("Service", name)
        return f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"

    for name in SERVICES:
        settings = load(SETTINGS[name], environ=image_environment(name) | manifests.environment(name))
        user = {"kvmanager": "manager", "router": "router"}.get(name)
        # A worker has no business with Redis.
        assert settings.redis_url == (f"redis://{user}:password@{address('redis')}/0" if user else None)
        if isinstance(settings, GpuWorkerSettings):
            assert settings.manager == (address("kvmanager"),)
        if isinstance(settings, KvManagerSettings):
            assert settings.model is None  # its image has no checkpoint


@each_variant
def test_files_are_written_to_volumes_and_read_from_where_they_are(manifests: Manifests) -> None:
    for name, pod, container in manifests.containers():
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod["volumes"]}
        if name == "kvmanager":
            assert image_environment(name)["QUIRE_STATE_DIR"] in mounts
        if name in ("router", "gpuworker"):
            folder = image_environment(name)["QUIRE_MODEL"]
            # The image's own demo model, or a volume over it that nothing here may write to.
            assert f"cli/demo_model/checkpoint {folder}" in (DOCKER / f"{name}.Dockerfile").read_text()
            assert mounts.get(folder, {"readOnly": True})["readOnly"]


def test_the_gpu_variant_mounts_one_checkpoint_at_router_and_worker() -> None:
    manifests = variant("overlays/gpu")
    claims = {
        name: [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        for name, pod, _ in manifests.containers()
    }
    wanted = [{"claimName": "model", "readOnly": True}]
    assert claims == {"router": wanted, "gpuworker": wanted, "kvmanager": [], "redis": []}
    assert manifests.one("PersistentVolumeClaim", "model")["spec"]["accessModes"] == ["ReadOnlyMany"]


def test_the_gpu_variant_asks_for_a_gpu_and_the_others_for_none() -> None:
    for name in VARIANTS:
        (container,) = variant(name).pods()["gpuworker"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == ("1" if name == "overlays/gpu" else None)
        assert container["image"] == f"quire/gpuworker:{'cuda' if name == 'overlays/gpu' else 'cpu'}"


# ---------------------------------------------------------------- a pod's life


def probes(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}


@each_variant
def test_probes_ask_for_health_that_exists(manifests: Manifests) -> None:
    """Readiness is the server's own; liveness must hold while a process waits for others to come back."""
    for name in SERVICES:
        (container,) = manifests.pods()[name]["spec"]["containers"]
        asked = {kind: _asked(probe) for kind, probe in probes(container).items()}
        assert (asked["readiness"], asked["liveness"]) == ("", LIVE)
        # A router without workers has started; a worker has when its model is loaded.
        assert asked["startup"] == (LIVE if name == "router" else "")


def _asked(probe: dict[str, Any]) -> str:
    """Return what a probe asks for, over gRPC or HTTP: the whole server ("") or `live`."""
    if "grpc" in probe:
        return str(probe["grpc"].get("service", ""))
    return {"/health": "", "/live": LIVE}[probe["httpGet"]["path"]]


@each_variant
def test_each_pod_has_the_secret_of_its_role_alone(manifests: Manifests) -> None:
    roles = {"router": "router", "kvmanager": "manager", "gpuworker": "worker"}
    of_pods = {name: f"quire-{role}-tls" for name, role in roles.items()} | {"redis": "quire-redis-users"}
    for name, pod, container in manifests.containers():
        secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
        assert secrets == ([of_pods[name]] if name in of_pods else [])
        if name in roles:
            (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "certs"]
            settings = load(SETTINGS[name], environ=image_environment(name) | manifests.environment(name))
            assert mount["readOnly"] is True
            assert [settings.tls_cert, settings.tls_key, settings.tls_ca] == [
                Path(mount["mountPath"]) / file for file in ("tls.crt", "tls.key", "ca.crt")
            ]


def test_cert_manager_makes_a_certificate_of_each_role(tmp_path: Path) -> None:
    made = with_components(tmp_path, "cert-manager").of("Certificate")
    leaves = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in made if "dnsNames" in each["spec"]}
    assert leaves == {f"quire-{role}-tls": [dns_name(role)] for role in Role}


def test_decision_logs_have_a_volume_with_room_for_them(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "decision-log")
    for version in KUBERNETES:
        for each in manifests.all:
            kubernetes_validate.validate(each, version, strict=True)
    for name, pod, container in manifests.containers():
        if name not in SETTINGS:
            continue
        settings = load(SETTINGS[name], environ=image_environment(name) | manifests.environment(name))
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        if not isinstance(settings, DecisionLogSettings):
            assert "/var/log/quire" not in mounts
            continue
        volume = mounts[str(settings.decision_log)]
        (limit,) = (each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if each["name"] == volume)
        assert limit == "512Mi"
        assert settings.decision_log_size == 256 << 20


@each_variant
def test_a_worker_has_minutes_to_load_its_model(manifests: Manifests) -> None:
    (container,) = manifests.pods()["gpuworker"]["spec"]["containers"]
    startup = container["startupProbe"]
    minutes = startup["periodSeconds"] * startup["failureThreshold"] / 60
    assert minutes == (30 if "nvidia.com/gpu" in container["resources"]["limits"] else 10)


@each_variant
def test_a_pod_may_drain_before_it_is_killed(manifests: Manifests) -> None:
    for name in ("router", "gpuworker"):
        settings = load(SETTINGS[name], environ=image_environment(name) | manifests.environment(name))
        spec = manifests.pods()[name]["spec"]
        before = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= before + settings.drain_timeout + LAST_REPLIES_S


# ---------------------------------------------------------------- what a pod may do


@each_variant
def test_pods_keep_to_the_restricted_standard(manifests: Manifests) -> None:
    labels = manifests.of("Namespace")[0]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for _, pod, container in manifests.containers():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_variant
def test_the_cluster_adds_no_variables_that_could_be_taken_for_options(manifests: Manifests) -> None:
    """A Service `quire-router` would make QUIRE_ROUTER_PORT=tcp://..., which is an option of the router."""
    assert [name for name, pod, _ in manifests.containers() if pod["enableServiceLinks"] is not False] == []


@each_variant
def test_every_container_says_what_it_needs(manifests: Manifests) -> None:
    for _, _, container in manifests.containers():
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


# ---------------------------------------------------------------- who may talk to whom

QUIRE = {NAMESPACE_NAME: "quire"}
DNS = Pod("dns", {"k8s-app": "kube-dns"}, {NAMESPACE_NAME: "kube-system"})
OUTSIDE = [
    Pod("client", {}, {NAMESPACE_NAME: "shop", "quire.dev/clients": "true"}),
    Pod("operator", {}, {NAMESPACE_NAME: "operations", "quire.dev/operators": "true"}),
    Pod("stranger", {}, {NAMESPACE_NAME: "other"}),
    Pod("prometheus", {"app.kubernetes.io/name": "prometheus"}, {NAMESPACE_NAME: "monitoring"}),
    DNS,
]
PORTS = {53, 80, 443, 4317, 6379, 8000, 50050, 50051, 50052, 50053, 50054, 51051, 51052, 51053}
APPS = ("router", "kvmanager", "gpuworker", "redis")
DIAGRAM = {
    ("client", "router", 50051),
    ("client", "router", 8000),
    ("operator", "router", 50050),
    ("router", "gpuworker", 50053),
    ("gpuworker", "kvmanager", 50052),
    ("gpuworker", "gpuworker", DATA_PORT),
    ("router", "kvmanager", 50052),
    ("router", "redis", 6379),
    ("kvmanager", "redis", 6379),
}
SCRAPED = {("prometheus", "router", 51051), ("prometheus", "kvmanager", 51052), ("prometheus", "gpuworker", 51053)}
ASKED = {(app, "dns", 53) for app in APPS}


def all_edges(manifests: Manifests) -> set[tuple[str, str, int]]:
    ours = [Pod(name, pod["metadata"]["labels"], QUIRE, ours=True) for name, pod in manifests.pods().items()]
    ours.append(replace(next(each for each in ours if each.name == "gpuworker")))  # another pod of the same kind
    bystander = Pod("bystander", {"app": "debug"}, QUIRE, ours=True)
    return set(edges(manifests.of("NetworkPolicy"), [*ours, bystander, *OUTSIDE], PORTS))


@each_variant
def test_the_edges_of_the_diagram_are_open_and_no_others(manifests: Manifests) -> None:
    assert all_edges(manifests) == DIAGRAM | SCRAPED | ASKED | {("bystander", "dns", 53)}


@each_variant
def test_dns_is_asked_over_udp_too(manifests: Manifests) -> None:
    (rule,) = manifests.one("NetworkPolicy", "dns")["spec"]["egress"]
    assert [(port["protocol"], port["port"]) for port in rule["ports"]] == [("UDP", 53), ("TCP", 53)]


def test_tracing_adds_one_edge_and_options_that_exist(tmp_path: Path) -> None:
    traced = with_components(tmp_path, "tracing")
    sent = {(name, "prometheus", 4317) for name in SERVICES}  # represents every pod of that namespace
    assert all_edges(traced) - all_edges(variant("base")) == sent
    for name in SERVICES:
        environment = image_environment(name) | traced.environment(name)
        assert load(SETTINGS[name], environ=environment).trace_sample_ratio == 0.1
        assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel-collector.monitoring:4317"
    for each in traced.all:
        kubernetes_validate.validate(each, KUBERNETES[0], strict=True)


# ---------------------------------------------------------------- workers that compute prompts

PREFILL, ROLE = "gpuworker-prefill", "quire.dev/disaggregation"


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("prefill"), "prefill")


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_with_prefill_workers_is_valid(prefill: Manifests, version: str) -> None:
    for each in prefill.all:
        kubernetes_validate.validate(each, version, strict=True)
    assert {each["metadata"].get("namespace") for each in prefill.all if each["kind"] != "Namespace"} == {"quire"}


def test_prefill_workers_are_the_workers_of_the_base_but_for_their_role(prefill: Manifests) -> None:
    """What the base changes must be changed there, too: nothing but name, role and replicas may differ."""
    decode, other = (copy.deepcopy(prefill.one("Deployment", name)) for name in ("gpuworker", PREFILL))
    for made, role in ((decode, "decode"), (other, "prefill")):
        del made["metadata"]["name"], made["spec"]["replicas"]
        assert made["spec"]["selector"]["matchLabels"].pop(ROLE) == role
        assert made["spec"]["template"]["metadata"]["labels"].pop(ROLE) == role
        (container,) = made["spec"]["template"]["spec"]["containers"]
        container["env"].remove({"name": "QUIRE_DISAGGREGATION", "value": role})
    assert decode == other
    base = copy.deepcopy(variant("base").one("Deployment", "gpuworker"))
    for made in (base, decode):  # its name has a hash of the options
        made["spec"]["template"]["spec"]["containers"][0]["envFrom"] = []
        made["metadata"].pop("name", None)
        made["spec"].pop("replicas", None)
    assert decode == base


def test_each_deployment_of_workers_selects_its_own_pods(prefill: Manifests) -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in prefill.pods().items()}
    for each in prefill.of("Deployment"):
        found = [pod for pod in pods if selects(each["spec"]["selector"], pods[pod])]
        assert found == [each["metadata"]["name"]]
    budget = prefill.one("PodDisruptionBudget", "gpuworker")["spec"]["selector"]
    assert {pod for pod in pods if selects(budget, pods[pod])} == {"gpuworker", PREFILL}


@pytest.mark.parametrize(("name", "role"), [("gpuworker", "decode"), (PREFILL, "prefill")])
def test_workers_of_each_role_fetch_blocks_from_each_other(prefill: Manifests, name: str, role: str) -> None:
    found = load(GpuWorkerSettings, environ=image_environment("gpuworker") | prefill.environment(name))
    assert (found.disaggregation, found.data_port) == (role, DATA_PORT)
    assert found.host_memory
    for service in ("router", "kvmanager"):
        load(SETTINGS[service], environ=image_environment(service) | prefill.environment(service))


def test_prefill_workers_have_the_edges_of_workers(prefill: Manifests) -> None:
    def alike(edge: tuple[str, str, int]) -> tuple[str, str, int]:
        one, other = (each.replace(PREFILL, "gpuworker") for each in edge[:2])
        return one, other, edge[2]

    found = all_edges(prefill)
    assert set(map(alike, found)) == DIAGRAM | SCRAPED | ASKED | {("bystander", "dns", 53)}
    between = {("gpuworker", PREFILL, DATA_PORT), (PREFILL, "gpuworker", DATA_PORT), ("router", PREFILL, 50053)}
    assert between < found


# ---------------------------------------------------------------- workers whose ranks are on several pods

FOLLOWER = "gpuworker-follower"
PLACED = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
LEADER = "gpuworker-0.gpuworker.quire"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return with_components(tmp_path_factory.mktemp("ranks"), "ranks")


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_with_ranks_is_valid(ranks: Manifests, version: str) -> None:
    """The templates of a LeaderWorkerSet are those of pods; its own fields are another program's."""
    for each in ranks.all:
        if each["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(each, version, strict=True)
    for name in ("gpuworker", FOLLOWER):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(ranks.pods()[name])}
        pod["metadata"]["name"] = name
        kubernetes_validate.validate(pod, version, strict=True)
    assert {each["metadata"].get("namespace") for each in ranks.all if each["kind"] != "Namespace"} == {"quire"}


def test_a_leader_is_the_worker_of_the_base_and_a_follower_is_the_leader_without_ports(ranks: Manifests) -> None:
    """What the base changes must be changed there, too."""
    base, leader, follower = (
        copy.deepcopy(found.pods()[name]["spec"])
        for found, name in ((variant("base"), "gpuworker"), (ranks, "gpuworker"), (ranks, FOLLOWER))
    )
    assert not [each for each in ranks.of("Deployment") if each["metadata"]["name"] == "gpuworker"]
    containers = [pod["containers"][0] for pod in (base, leader, follower)]
    for container in containers:  # its name has a hash of the options
        assert container.pop("envFrom")
    placed = [each for each in containers[1]["env"] if each["name"] in PLACED]
    assert containers[2].pop("env") == placed
    containers[1]["env"] = [each for each in containers[1]["env"] if each["name"] not in PLACED]
    assert leader == base
    for field in ("env", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        assert containers[1].pop(field)
    for pod in (leader, follower):
        del pod["topologySpreadConstraints"]
    assert follower == leader


@pytest.mark.parametrize(("name", "index"), [("gpuworker", "0"), (FOLLOWER, "1")])
def test_each_pod_of_a_group_has_its_ranks(ranks: Manifests, name: str, index: str) -> None:
    group = ranks.one("LeaderWorkerSet", "gpuworker")["spec"]["leaderWorkerTemplate"]
    by_cluster = {
        "LWS_LEADER_ADDRESS": LEADER,
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_WORKER_INDEX": index,
    }
    environment = image_environment("gpuworker") | ranks.environment(name, by_cluster)
    environment["QUIRE_DEVICE"] = "cpu"  # as the image for CPUs has it
    found = load(GpuWorkerSettings, environ=environment)
    hosts = Hosts.of(environment, found.tensor_parallel_size)
    assert hosts == Hosts(group["size"], int(index), LEADER, 29500)
    assert hosts.interface_problem(found.rank_interface) is None
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_only_ranks_reach_ranks_beside_the_edges_of_workers(ranks: Manifests) -> None:
    found = all_edges(ranks)
    among = {(one, other) for one, other, port in found if port == DATA_PORT and "follower" in one + other}
    assert among == {("gpuworker", FOLLOWER), (FOLLOWER, "gpuworker")}
    beside = {edge for edge in found if FOLLOWER not in edge[:2] and edge[:2] != ("gpuworker", "gpuworker")}
    both = DIAGRAM | SCRAPED | ASKED | {("bystander", "dns", 53)}
    assert beside == {edge for edge in both if edge[:2] != ("gpuworker", "gpuworker")}
    assert {edge[:2] for edge in found if FOLLOWER in edge[:2]} - among == {(FOLLOWER, "dns")}
