"""fla-core itself, interpreted: it computes chunks as transformers does, and a mixer takes it.

No environment of tests has it. To run these: pip install --target DIR --no-deps fla-core einops, DIR on PYTHONPATH.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next
from triton.runtime.autotuner import Autotuner

from gpuworker.models.hf import kernel_trial
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.mixer_kernels import fla_chunks
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from tests.gpuworker.runner.test_drafted_states import BACKEND
from tests.support.gpuworker.runner_harness import CPU

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of a host without a GPU, and numpy of exponents


class Count(int):
    """A number of a loop, which compiled code may convert as it converts a tensor."""

    def to(self, _: Any) -> Count:
        return self


def _counts(*bounds: Any) -> Iterator[Count]:
    """Count as `range` does, between bounds that are numbers or the interpreter's scalars."""
    plain = (each.handle.data.item() if hasattr(each, "handle") else each for each in bounds)
    return map(Count, builtins.range(*map(int, plain)))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fla-core run here: nothing is timed, and loops count in what has a method of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("fla.ops.gated_delta_rule", "fla.ops.kda"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                pytest.skip(f"{error}; this is how a worker without the extra `linear` runs")
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0])
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops") and module is not None:
            monkeypatch.setattr(module, "range", _counts, raising=False)


@pytest.mark.parametrize(
    ("name", "by_channel", "tokens"),
    [
        ("torch_chunk_gated_delta_rule", False, 5),
        ("torch_chunk_gated_delta_rule", False, 70),
        ("chunk_kimi_delta_attention", True, 5),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_chunks_and_states_are_those_of_transformers(name: str, by_channel: bool, tokens: int, goes_on: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, tokens, 4, size, generator=draw) for size in (16, 16, 8))
    decay = -torch.rand(2, tokens, 4, *([16] if by_channel else []), generator=draw)
    beta, state = torch.rand(2, tokens, 4, generator=draw), torch.randn(2, 4, 16, 8, generator=draw)
    module = modeling_kimi_linear if by_channel else modeling_qwen3_next
    plain: Callable[..., Any] = inspect.unwrap(getattr(module, name))
    found, wanted = (
        chunk(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=state.clone() if goes_on else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for chunk in (fla_chunks()[name], plain)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_model_takes_it_and_passes_its_self_test(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trial, "_CHUNKED", (0, 12, 21, 24))  # longer chunks take minutes here
    options = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    module = random_module(tiny_config(CONFIG_MAPPING[family](), **options), torch.float32, 0, CPU)
    model = TransformersModel(module.train(False))
    assert model.states is not None
    assert "prefills run in kernels of fla-core" in model.states.kernels_in_words[1]
    self_test(model, BACKEND)
    assert all(mixer._chunk_forward != mixer._forward for mixer in model.states._mixers)
