"""What the processes of a suite have imported after an answer: the most of a start, and of a small model's memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.support.suite import greedy, running_suite

# Python imports this at its start. When a process ends, its modules stand in a file with the name of its main module.
_NOTE = """
import atexit, json, os, sys

def _note(folder=os.environ.get("MODULES_FOLDER"), argv=sys.orig_argv):
    if folder and "-m" in argv:
        name = argv[argv.index("-m") + 1]
        with open(os.path.join(folder, name + ".json"), "w") as file:
            json.dump(sorted(sys.modules), file)

atexit.register(_note)
"""
_TORCH = ("torch", "triton", "transformers", "safetensors", "numpy", "sympy", "huggingface_hub", "scipy")
# Of torch what only compiled models need, and of transformers everything: the demo model runs on the native path.
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton")
UNWANTED = {
    "router": (*_TORCH, "cryptography.x509"),
    "kvmanager": (*_TORCH, "tokenizers", "fastapi", "uvicorn", "jinja2"),
    "gpuworker": (
        *_COMPILERS,
        *("transformers", "huggingface_hub", "scipy", "redis", "fastapi", "uvicorn", "jinja2", "cryptography"),
    ),
}


async def test_each_process_imports_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, site = tmp_path / "modules", tmp_path / "site"
    noted.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(_NOTE)
    monkeypatch.setenv("MODULES_FOLDER", str(noted))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    options = StackOptions(model=CHECKPOINT, worker_flags=("--kv-blocks", "256"))
    async with running_suite(tmp_path / "suite", options) as suite:
        assert len((await suite.generate(greedy(range(6, 40), 4))).tokens) == 4
    found = {name: set(json.loads((noted / f"{name}.json").read_text())) for name in UNWANTED}
    bad = {name: sorted(found[name].intersection(unwanted)) for name, unwanted in UNWANTED.items()}
    assert bad == {name: [] for name in UNWANTED}
    assert "torch" in found["gpuworker"]  # the notes are those of processes that served
