"""Workers on hosts of their own: the files for them, and the one that opens the first host, as Compose reads them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.settings import config as options
from gpuworker.config import GpuWorkerSettings
from router.config import RouterSettings
from tests.suites.deployment.docker.conftest import REPOSITORY, compose, compose_alone
from tests.suites.deployment.docker.dockerfile import Dockerfile

Services = dict[str, dict[str, Any]]

WORKER, GPU, HOSTS = (str(REPOSITORY / f"docker/{name}.compose.yaml") for name in ("worker", "worker-gpu", "hosts"))
ADDRESS = "10.1.0.7"
SET = {
    "MANAGER": "10.1.0.2:50052",
    "ROUTER": "10.1.0.2:50050",
    "WORKER_ADDRESS": ADDRESS,
    "CERTS_DIR": "/etc/quire/worker",
}
MOST = 8
GRPC, METRICS = 50053, 51053
CPU_IMAGE, CUDA_IMAGE = (Dockerfile.read("docker/gpuworker.Dockerfile", target) for target in ("cpu", "cuda"))
# What a service may do, and how it is ended, is the same on every host.
CONFINED = ("init", "restart", "read_only", "user", "cap_drop", "security_opt", "logging", "stop_grace_period", "build")

both = pytest.mark.parametrize("files", [("-f", WORKER), ("-f", WORKER, "-f", GPU)], ids=["cpu", "gpu"])
each_number = pytest.mark.parametrize("number", range(1, MOST + 1))


def read(*words: str, **environment: str) -> Services:
    """Return the services that Compose makes of files and profiles."""
    return _read(words, tuple(sorted(environment.items())))


@cache
def _read(words: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Services:
    done = compose_alone(*words, "config", "--format", "json", **dict(environment))
    assert (done.returncode, done.stderr) == (0, "")
    found: Services = json.loads(done.stdout)["services"]
    return found


def workers(*files: str, number: int = MOST, **changed: str) -> Services:
    """Return the workers of a host that has so many."""
    return read(*files, "--profile", f"workers-{number}", **{**SET, **changed})


def settings(service: dict[str, Any]) -> GpuWorkerSettings:
    """Return the options that a worker has by its image and its environment."""
    image = CUDA_IMAGE if service["image"].endswith(":cuda") else CPU_IMAGE
    return options.load(GpuWorkerSettings, environ=image.environment | service["environment"])


def published(service: dict[str, Any]) -> dict[int, int]:
    """Return the host's port of each port of the container."""
    return {port["target"]: int(port["published"]) for port in service["ports"]}


# ---------------------------------------------------------------- a host of workers


@both
@each_number
def test_as_many_workers_as_the_profile_says_run(files: tuple[str, ...], number: int) -> None:
    assert set(workers(*files, number=number)) == {f"gpuworker-{n}" for n in range(1, number + 1)}


@both
def test_without_a_profile_one_worker_runs(files: tuple[str, ...]) -> None:
    assert set(read(*files, **SET)) == {"gpuworker-1"}


@both
def test_each_worker_announces_the_port_at_which_it_is_published(files: tuple[str, ...]) -> None:
    found = workers(*files)
    for number in range(1, MOST + 1):
        service = found[f"gpuworker-{number}"]
        ports = published(service)
        assert ports == {GRPC: GRPC - 1 + number, METRICS: METRICS - 1 + number}
        assert CPU_IMAGE.of_image("EXPOSE") == [f"{GRPC} {METRICS}"]
        assert settings(service).advertise == f"{ADDRESS}:{ports[GRPC]}"
        assert settings(service).port == GRPC, "the image's health check asks the port above it"
        assert {port["host_ip"] for port in service["ports"]} == {ADDRESS}


def test_an_address_of_ipv6_can_be_announced_and_published() -> None:
    for service in workers("-f", WORKER, WORKER_ADDRESS="[2001:db8::7]").values():
        assert settings(service).advertise == f"[2001:db8::7]:{published(service)[GRPC]}"
        assert {port["host_ip"] for port in service["ports"]} == {"2001:db8::7"}


def test_workers_of_all_hosts_have_ids_of_their_own() -> None:
    here, there = (workers("-f", WORKER, WORKER_ADDRESS=address) for address in ("10.1.0.7", "10.1.0.8"))
    named = workers("-f", WORKER, WORKER_NAME="host-c")
    ids = [settings(each).worker_id for project in (here, there, named) for each in project.values()]
    assert len(set(ids)) == len(ids) == 3 * MOST
    assert {f"host-c-{number}" for number in range(1, MOST + 1)} <= set(ids)


@both
def test_every_worker_takes_its_environment(files: tuple[str, ...]) -> None:
    for service in workers(*files, MANAGER="a:50052,b:50052").values():
        found = settings(service)
        assert found.manager == ("a:50052", "b:50052")
        assert (found.host, found.insecure, found.redis_url) == ("0.0.0.0", False, None)
        assert found.trace_endpoint == "10.1.0.2:50050"


@both
def test_each_worker_has_the_folder_of_certificates_and_the_checkpoint(files: tuple[str, ...], tmp_path: Path) -> None:
    for service in workers(*files, MODEL_DIR=str(tmp_path)).values():
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert {target: mount["source"] for target, mount in mounts.items()} == {
            "/certs": SET["CERTS_DIR"],
            "/model": str(tmp_path),
        }
        assert all(mount["read_only"] for mount in mounts.values())
        assert mounts["/certs"]["bind"] == {"create_host_path": False}
        found = settings(service)
        assert [found.tls_cert, found.tls_key, found.tls_ca] == [
            Path("/certs") / name for name in ("tls.crt", "tls.key", "ca.crt")
        ]
    (demo,) = {mount["source"] for mount in workers(*files)["gpuworker-1"]["volumes"]} - {SET["CERTS_DIR"]}
    assert (Path(demo) / "model.safetensors").is_file()


@pytest.mark.parametrize(("files", "twin"), [((WORKER,), "gpuworker"), ((WORKER, GPU), "gpuworker-gpu")])
def test_a_worker_is_confined_as_those_of_the_first_host(files: tuple[str, ...], twin: str) -> None:
    first: Services = json.loads(compose("--profile", "*", "config", "--format", "json").stdout)["services"]
    for service in workers(*(word for file in files for word in ("-f", file))).values():
        assert {key: service.get(key) for key in CONFINED} == {key: first[twin].get(key) for key in CONFINED}
        assert service["image"] == first[twin]["image"]
        assert service["tmpfs"] == first[twin]["tmpfs"]
        limits = (each["deploy"]["resources"]["limits"] for each in (service, first[twin]))
        assert next(limits) == next(limits)
        assert "depends_on" not in service, "nothing that it needs is in this file"


def test_each_worker_on_a_gpu_has_one_of_its_own() -> None:
    for number in range(1, MOST + 1):
        (device,) = workers("-f", WORKER, "-f", GPU)[f"gpuworker-{number}"]["deploy"]["resources"]["reservations"][
            "devices"
        ]
        assert device == {"driver": "nvidia", "device_ids": [str(number - 1)], "capabilities": ["gpu"]}


@both
@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("empty", [False, True], ids=["missing", "empty"])
def test_a_variable_that_is_not_set_is_refused_in_one_line(files: tuple[str, ...], name: str, empty: bool) -> None:
    environment = {**SET, name: ""} if empty else {key: value for key, value in SET.items() if key != name}
    done = compose_alone(*files, "config", "-q", **environment)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert f"required variable {name} is missing a value: set {name} to " in line


def test_an_address_that_is_none_is_refused_by_compose_and_a_manager_without_port_by_the_worker() -> None:
    done = compose_alone("-f", WORKER, "config", "-q", **{**SET, "WORKER_ADDRESS": "host-b"})
    assert (done.returncode != 0, "invalid IP address: host-b" in done.stderr) == (True, True)
    with pytest.raises(InvalidConfig, match="expected HOST:PORT"):
        settings(workers("-f", WORKER, MANAGER="10.1.0.2")["gpuworker-1"])


def test_nothing_that_can_be_set_is_taken_for_an_option_of_a_service() -> None:
    for file in (WORKER, GPU, HOSTS):
        assert "${QUIRE_" not in Path(file).read_text()


# ---------------------------------------------------------------- the host of the manager and the router


def test_the_first_host_opens_the_manager_and_the_admin_plane_to_others_and_nothing_else() -> None:
    project = json.loads(compose("-f", HOSTS, "config", "--format", "json", HOST_ADDRESS="10.1.0.2").stdout)
    opened = {
        (name, port["target"], port["published"])
        for name, service in project["services"].items()
        for port in service.get("ports", ())
        if port["host_ip"] != "127.0.0.1"
    }
    admin = RouterSettings(model=Path()).used_admin_port
    assert opened == {("kvmanager", 50052, "50052"), ("router", admin, str(admin))}
    for name in ("kvmanager", "router"):  # a port is published on a network with a way out alone
        networks = project["services"][name]["networks"]
        assert [each for each in networks if not project["networks"][each].get("internal")]
    members = {name for name, service in project["services"].items() if "hosts" in service["networks"]}
    assert members == {"kvmanager"}


def test_the_router_takes_workers_of_the_networks_that_are_named() -> None:
    def networks(**environment: str) -> tuple[str, ...]:
        words = ("-f", HOSTS, "config", "--format", "json")
        project = json.loads(compose(*words, HOST_ADDRESS="10.1.0.2", **environment).stdout)
        variables = project["services"]["router"]["environment"]
        kept = {key: value for key, value in variables.items() if not key.endswith("_FILE")}
        image = Dockerfile.read("docker/router.Dockerfile").environment
        return options.load(RouterSettings, environ=image | kept).worker_network

    assert networks(WORKER_NETWORK="10.1.0.0/16,172.16.0.0/12") == ("10.1.0.0/16", "172.16.0.0/12")
    assert networks() == ()


def test_the_first_host_must_say_its_address() -> None:
    done = compose("-f", HOSTS, "config", "-q")
    assert done.returncode != 0
    assert "required variable HOST_ADDRESS is missing a value: set HOST_ADDRESS to " in done.stderr.splitlines()[-1]
