"""The stack files for Swarm as Docker's client reads them; no engine and no Swarm is needed for that."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.commands import certs
from common.process.metrics import metrics_port
from common.process.redis_users import write_secrets
from common.settings import config as options
from common.settings.options import ServiceSettings
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.docker.conftest import REPOSITORY
from tests.suites.deployment.docker.dockerfile import Dockerfile

DOCKER = shutil.which("docker")
pytestmark = pytest.mark.skipif(DOCKER is None, reason="docker, whose client reads stack files, is not installed")

CPU, GPU = ("docker/swarm.stack.yaml",), ("docker/swarm.stack.yaml", "docker/swarm-gpu.stack.yaml")
SECRETS = "/the/secrets"
SET = {"SECRETS_DIR": SECRETS, "MODEL_DIR": "/the/model"}
SETTINGS: dict[str, type[ServiceSettings]] = {
    "kvmanager": KvManagerSettings,
    "gpuworker": GpuWorkerSettings,
    "router": RouterSettings,
}
# By service: what its secrets are.
OWN = {
    "redis": {"redis/redis/users.acl"},
    "kvmanager": {f"certs/manager/tls.{end}" for end in ("crt", "key")}
    | {"redis/manager/redis-url", "redis/manager/pool-key"},
    "gpuworker": {f"certs/worker/tls.{end}" for end in ("crt", "key")},
    "router": {f"certs/router/tls.{end}" for end in ("crt", "key")}
    | {"redis/router/redis-url", "redis/router/pool-key"},
}
# Keys that `docker stack deploy` ignores or refuses; `docker stack config` is silent about the first ones.
WITHOUT_EFFECT = frozenset(
    "build cgroupns_mode cgroup_parent devices domainname external_links ipc links mac_address network_mode pid "
    "privileged restart security_opt shm_size userns_mode container_name expose extends depends_on profiles cpuset "
    "mem_limit".split()
)

both = pytest.mark.parametrize("files", [CPU, GPU], ids=["cpu", "gpu"])
each_service = pytest.mark.parametrize("name", SETTINGS)


def stack(files: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(DOCKER), "stack", "config", *(word for file in files for word in ("-c", file))]
    variables = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)


def read(files: tuple[str, ...] = CPU, **changed: str) -> dict[str, Any]:
    """Return the stack that Docker's client makes of files and variables."""
    done = stack(files, **{**SET, **changed})
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@cache
def services(files: tuple[str, ...] = CPU) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(files)["services"]
    return found


def image(name: str, files: tuple[str, ...] = CPU) -> Dockerfile:
    target = {CPU: "cpu", GPU: "cuda"}[files] if name == "gpuworker" else None
    return Dockerfile.read(f"docker/{name}.Dockerfile", target)


def files_of(project: dict[str, Any], name: str) -> dict[str, str]:
    """Return the file of each secret and configuration that a service gets, by its path in the container."""
    service = project["services"][name]
    known = {**project["secrets"], **project.get("configs", {})}
    return {each["target"]: known[each["source"]]["file"] for each in service["secrets"] + service.get("configs", [])}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands at the top of the file make."""
    folder = tmp_path_factory.mktemp("secrets")
    certs.write(certs.parser().parse_args([str(folder / "certs")]))
    write_secrets(folder / "redis", "redis:6379")
    return folder


@both
def test_docker_reads_the_files_without_a_word(files: tuple[str, ...]) -> None:
    assert set(read(files)["services"]) == {"redis", *SETTINGS}


@both
def test_nothing_in_the_files_is_without_effect(files: tuple[str, ...]) -> None:
    for file in files:
        for name, service in yaml.safe_load((REPOSITORY / file).read_text())["services"].items():
            assert not WITHOUT_EFFECT & service.keys(), name


@pytest.mark.parametrize("name", SET)
@both
def test_a_variable_that_is_not_set_is_refused(files: tuple[str, ...], name: str) -> None:
    done = stack(files, **{key: value for key, value in SET.items() if key != name})
    assert done.returncode != 0
    assert f"required variable {name} is missing a value: set {name} to " in done.stderr


def test_nothing_that_can_be_set_is_taken_for_an_option_of_a_service() -> None:
    assert all("${QUIRE_" not in (REPOSITORY / file).read_text() for file in GPU)


@both
@each_service
def test_each_service_takes_its_environment(files: tuple[str, ...], name: str, secrets: Path) -> None:
    project = read(files, SECRETS_DIR=str(secrets))
    variables = image(name, files).environment | project["services"][name]["environment"]
    for path, file in files_of(project, name).items():
        variables = {key: file if value == path else value for key, value in variables.items()}
    settings = options.load(SETTINGS[name], environ=variables)
    assert (settings.host, settings.insecure) == ("0.0.0.0", False)
    for found in (settings.tls_cert, settings.tls_key, settings.tls_ca):
        assert found is not None
        assert found.is_file(), "a secret that exists, and no path in the container that nothing is mounted at"
    user = {"kvmanager": "manager", "router": "router"}.get(name)
    assert (settings.redis_url or "").partition(":")[2].startswith(f"//{user}:" if user else "")
    assert (settings.redis_url or "").endswith("@redis:6379/0" if user else "")


@both
def test_workers_and_routers_know_every_manager_by_the_name_of_all(files: tuple[str, ...]) -> None:
    """Each manager announces its own address on the way to Redis, so the group has no address in the file."""
    managers = services(files)["kvmanager"]
    assert (managers["deploy"]["replicas"], managers["environment"]["QUIRE_GROUP"]) == (2, "quire")
    assert "QUIRE_GROUP_ADDRESS" not in managers["environment"]
    for name in ("gpuworker", "router"):
        assert services(files)[name]["environment"]["QUIRE_MANAGER"] == "tasks.kvmanager:50052"
        assert services(files)[name]["networks"].keys() & managers["networks"].keys()
    assert not {"QUIRE_ADVERTISE", "QUIRE_WORKER_ID"} & services(files)["gpuworker"]["environment"].keys()


@both
def test_each_service_has_the_secrets_of_its_own_role_alone(files: tuple[str, ...]) -> None:
    project = read(files)
    for name, wanted in OWN.items():
        service = project["services"][name]
        sources = {
            project["secrets"][each["source"]]["file"].removeprefix(f"{SECRETS}/") for each in service["secrets"]
        }
        assert sources == wanted, name
        for each in service["secrets"]:
            assert (each["uid"], each["mode"]) == (service["user"].partition(":")[0], 0o400), each
    assert project["configs"]["ca"]["file"] == f"{SECRETS}/certs/ca/ca.crt"


def test_the_commands_of_the_file_make_every_secret_that_it_names(secrets: Path) -> None:
    project = read(SECRETS_DIR=str(secrets))
    named = [each["file"] for each in (*project["secrets"].values(), *project["configs"].values())]
    assert len(named) == 12
    assert [file for file in named if not Path(file).is_file()] == []


def test_changed_files_become_new_secrets_by_another_version() -> None:
    def names(**environment: str) -> set[str]:
        project = read(CPU, **environment)
        return {each["name"] for each in (*project["secrets"].values(), *project["configs"].values())}

    assert len(names()) == len(names(SECRETS_VERSION="2026-12")) == 12
    assert not names() & names(SECRETS_VERSION="2026-12")


@both
def test_only_the_router_is_published_and_workers_do_not_reach_redis(files: tuple[str, ...]) -> None:
    project = read(files, GRPC_PORT="6001", HTTP_PORT="6002")
    published = {
        name: [(port["target"], port["published"], port["mode"]) for port in service.get("ports", ())]
        for name, service in project["services"].items()
    }
    assert published == {
        "redis": [],
        "kvmanager": [],
        "gpuworker": [],
        "router": [(50051, 6001, "ingress"), (8000, 6002, "ingress")],
    }
    members = {
        network: {name for name, service in project["services"].items() if network in service["networks"]}
        for network in project["networks"]
    }
    assert members == {
        "public": {"router"},
        "internal": {"kvmanager", "gpuworker", "router"},
        "index": {"redis", "kvmanager", "router"},
    }
    assert [project["networks"][name].get("internal") for name in ("public", "internal", "index")] == [None, True, True]
    assert project["networks"]["index"]["driver_opts"] == {"encrypted": "true"}, "Redis speaks plain text"


@both
def test_long_connections_between_services_pass_no_virtual_address(files: tuple[str, ...]) -> None:
    """Swarm cuts idle ones there. A published port needs such an address, and clients come by it."""
    modes = {name: service["deploy"].get("endpoint_mode", "vip") for name, service in services(files).items()}
    assert modes == {"redis": "dnsrr", "kvmanager": "dnsrr", "gpuworker": "dnsrr", "router": "vip"}


@both
def test_every_container_is_confined_and_bounded(files: tuple[str, ...]) -> None:
    for name, service in services(files).items():
        assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True), name
        assert service["user"] == "10001:10001"
        assert {"cpus", "memory", "pids"} == set(service["deploy"]["resources"]["limits"]), name
        assert "/tmp" in {mount["target"] for mount in service["volumes"]}, name
    for name in ("gpuworker", "router"):
        (model,) = [mount for mount in services(files)[name]["volumes"] if mount["target"] == "/model"]
        assert (model["source"], model["read_only"]) == ("/the/model", True)


def test_each_manager_of_a_node_has_a_state_of_its_own() -> None:
    project = read()
    target = image("kvmanager").environment["QUIRE_STATE_DIR"]
    (state,) = [mount["source"] for mount in project["services"]["kvmanager"]["volumes"] if mount["target"] == target]
    assert "{{.Task.Slot}}" in project["volumes"][state]["name"]


# ---------------------------------------------------------------- a container's life


def seconds(duration: str) -> float:
    """Return Docker's `10m0s` in seconds."""
    minutes, _, rest = duration.rpartition("m")
    return 60.0 * float(minutes or 0) + float(rest.removesuffix("s") or 0)


@both
@each_service
def test_there_is_time_to_drain(files: tuple[str, ...], name: str) -> None:
    service = services(files)[name]
    drain = float(service["environment"]["QUIRE_DRAIN_TIMEOUT"]) if name != "kvmanager" else 0.0
    assert seconds(service["stop_grace_period"]) >= drain + 10.0


@both
def test_one_container_is_replaced_at_a_time_and_a_failed_update_is_taken_back(files: tuple[str, ...]) -> None:
    orders = {
        name: service["deploy"]["update_config"].pop("order") for name, service in read(files)["services"].items()
    }
    first = "stop-first" if files == GPU else "start-first"  # a new worker needs the GPU of an old one
    assert orders == {"redis": "stop-first", "kvmanager": "stop-first", "gpuworker": first, "router": "start-first"}
    for service in services(files).values():
        update = service["deploy"]["update_config"]
        assert (update["parallelism"], update["failure_action"]) == (1, "rollback")
        assert service["deploy"]["restart_policy"]["condition"] == "any"


ASKED = {"kvmanager": "http://127.0.0.1:51052/", "gpuworker": "http://127.0.0.1:51053/", "router": "127.0.0.1:50051"}


def fake_probe(program: Path, asked: str, health: bool, live: bool) -> None:
    """Write a `python` whose module common.rpc.probe gives these two answers, and which knows nothing else."""
    words = ("health", "live") if asked.endswith("/") else ("", " live")
    cases = "".join(
        f"'{asked}{word}') exit {int(not good)};;\n" for word, good in zip(words, (health, live), strict=True)
    )
    head = '#!/bin/sh\n[ "$1 $2 $3" = "-I -m common.rpc.probe" ] || exit 9\nshift 3\n'
    program.write_text(f'{head}case "$*" in\n{cases}*) exit 9;;\nesac\n')
    program.chmod(0o755)


@each_service
@pytest.mark.parametrize(
    ("served", "health", "live", "healthy"),
    [
        (False, True, True, True),
        (False, False, True, False),  # it starts: no client is sent to it
        (True, False, True, True),  # it waits for another service: Swarm must not replace it
        (True, False, False, False),  # it hangs
        (True, True, False, True),
    ],
)
def test_a_container_is_healthy_once_it_has_served_and_while_it_lives(
    name: str, served: bool, health: bool, live: bool, healthy: bool, tmp_path: Path
) -> None:
    """By the command of the file itself, in a shell, with a probe that answers what the test says."""
    kind, command = services()[name]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    fake_probe(tmp_path / "python", ASKED[name], health, live)
    mark = tmp_path / "served"
    if served:
        mark.touch()
    run = ["sh", "-c", command.replace("/tmp/served", str(mark))]
    done = subprocess.run(run, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert (done.returncode == 0) == healthy
    assert mark.exists() == (served or health)


def test_health_is_asked_for_at_the_ports_of_the_services() -> None:
    for name in ("kvmanager", "gpuworker"):
        port = metrics_port(None, SETTINGS[name].model_fields["port"].default)
        assert ASKED[name] == f"http://127.0.0.1:{port}/"
    assert ASKED["router"] == f"127.0.0.1:{RouterSettings.model_fields['grpc_port'].default}"


# ---------------------------------------------------------------- GPUs


def test_a_worker_on_a_gpu_reserves_one_and_is_shown_no_other() -> None:
    worker = services(GPU)["gpuworker"]
    assert worker["deploy"]["resources"]["reservations"]["generic_resources"] == [
        {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 1}}
    ]
    assert (worker["image"], worker["environment"]["NVIDIA_VISIBLE_DEVICES"]) == ("quire/gpuworker:cuda", "void")
    (scratch,) = [mount for mount in worker["volumes"] if mount["target"] == "/tmp"]
    assert scratch["type"] == "volume", "a tmpfs of Swarm lets nothing be loaded as code"
    assert seconds(worker["healthcheck"]["start_period"]) == 1800.0
    assert "reservations" not in services(CPU)["gpuworker"]["deploy"]["resources"]
    assert {name: service for name, service in services(GPU).items() if name != "gpuworker"} == {
        name: service for name, service in services(CPU).items() if name != "gpuworker"
    }
