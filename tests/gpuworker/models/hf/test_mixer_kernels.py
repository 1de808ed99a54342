"""Kernels of mixers where none run: on a CPU, beside packages for GPUs, and with the cache of older transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpuworker.models.hf.mixer_kernels import without_foreign_kernels
from gpuworker.models.hf.mixers import MixerStates
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.runner_harness import CPU, transformers_model

CUDA = torch.device("cuda")
# Packages as they are on a CPU: they can be imported, and their functions fail.
FAILING = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def failing(*given, **named):
        raise RuntimeError("0 active drivers")
    return failing
"""
SCRIPT = """
import functools, importlib, sys
from pathlib import Path
from gpuworker.attention.backends import make_backend
from gpuworker.models.self_test import self_test
from tests.support.gpuworker.runner_harness import transformers_model
for kind in ("qwen3_next", "mamba2"):
    self_test(transformers_model(Path(sys.argv.pop(1))), functools.partial(make_backend, "auto"))
    module = importlib.reload(sys.modules[f"transformers.models.{kind}.modeling_{kind}"])
    try:
        module.causal_conv1d_update()
    except RuntimeError as error:
        print(error)
"""


def test_a_model_runs_on_a_cpu_beside_packages_that_fail_there(tmp_path: Path) -> None:
    """Left to itself, transformers takes their functions."""
    for package in ("fla", "fla/ops", "fla/ops/gated_delta_rule", "causal_conv1d", "mamba_ssm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(FAILING)
    path = os.pathsep.join((str(tmp_path), *sys.path))
    folders = [str(checkpoint(kind)) for kind in ("qwen3_next", "mamba2")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("0 active drivers") == 2


def test_what_is_hidden_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("fla")
    monkeypatch.setitem(sys.modules, "fla", own)
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    with without_foreign_kernels(CPU), pytest.raises(ImportError):
        import fla  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    assert sys.modules["fla"] is own
    assert "mamba_ssm" not in sys.modules


def test_on_a_gpu_transformers_may_take_what_runs_there_but_for_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("mamba_ssm")
    monkeypatch.setitem(sys.modules, "mamba_ssm", own)
    with without_foreign_kernels(CUDA):
        assert sys.modules["mamba_ssm"] is own
        assert sys.modules["fla"] is None


def test_on_a_cpu_mixers_run_in_torch_without_a_word() -> None:
    states = transformers_model(checkpoint("qwen3_next")).states
    assert states is not None
    assert not states.stepped
    assert not states.chunked
    assert states.kernels_in_words == []


class OlderCode(torch.nn.Module):
    """Sums up hidden states, in a state that it reads as the code of transformers 5.17 does."""

    layer_idx = 3

    def forward(self, hidden: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        if cache_params is None:
            return hidden.cumsum(1)
        before = 0
        if cache_params.has_previous_state(self.layer_idx):
            assert not cache_params.layers[self.layer_idx].record_past
            assert cache_params.layers[self.layer_idx].conv_states[1].shape == (1, 4, 1)
            before = cache_params.layers[self.layer_idx].recurrent_states[0][:, None]
        out = before + hidden.cumsum(1)
        cache_params.update_conv_state(hidden.transpose(1, 2), self.layer_idx, state_idx=1, conv_kernel_size=1)
        cache_params.update_recurrent_state(out[:, -1], self.layer_idx)
        return out


def test_code_of_older_transformers_finds_its_states_in_layers() -> None:
    mixer, hidden = OlderCode(), torch.randn(1, 12, 4)
    states = MixerStates(torch.nn.Sequential(mixer))
    with torch.inference_mode():
        states.compare(lambda: mixer(hidden))
    assert not states.token_by_token
