"""`buf curl` lists every service of every process by reflection, and calls each: it needs no .proto file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.suites.clients.served import Served

BUF = Path(sys.executable).with_name("buf")
ROUTER, ADMIN, MANAGER, WORKER = "router", "admin plane", "kvmanager", "gpuworker"
OF_EVERY_PROCESS = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
SERVICES = {
    ROUTER: {
        "quire.inference.v1.InferenceService",
        "quire.decision.v1.DecisionService",
        "inference.GRPCInferenceService",
        *("vllm.Control", "vllm.Inference", "vllm.grpc.engine.VllmEngine"),
    },
    ADMIN: {
        "quire.inference.v1.InferenceService",
        "quire.decision.v1.DecisionService",
        "quire.kvmanager.v1.KvManagerService",
        "opentelemetry.proto.collector.trace.v1.TraceService",
    },
    MANAGER: {"quire.kvmanager.v1.KvManagerService", "quire.decision.v1.DecisionService"},
    WORKER: {"quire.gpuworker.v1.GpuWorkerService"},
}
CALLS = [
    (ROUTER, "quire.inference.v1.InferenceService/GetStatus", "{}", "workerId"),
    (ADMIN, "quire.inference.v1.InferenceService/GetStatus", "{}", "address"),
    (ADMIN, "quire.decision.v1.DecisionService/ListDecisions", "{}", ""),
    (ADMIN, "grpc.health.v1.Health/Check", "{}", "SERVING"),
    (ROUTER, "inference.GRPCInferenceService/ServerReady", "{}", "ready"),
    (ROUTER, "grpc.health.v1.Health/Check", "{}", "SERVING"),
    (MANAGER, "quire.kvmanager.v1.KvManagerService/GetPool", "{}", "worker-0"),
    (MANAGER, "quire.decision.v1.DecisionService/ListDecisions", "{}", ""),
    (WORKER, "quire.gpuworker.v1.GpuWorkerService/GetWorker", "{}", "identity"),
]


def address(served: Served, process: str) -> str:
    options = served.suite.stack.options
    ports = {ROUTER: options.grpc_port, MANAGER: options.manager_port, WORKER: options.worker_ports[0]}
    return f"http://127.0.0.1:{ports.get(process, options.admin_port)}"


def curl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)


def documents(text: str) -> list[dict[str, Any]]:
    """Return the JSON documents that follow each other in a text."""
    found: list[dict[str, Any]] = []
    while text := text.lstrip():
        document, end = json.JSONDecoder().raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


@pytest.mark.parametrize("process", SERVICES)
def test_it_lists_the_services_of_each_process(served: Served, process: str) -> None:
    listed = curl("--list-services", address(served, process))
    assert set(listed.stdout.split()) == SERVICES[process] | OF_EVERY_PROCESS, listed.stderr


@pytest.mark.parametrize(("process", "method", "request_json", "words"), CALLS)
def test_it_calls_each_service(served: Served, process: str, method: str, request_json: str, words: str) -> None:
    done = curl(f"{address(served, process)}/{method}", "-d", request_json)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_it_streams_an_answer(served: Served) -> None:
    request = {"prompt": {"text": "The river"}, "sampling": {"max_tokens": 3, "ignore_eos": True}}
    method = "quire.inference.v1.InferenceService/Generate"
    done = curl(f"{address(served, ROUTER)}/{method}", "-d", json.dumps(request))
    assert done.returncode == 0, done.stderr
    events = documents(done.stdout)
    kinds = [kind for event in events for kind in event]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("admitted", "finished", {"tokens"})
    assert sum(len(event["tokens"]["tokenIds"]) for event in events[1:-1]) == 3


def test_a_refusal_names_every_wrong_field(served: Served) -> None:
    request = {"prompt": {"text": "The river"}, "priority": 500, "sampling": {"top_p": 2}}
    method = "quire.inference.v1.InferenceService/Generate"
    done = curl(f"{address(served, ROUTER)}/{method}", "-d", json.dumps(request))
    assert done.returncode != 0
    assert "priority" in done.stderr
    assert "sampling.top_p" in done.stderr
