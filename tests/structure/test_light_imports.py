"""What each part loads: control plane and simulated worker no torch, engine no gRPC, Redis or tracing; seen afresh."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import common
import kvmanager
import router

CONTROL_PLANE = [
    module.name
    for package in (common, kvmanager, router)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
SIMULATED_WORKER = ["gpuworker.main", "gpuworker.plane.preflight", "gpuworker.simulated.plane"]
CLIENT = ["cli.main", "cli.client", "cli.commands.status", "cli.commands.why", "cli.commands.keys"]
ENGINE = [
    "gpuworker.engine.engine",
    "gpuworker.peers.client",
    "gpuworker.peers.server",
    "gpuworker.runner.model_runner",
    "gpuworker.attention.torch_backend",
]


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (CONTROL_PLANE, {"torch", "triton", "transformers", "safetensors"}),
        (SIMULATED_WORKER, {"torch", "triton", "transformers", "safetensors"}),
        (CLIENT, {"numpy", "redis", "opentelemetry", "router.config", "gpuworker.config", "kvmanager.config"}),
        (ENGINE, {"grpc", "google.protobuf", "redis", "opentelemetry", "prometheus_client", "pydantic"}),
        (
            ["common.contracts.hashing", "common.contracts.lease", "common.contracts.errors"],
            {"numpy", "grpc", "google.protobuf", "pydantic"},
        ),
    ],
    ids=["control plane", "simulated worker", "client commands", "engine", "contracts"],
)
def test_importing_loads_nothing_that_is_not_needed(modules: list[str], unwanted: set[str]) -> None:
    script = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert unwanted & set(json.loads(loaded)) == set()
