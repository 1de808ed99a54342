"""The promises of compose.yaml, checked on the project that Compose makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.commands.certs import parser
from common.process.metrics import metrics_port
from common.process.redis_users import write_secrets
from common.settings import config as options
from common.settings.options import ServiceSettings
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.docker.conftest import REPOSITORY, Config, compose
from tests.suites.deployment.docker.dockerfile import Dockerfile

ONCE = {"certs", "redis-users"}
BASIC = {"redis", "kvmanager", "gpuworker", "router"} | ONCE
ROLES = {"kvmanager": "manager", "gpuworker": "worker", "gpuworker-gpu": "worker", "router": "router"}
WORKERS = ("gpuworker", "gpuworker-gpu")
PROMETHEUS = REPOSITORY / "docker/observability/prometheus/prometheus.yml"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "kvmanager": KvManagerSettings,
    "gpuworker": GpuWorkerSettings,
    "gpuworker-gpu": GpuWorkerSettings,
    "router": RouterSettings,
}


def services(project: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = project["services"]
    return found


def mounted(project: dict[str, Any], name: str, target: str) -> dict[str, Any]:
    """Return the volume of a service that is mounted at a path."""
    (found,) = [each for each in services(project)[name]["volumes"] if each["target"] == target]
    return dict(found)


def seconds(duration: str) -> float:
    """Return Compose's `1m15s` in seconds."""
    minutes, _, rest = duration.rpartition("m")
    return 60.0 * float(minutes or 0) + float(rest.removesuffix("s") or 0)


@pytest.mark.parametrize("profile", ["", "gpu", "observability", "*"])
def test_compose_accepts_the_file_without_a_word(profile: str) -> None:
    done = compose("--profile", profile, "config", "-q")
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_profile_only_what_serves_runs() -> None:
    assert set(compose("config", "--services").stdout.split()) == BASIC


def test_every_service_is_confined(project: dict[str, Any]) -> None:
    for name, service in services(project).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].partition(":")[0]) > 0, name
        assert service.get("privileged") is None, name


def test_every_service_is_bounded_and_comes_back(project: dict[str, Any]) -> None:
    for name, service in services(project).items():
        limits = service["deploy"]["resources"]["limits"]
        assert int(limits["memory"]) > 0, name
        assert limits["pids"] > 0, name
        assert limits.get("cpus") or name == "gpuworker-gpu", name
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name


def members(project: dict[str, Any], network: str) -> set[str]:
    """Return the services of a network."""
    return {name for name, service in services(project).items() if network in service["networks"]}


def test_only_the_router_is_reached_from_outside(project: dict[str, Any]) -> None:
    published = {name for name in BASIC if services(project)[name].get("ports")}
    assert published == members(project, "public") == {"router"}
    assert not {port["target"] for port in services(project)["router"]["ports"]} & {50050, 51051}


def test_workers_and_what_watches_them_do_not_reach_redis(project: dict[str, Any]) -> None:
    assert members(project, "index") == {"redis", "kvmanager", "router"}
    assert "redis" not in members(project, "internal")
    for name in ("index", "internal"):
        assert project["networks"][name]["internal"] is True


def test_ports_are_published_on_this_host_alone_unless_asked(project: dict[str, Any], config: Config) -> None:
    ports = [port for service in services(project).values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    asked = services(config(BIND_ADDRESS="0.0.0.0", GRPC_PORT="6001", HTTP_PORT="6002"))["router"]["ports"]
    assert [(port["host_ip"], port["published"]) for port in asked] == [("0.0.0.0", "6001"), ("0.0.0.0", "6002")]


def test_redis_is_bounded_and_forgets_what_ends_soonest(project: dict[str, Any]) -> None:
    redis = services(project)["redis"]
    limit = int(redis["deploy"]["resources"]["limits"]["memory"])
    words = redis["command"]
    assert {"--maxmemory-policy volatile-ttl", "--appendonly no", '--save ""'} <= set(words)
    bound = next(word.split()[1] for word in words if word.startswith("--maxmemory "))
    assert int(bound.removesuffix("mb")) << 20 <= limit * 0.7  # what Redis itself needs is on top
    (users,) = redis["volumes"]
    assert (users["source"], users["read_only"], users["volume"]) == ("redis-users", True, {"subpath": "redis"})
    assert f"--aclfile {users['target']}/users.acl" in words


def test_each_service_has_the_secrets_of_its_own_user_alone(project: dict[str, Any]) -> None:
    for name, service in services(project).items():
        mounted = [each for each in service.get("volumes", ()) if each["source"] == "redis-users"]
        parts = [each.get("volume", {}).get("subpath") for each in mounted]
        own = {"kvmanager": "manager", "router": "router", "redis": "redis", "redis-users": None}
        assert parts == ([own[name]] if name in own else []), name
        variables = service.get("environment", {})
        assert ("REDIS_URL_FILE" in variables) == (name in ("kvmanager", "router")), name


def test_every_service_that_serves_is_asked_for_its_health(project: dict[str, Any]) -> None:
    for name in ("kvmanager", "router", *WORKERS):
        service = services(project)[name]
        assert "healthcheck" not in service, "the image has it"
        image = Dockerfile.read(service["build"]["dockerfile"], service["build"].get("target"))
        port = SETTINGS[name].model_fields["grpc_port" if name == "router" else "port"].default
        asked = f"127.0.0.1:{port}" if name == "router" else f"http://127.0.0.1:{metrics_port(None, port)}/health"
        assert image.healthcheck == ["python", "-I", "-m", "common.rpc.probe", asked]
    assert services(project)["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


def test_each_starts_after_what_it_needs_and_stops_before_it(project: dict[str, Any]) -> None:
    needs = {
        name: {other: need["condition"] for other, need in services(project)[name].get("depends_on", {}).items()}
        for name in BASIC
    }
    assert needs == {
        "certs": {},
        "redis-users": {},
        "redis": {"redis-users": "service_completed_successfully"},
        "kvmanager": {"certs": "service_completed_successfully", "redis": "service_healthy"},
        "gpuworker": {"certs": "service_completed_successfully", "kvmanager": "service_healthy"},
        "router": {
            "certs": "service_completed_successfully",
            "redis": "service_healthy",
            "gpuworker": "service_started",
            "gpuworker-gpu": "service_started",
        },
    }


@pytest.mark.parametrize("name", WORKERS)
def test_workers_can_be_scaled(project: dict[str, Any], name: str) -> None:
    """Two workers would conflict over any fixed name or port."""
    worker = services(project)[name]
    assert not {"container_name", "ports", "hostname"} & worker.keys()
    assert not {"QUIRE_WORKER_ID", "QUIRE_ADVERTISE"} & worker["environment"].keys()
    assert all(volume["read_only"] for volume in worker["volumes"])


def test_a_worker_on_a_gpu_reserves_one(project: dict[str, Any], config: Config) -> None:
    reserved = services(project)["gpuworker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert [(device["driver"], device["count"], device["capabilities"]) for device in reserved] == [
        ("nvidia", 1, ["gpu"])
    ]
    assert services(config(CPU_WORKERS="0"))["gpuworker"]["deploy"]["replicas"] == 0


@pytest.mark.parametrize("name", ["router", *WORKERS])
def test_there_is_time_to_drain(project: dict[str, Any], name: str) -> None:
    service = services(project)[name]
    drain = float(service["environment"]["QUIRE_DRAIN_TIMEOUT"])
    assert seconds(service["stop_grace_period"]) >= drain + 10.0


@pytest.mark.parametrize("name", ["router", *WORKERS])
def test_the_model_is_mounted_read_only(project: dict[str, Any], config: Config, tmp_path: Path, name: str) -> None:
    demo = mounted(project, name, "/model")
    assert (demo["target"], demo["read_only"]) == ("/model", True)
    assert (Path(demo["source"]) / "model.safetensors").is_file()
    other = mounted(config(MODEL_DIR=str(tmp_path)), name, "/model")
    assert (other["source"], other["target"], other["read_only"]) == (str(tmp_path), "/model", True)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_service_accepts_its_environment(project: dict[str, Any], name: str, tmp_path: Path) -> None:
    """What image and compose file set together are options that exist, with values that are allowed."""
    service = services(project)[name]
    image = Dockerfile.read(service["build"]["dockerfile"], service["build"].get("target"))
    write_secrets(tmp_path, "redis:6379")
    variables = image.environment | service["environment"]
    for mount in service.get("volumes", ()):
        if mount["source"] == "redis-users":
            folder = str(tmp_path / mount["volume"]["subpath"])
            variables = {key: value.replace(mount["target"], folder) for key, value in variables.items()}
    settings = options.load(SETTINGS[name], environ=variables)
    assert settings.host == "0.0.0.0"
    user = {"kvmanager": "manager", "router": "router"}.get(name)
    assert (settings.redis_url or "").startswith(f"redis://{user}:" if user else "")
    assert (settings.redis_url or "").endswith("@redis:6379/0" if user else "")
    assert settings.trace_endpoint == "router:50050"


def test_nothing_that_can_be_set_is_taken_for_an_option_of_a_service() -> None:
    """A variable QUIRE_... that no service defines would stop every service that is started from the same shell."""
    text = (REPOSITORY / "compose.yaml").read_text()
    assert "${QUIRE_" not in text


def test_the_managers_state_outlives_its_container(project: dict[str, Any]) -> None:
    image = Dockerfile.read("docker/kvmanager.Dockerfile")
    assert mounted(project, "kvmanager", image.environment["QUIRE_STATE_DIR"])["type"] == "volume"


def test_with_a_standby_both_managers_are_a_group_that_everybody_knows(tmp_path: Path) -> None:
    override = str(REPOSITORY / "docker/standby.compose.yaml")
    done = compose("-f", override, "--profile", "gpu", "config", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    project = json.loads(done.stdout)
    managers = {name: each["environment"] for name, each in services(project).items() if "kvmanager" in name}
    assert set(managers) == {"kvmanager", "kvmanager-standby"}
    image = Dockerfile.read("docker/kvmanager.Dockerfile")
    write_secrets(tmp_path, "redis:6379")
    for name, environment in managers.items():
        variables = {key: value.replace("/run/quire", str(tmp_path / "manager")) for key, value in environment.items()}
        settings = options.load(KvManagerSettings, environ=image.environment | variables)
        assert (settings.group, settings.group_address) == ("quire", f"{name}:50052")
    states = [mounted(project, name, image.environment["QUIRE_STATE_DIR"])["source"] for name in sorted(managers)]
    assert len(set(states)) == len(managers)
    for name in (*WORKERS, "router"):
        named = services(project)[name]["environment"]["QUIRE_MANAGER"].split(",")
        assert named == [f"{each}:50052" for each in sorted(managers)]


def test_workers_with_host_memory_fetch_from_each_other_at_a_port_that_is_not_published() -> None:
    override = str(REPOSITORY / "docker/host-memory.compose.yaml")
    done = compose("-f", override, "--profile", "gpu", "config", "--format", "json", HOST_MEMORY="2GiB")
    assert (done.returncode, done.stderr) == (0, "")
    project = json.loads(done.stdout)
    for name in WORKERS:
        service = services(project)[name]
        image = Dockerfile.read(service["build"]["dockerfile"], service["build"].get("target"))
        settings = options.load(GpuWorkerSettings, environ=image.environment | service["environment"])
        assert (settings.host_memory, settings.data_port) == (2 << 30, 50054)
        assert not service.get("ports")


def test_workers_for_prompts_are_workers_with_another_task() -> None:
    overrides = [word for name in ("host-memory", "prefill") for word in ("-f", f"docker/{name}.compose.yaml")]
    sizes = {"HOST_MEMORY": "2GiB", "PREFILL_WORKERS": "3", "GPU_PREFILL_WORKERS": "2"}
    done = compose(*overrides, "--profile", "gpu", "config", "--format", "json", **sizes)
    assert (done.returncode, done.stderr) == (0, "")
    found = services(json.loads(done.stdout))
    for name, replicas in zip(WORKERS, (3, 2), strict=True):
        decodes, computes = found[name], found[f"{name}-prefill"]
        assert computes["deploy"].pop("replicas") == replicas
        del decodes["deploy"]["replicas"]
        image = Dockerfile.read(decodes["build"]["dockerfile"], decodes["build"].get("target"))
        assert re.search(rf"names: \[[^\]]*\b{name}-prefill[,\]]", PROMETHEUS.read_text())
        assert f"{name}-prefill" in found["router"]["depends_on"], "the router stops first"
        tasks = []
        for service in (decodes, computes):
            settings = options.load(GpuWorkerSettings, environ=image.environment | service["environment"])
            assert (settings.host_memory, settings.data_port) == (2 << 30, 50054)
            tasks.append(settings.disaggregation)
            del service["environment"]["QUIRE_DISAGGREGATION"]
        assert tasks == ["decode", "prefill"]
        assert decodes == computes


SHARDS = str(REPOSITORY / "docker/shards.compose.yaml")


@pytest.mark.parametrize("profile", ["", "gpu", "observability", "*"])
def test_compose_accepts_a_split_pool_without_a_word(profile: str) -> None:
    done = compose("-f", SHARDS, "--profile", profile, "config", "-q")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def split() -> dict[str, Any]:
    """The project with two groups of managers and workers."""
    done = compose("-f", SHARDS, "--profile", "*", "config", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_in_a_split_pool_each_group_has_a_manager_and_workers_of_its_own(split: dict[str, Any], tmp_path: Path) -> None:
    image = Dockerfile.read("docker/kvmanager.Dockerfile")
    write_secrets(tmp_path, "redis:6379")
    managers = {"kvmanager": "a", "kvmanager-b": "b"}
    for name, group in managers.items():
        environment = services(split)[name]["environment"]
        variables = {key: value.replace("/run/quire", str(tmp_path / "manager")) for key, value in environment.items()}
        settings = options.load(KvManagerSettings, environ=image.environment | variables)
        assert (settings.group, settings.group_address) == (group, f"{name}:50052")
    states = {mounted(split, name, image.environment["QUIRE_STATE_DIR"])["source"] for name in managers}
    assert len(states) == len(managers)
    assert {name for name in services(split) if name.startswith("kvmanager")} == set(managers)
    for name in WORKERS:
        for worker, manager in ((name, "kvmanager"), (f"{name}-b", "kvmanager-b")):
            found = services(split)[worker]
            assert found["environment"]["QUIRE_MANAGER"] == f"{manager}:50052"
            assert [each for each in found["depends_on"] if "manager" in each] == [manager]
            assert not {"container_name", "ports", "hostname"} & found.keys(), "it can be scaled"


def test_the_router_of_a_split_pool_has_all_groups_and_stops_before_all_workers(split: dict[str, Any]) -> None:
    router = services(split)["router"]
    assert router["environment"]["QUIRE_MANAGER"] == "kvmanager:50052,kvmanager-b:50052"
    assert {name for name in services(split) if name.startswith("gpuworker")} <= router["depends_on"].keys()
    new = {"kvmanager-b", "gpuworker-b", "gpuworker-gpu-b"}
    assert set(services(split)) - set(services(json.loads(_without_shards()))) == new
    for name in new:  # as its neighbour of the first group, but for the addresses and the folder of its own
        first = services(split)[name.removesuffix("-b")]
        same = ("image", "user", "read_only", "cap_drop", "security_opt", "networks", "deploy", "stop_grace_period")
        assert {key: services(split)[name].get(key) for key in same} == {key: first.get(key) for key in same}


def _without_shards() -> str:
    return compose("--profile", "*", "config", "--format", "json").stdout


def test_prometheus_finds_all_services_of_the_files_for_compose(split: dict[str, Any]) -> None:
    for name in services(split):
        if name.startswith(("kvmanager", "gpuworker")):
            assert re.search(rf"names: \[[^\]]*\b{name}[,\]]", PROMETHEUS.read_text()), name


@pytest.mark.parametrize("name", ROLES)
def test_each_service_has_the_certificate_of_its_role_alone(project: dict[str, Any], name: str) -> None:
    service = services(project)[name]
    certs = mounted(project, name, "/certs")
    assert (certs["source"], certs["volume"]["subpath"], certs["read_only"]) == ("certs", ROLES[name], True)
    environment = service["environment"]
    files = [environment[f"QUIRE_TLS_{what}"] for what in ("CERT", "KEY", "CA")]
    assert files == ["/certs/tls.crt", "/certs/tls.key", "/certs/ca.crt"]
    assert "QUIRE_INSECURE" not in environment


def test_certificates_are_made_once_where_the_image_lets_its_user_write(project: dict[str, Any]) -> None:
    service = services(project)["certs"]
    (volume,) = service["volumes"]
    assert service["entrypoint"] == ["quire", "certs", volume["target"], "--if-needed"]
    assert f"--group=quire --mode=0700 {volume['target']}" in (REPOSITORY / "docker/router.Dockerfile").read_text()
    assert parser().parse_args(service["entrypoint"][2:]).if_needed
