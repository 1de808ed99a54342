"""Layers as models have them, and the host code that launches their kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from bench.gpu_states import STEPS, DeltaRule, StateSpace, Step
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.attention.triton_tuning import Chip
from gpuworker.kernels.torch_adapters import DeviceAdapter, LowRankPart
from gpuworker.kernels.torch_experts import Experts
from gpuworker.kernels.triton_adapters import add_low_rank
from gpuworker.kernels.triton_elementwise import add_rms_norm, rms_norm, silu_and_mul
from gpuworker.kernels.triton_experts import mix_experts
from gpuworker.kernels.triton_rope import QkNorm, rope_and_write, rope_table
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.adapters import adapter_rows
from tests.suites.triton_compiled.compiling import CHIPS, Compiled, compile_launches
from tests.support.gpuworker.attention_reference import CPU, Case, random_step

# A decode that is cut and a prefill, on blocks smaller and larger than tiles: every way through the launches.
ROWS = ((900, 1), (3, 20))


class Workload(Protocol):
    def prepared(self, chip: Chip) -> Callable[[], object]:
        """Return a function that launches the kernels on this chip."""
        ...


@dataclass(frozen=True)
class Attention:
    """A layer's attention: its heads, the types of cache and queries, and its options."""

    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    cache_dtype: str = "bfloat16"
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    block_size: int = 16
    values_in_keys: bool = False
    chunk: int | None = None

    def prepared(self, chip: Chip) -> Callable[[], object]:
        sizes = (self.num_kv_heads, self.head_dim_k, self.head_dim_v)
        step = random_step(Case(ROWS, 128, self.num_heads, *sizes, 1))
        geometry = KvGeometry(1, *sizes, self.cache_dtype, values_in_keys=self.values_in_keys)
        attention = TritonAttention(KvCache(geometry, 2, self.block_size, CPU), chip=chip)
        sinks = torch.zeros(self.num_heads, dtype=self.dtype) if self.with_sinks else None
        layer = LayerAttention(0, 0.1, self.window, self.softcap, sinks, chunk=self.chunk)
        inputs = [t.to(self.dtype) for t in (step.query, step.key, step.value)]
        attention.begin(step.metadata)
        return lambda: attention.write_and_attend(layer, *inputs)


@dataclass(frozen=True)
class LlamaLayer:
    """The kernels between the matrix products of a Llama-like layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    cache_dtype: str = "bfloat16"
    qk_norm: bool = False

    def prepared(self, chip: Chip) -> Callable[[], object]:
        geometry = KvGeometry(1, self.num_kv_heads, self.head_dim, self.head_dim, self.cache_dtype)
        cache = KvCache(geometry, 2, 16, CPU)
        qkv, x, gate_up = (
            torch.zeros((4, width), dtype=torch.bfloat16)
            for width in ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.hidden, 7 * self.hidden)
        )
        weight, head_weight = x[0], qkv[0, : self.head_dim]
        norm = QkNorm(head_weight, head_weight, 1e-6) if self.qk_norm else None
        table = rope_table(torch.ones(self.head_dim // 2), 8)
        positions = torch.zeros(4, dtype=torch.int32)

        def launch() -> None:
            rms_norm(x, weight, 1e-6)
            add_rms_norm(x, x, weight, 1e-6)
            rope_and_write(cache, 0, qkv, table, positions, positions, norm)
            silu_and_mul(gate_up)

        return launch


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer, for a step of so many tokens; the weights take no memory."""

    tokens: int
    count: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16

    def prepared(self, chip: Chip) -> Callable[[], object]:
        place = torch.zeros(1, dtype=self.dtype)
        gate_up = place.expand(self.count, 2 * self.inner, self.hidden)
        down = place.expand(self.count, self.hidden, self.inner)
        router = torch.zeros((self.count, self.hidden), dtype=self.dtype)
        experts = Experts(router, gate_up, down, self.top_k, normalised=True)
        x = torch.zeros((self.tokens, self.hidden), dtype=self.dtype)
        return lambda: mix_experts(x, experts)


@dataclass(frozen=True)
class Adapters:
    """The low-rank products of two adapters beside a linear, for rows of both."""

    tokens: int
    rank: int
    inputs: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def prepared(self, chip: Chip) -> Callable[[], object]:
        parts = [
            LowRankPart(
                torch.zeros((self.rank, self.inputs), dtype=self.dtype),
                torch.zeros((size, self.rank), dtype=self.dtype),
            )
            for size in self.sizes
        ]
        adapters = tuple(DeviceAdapter.of(self.rank, [parts], CPU) for _ in range(2))
        rows = adapter_rows(StepAdapters(adapters, np.arange(self.tokens, dtype=np.int32) % 2), CPU)
        x, out = (torch.zeros((self.tokens, width), dtype=self.dtype) for width in (self.inputs, sum(self.sizes)))
        return lambda: add_low_rank(out, x, 0, self.sizes, rows)


@dataclass(frozen=True)
class StateStep:
    """The step of the states of a mixer, for two rows."""

    step: Step
    dtype: torch.dtype = torch.bfloat16

    def prepared(self, chip: Chip) -> Callable[[], object]:
        given, places = self.step.inputs(2, self.dtype, CPU), torch.tensor([1, 0])
        states = torch.zeros((2, *self.step.shape), dtype=self.step.state_dtype(self.dtype))
        return lambda: self.step.in_place(given, states, places, places)


WORKLOADS: dict[str, Workload] = {
    "llama": Attention(32, 8, 128, 128),
    "llama, int8": Attention(32, 8, 128, 128, "int8"),
    "llama, fp8": Attention(32, 8, 128, 128, "fp8"),
    "qwen2 0.5b, float16": Attention(14, 2, 64, 64, "float16", torch.float16),
    "mistral, large blocks": Attention(32, 8, 128, 128, window=4096, block_size=256),
    "gemma2 9b": Attention(16, 8, 256, 256, window=4096, softcap=50.0),
    "gemma2 9b, fp8": Attention(16, 8, 256, 256, "fp8", window=4096, softcap=50.0),
    "gpt-oss": Attention(64, 8, 64, 64, window=128, with_sinks=True),
    "llama 4 scout": Attention(40, 8, 128, 128, chunk=8192),
    "all options, int8": Attention(32, 8, 128, 128, "int8", window=128, softcap=30.0, with_sinks=True),
    "qwen2 0.5b, int8": Attention(14, 2, 64, 64, "int8"),
    "phi3 mini": Attention(32, 32, 96, 96),
    "deepseek": Attention(16, 16, 192, 128),
    "wide heads": Attention(8, 1, 512, 512),
    "one kv head": Attention(71, 1, 64, 64),
    "deepseek v3, latents": Attention(128, 1, 576, 512, values_in_keys=True),
    "deepseek v3, latents in fp8": Attention(128, 1, 576, 512, "fp8", values_in_keys=True),
    "deepseek v3, latents in int8": Attention(128, 1, 576, 512, "int8", values_in_keys=True),
    "glm 4.7 flash, latents": Attention(20, 1, 576, 512, values_in_keys=True),
    "minicpm3, latents": Attention(40, 1, 288, 256, values_in_keys=True),
    "float32": Attention(32, 8, 64, 64, "float32", torch.float32),
    "llama 8b": LlamaLayer(32, 8, 128, 4096),
    "qwen3 0.6b": LlamaLayer(16, 8, 128, 1024, qk_norm=True),
    "qwen2 0.5b, fp8": LlamaLayer(14, 2, 64, 896, "fp8"),
    "mixtral 8x7b, a decode": ExpertLayer(1, 8, 2, 4096, 14336),
    "mixtral 8x7b, a prefill": ExpertLayer(2048, 8, 2, 4096, 14336),
    "qwen3 30b a3b, decodes": ExpertLayer(256, 128, 8, 2048, 768),
    "qwen3 30b a3b, float16": ExpertLayer(1024, 128, 8, 2048, 768, torch.float16),
    "experts in float32": ExpertLayer(512, 8, 2, 1024, 3072, torch.float32),
    "adapters of rank 16, llama 8b": Adapters(8, 16, 4096, (4096, 1024, 1024)),
    "adapters of rank 64, float16": Adapters(64, 64, 14336, (4096,), torch.float16),
    "adapters in float32": Adapters(4, 8, 1024, (3072, 3072), torch.float32),
    **{name: StateStep(step) for name, step in STEPS.items()},
    "wide heads of keys": StateStep(DeltaRule(2, 2, 1024, 256, by_channel=True), torch.float16),
    "wide states": StateStep(StateSpace(1, 2, 64, 1024), torch.float32),
}

ON_EVERY_CHIP = ("llama", "mixtral 8x7b, a prefill")
"""Of attention and of experts one. `.ci/run` compiles the others for one chip each, in turn."""

Results = dict[tuple[int, str], "Future[list[Compiled]]"]


def is_quick(chip: int, name: str) -> bool:
    """Tell whether `.ci/run` compiles a workload for a chip; `make search` compiles every one for every chip."""
    chips = list(CHIPS)
    return name in ON_EVERY_CHIP or chips[list(WORKLOADS).index(name) % len(chips)] == chip


def compiled(chip: int, name: str) -> list[Compiled]:
    """Return the kernels that a workload launches on a chip, in the order of the launches."""
    return compile_launches(CHIPS[chip], WORKLOADS[name].prepared(CHIPS[chip]))
