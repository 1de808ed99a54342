"""Compares the attention kernels on a GPU with float64, once for every kind of step, before anything is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.gpu.cases import LLAMA_8B, Case, Heads, Rows, make_case, reference
from bench.gpu.measure import checked
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.attention.triton_tuning import Tuning
from gpuworker.kernels.triton_cache import write_kv
from gpuworker.memory.devices import dtype_name
from gpuworker.runner.cuda_graphs import CudaRecorder

_MIXED = Rows((300, 1, 1040, 77, 200, 33, 129), (1, 1, 1, 1, 150, 33, 5))
_SHARED = Rows((1400, 1100, 1033, 1300), (1,) * 4, shared=1024)
_RAGGED = Rows((700, 1, 90, 2000, 33, 1024, 5, 130, 4000), (1,) * 9)
# Bounds of the relative norm of the difference: rounding of weights and result, not of inputs.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def check_attention(device: torch.device) -> None:
    """Check all kinds of steps; ends the program at the first that is wrong."""
    for dtype, kv_dtype in itertools.product(_TOLERANCE, ("", "int8", "fp8")):
        kv = kv_dtype or dtype_name(dtype)
        case = make_case(replace(LLAMA_8B, dtype=dtype), _MIXED, kv, device)
        _check(f"mixed rows, {dtype_name(dtype)} on {kv}", case, TritonAttention(case.cache))
    for name, heads, rows in (
        ("blocks of 64", LLAMA_8B, replace(_MIXED, block_size=64)),
        ("heads of 64, no group", Heads(8, 8, 64), _MIXED),
        ("groups of two", Heads(16, 8, 128), _MIXED),
    ):
        case = make_case(heads, rows, "bfloat16", device)
        _check(name, case, TritonAttention(case.cache))
    case = make_case(LLAMA_8B, _MIXED, "bfloat16", device)
    _check("window and softcap", case, TritonAttention(case.cache), window=50, softcap=3.0)
    shared = make_case(LLAMA_8B, _SHARED, "bfloat16", device)
    _check("cascade over a shared prefix", shared, TritonAttention(shared.cache, cascade_bytes=1))
    _check_graph("cascade as a graph", shared, TritonAttention(shared.cache, cascade_bytes=1))
    ragged = make_case(LLAMA_8B, _RAGGED, "bfloat16", device)
    _check_graph("decodes as a graph", ragged, TritonAttention(ragged.cache))
    _check_write(device)


def check_case(name: str, case: Case, tuned: Tuning) -> None:
    """Check one step at given tiles; ends the program when it is wrong."""
    _check(name, case, TritonAttention(case.cache, tuned=tuned))


def planned(case: Case, attention: TritonAttention) -> Callable[[int], torch.Tensor]:
    """Plan decodes as for a graph, and return the attention call of each layer."""
    heads = case.heads
    attention.reserve_padded(case.metadata.num_rows, heads.num_heads, heads.dtype)
    attention.begin_padded(case.metadata, heads.num_heads, heads.dtype)
    return lambda index: attention.attend(case.layer(index), case.query)


def _check(
    name: str, case: Case, attention: TritonAttention, window: int | None = None, softcap: float | None = None
) -> None:
    layer = case.layer(0, window, softcap)
    attention.begin(case.metadata)
    _compare(name, attention.attend(layer, case.query), reference(case, layer))


def _check_graph(name: str, case: Case, attention: TritonAttention) -> None:
    out, attend = torch.empty_like(case.query), planned(case, attention)

    def work() -> None:
        out.copy_(attend(0))

    with torch.inference_mode():
        replay = CudaRecorder().record(work, run=True)
        out.fill_(float("nan"))
        replay()
    _compare(name, out, reference(case, case.layer()))


def _compare(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    checked(name, float((out.double() - expected).norm() / expected.norm()), _TOLERANCE[out.dtype])


def _check_write(device: torch.device) -> None:
    """Write K and V of a step and read them back from their slots."""
    case = make_case(LLAMA_8B, _MIXED, "bfloat16", device)
    shape = (case.metadata.num_tokens, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
    key, value = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    write_kv(case.cache, 0, case.metadata.device.slot_mapping, key, value)
    slots = case.metadata.device.slot_mapping.long()
    for name, pool, given in (("keys", case.cache.keys, key), ("values", case.cache.values, value)):
        found = pool[0][slots // case.rows.block_size, :, slots % case.rows.block_size]
        checked(f"{name} are where their slots say", float((found.float() - given.float()).abs().max()), 0.0)
