"""Workers of another host on a real engine: two projects, which reach each other at published ports alone.

One engine stands for both hosts. The address of its bridge is that of both: what one project publishes there the other
one reaches, and no network is common to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.suites.deployment.docker.engine.stack import FILES, PROJECT, Stack, Transcript

WORKER_FILES = (
    "docker/worker.compose.yaml",
    "tests/suites/deployment/docker/engine/load.worker.compose.yaml",
)
CERTIFICATES = "certs:/var/lib/quire/certs/worker"
SAMPLED = """
import re, urllib.request
text = urllib.request.urlopen('http://{}:{}/metrics', timeout=10).read().decode()
print(re.search(r'^quire:engine_tokens_sampled_total (\\S+)$', text, re.M)[1])
"""


@pytest.fixture(scope="module")
def address(stack: Stack) -> str:
    """The engine's own address, as containers of every network reach it."""
    return stack.docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}").strip()


@pytest.fixture(scope="module")
def first(transcript: Transcript, address: str) -> Iterator[Stack]:
    """The host of router, manager and Redis, without a worker."""
    files = (*FILES, "docker/hosts.compose.yaml")
    running = Stack(transcript, f"{PROJECT}-first", files, HOST_ADDRESS=address, CPU_WORKERS="0")
    running.take_down()
    try:
        running.compose("up", "--detach")
        yield running
    finally:
        running.take_down()


@pytest.fixture(scope="module")
def workers(
    transcript: Transcript, address: str, first: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The host of two workers, with the certificates that the first host has made."""
    folder = tmp_path_factory.mktemp("certs") / "worker"
    first.compose("cp", CERTIFICATES, str(folder))
    for path in (folder.parent, folder):
        path.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)  # the container's user is another one than this test's
    variables = {
        "MANAGER": f"{address}:50052",
        "ROUTER": f"{address}:50050",
        "WORKER_ADDRESS": address,
        "CERTS_DIR": str(folder),
    }
    running = Stack(transcript, f"{PROJECT}-workers", WORKER_FILES, **variables)
    running.compose("--profile", "workers-2", "down", "--remove-orphans")
    try:
        with transcript.timed("docker compose -f docker/worker.compose.yaml --profile workers-2 up --wait"):
            running.compose("--profile", "workers-2", "up", "--detach", "--wait", "--wait-timeout", "240")
        yield running
    finally:
        running.compose("--profile", "workers-2", "down", "--remove-orphans")


def test_no_network_is_common_to_both_hosts(first: Stack, workers: Stack) -> None:
    networks = [
        {name for each in stack.containers() for name in each["Networks"].split(",")} for stack in (first, workers)
    ]
    assert all(networks)
    assert not networks[0] & networks[1]


def test_streams_run_on_the_workers_of_the_other_host(
    first: Stack, workers: Stack, address: str, transcript: Transcript
) -> None:
    answer = json.loads(first.compose("run", "--no-deps", "--rm", "-T", "client", "once").splitlines()[-1])
    transcript.say(f"answered: {answer}")
    assert re.fullmatch(rf"{re.escape(address)}-[12]", answer["worker"])
    with first.load() as load:
        load.more(3, worker=f"{address}-1")
        load.more(3, worker=f"{address}-2")
        with transcript.timed("docker compose stop gpuworker-2, under load"):
            workers.compose("stop", "gpuworker-2")
        load.more(12)
    transcript.say(first.compose("exec", "-T", "router", "quire", "status"))


def test_metrics_of_a_worker_are_at_its_own_port(first: Stack, workers: Stack, address: str) -> None:
    assert float(first.python("router", SAMPLED.format(address, 51053))) > 0
    assert workers.python("gpuworker-1", SAMPLED.format("127.0.0.1", 51053))
