"""Attention on a GPU against a copy of its bytes, SDPA's flash kernel, and varlen_attn.

Every kind of step is compared with float64 first. Times are of CUDA graphs, over so many layers in turn that K and V
stay out of the L2 cache. Bandwidth is the bytes of K and V, read once, over that time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.attention_checks import check_attention, planned
from bench.gpu.cases import LLAMA_8B, Case, Rows, make_case
from bench.gpu.measure import Figure, copy_bandwidth, graph_seconds, parser, report, rotation, the_device
from gpuworker.attention.triton_backend import TritonAttention

Sizes = tuple[tuple[int, int], ...]
# Batch and context of decodes. K and V of a layer, in bf16: 128 MiB and more; and from 8 to 128 MiB.
_LARGE = ((32, 1024), (8, 8192), (128, 1024), (64, 4096))
_SMALL = ((1, 2048), (1, 16384), (8, 1024), (32, 256), (16, 1024))
_PREFILLS = (4096, 8192)
_VARLEN = ((32, 1024), (8, 8192))
# Rows, shared positions, positions of their own, and the least speed-up.
_CASCADES = ((32, 2048, 128, 3.0), (128, 2048, 128, None), (32, 512, 512, None))
_VARLEN_PAGES = (16, 256)  # Quire's page size, and that of flash kernels without small pages


def main() -> None:
    flags = parser(__doc__)
    args = flags.parse_args()
    device = the_device("gpu_attention")
    check_attention(device)
    copied = copy_bandwidth(device)
    figures = [Figure("copy_gb_s", copied / 1e9, "copy of 1 GiB on the device, bytes read and written")]
    if not args.quick:
        for group in (_decodes(device, copied), _narrow(device), _varlen(device), _prefills(device), _cascade(device)):
            for figure in group:
                print(f"timed  {figure.name}", flush=True)
                figures.append(figure)
    report("gpu_attention", device, figures)


# ---------------------------------------------------------------- decodes


def decode_seconds(case: Case, cascade: bool = False) -> float:
    """Return the time of one layer's attention over a step of decodes."""
    attention = TritonAttention(case.cache, **({} if cascade else {"cascade_bytes": None}))
    return _seconds_a_layer(planned(case, attention), case.cache.geometry.num_layers)


def _seconds_a_layer(attend: Callable[[int], object], layers: int) -> float:
    def work() -> None:
        for index in range(layers):
            attend(index)

    return graph_seconds(work) / layers


def _rotating(batch: int, context: int, kv_dtype: str, device: torch.device, block_size: int = 16) -> Case:
    """Return decodes with enough layers to keep the L2 cache cold."""
    rows = Rows.decodes(batch, context, block_size=block_size)
    each = 2 * batch * context * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * (2 if kv_dtype == "bfloat16" else 1)
    return make_case(LLAMA_8B, rows, kv_dtype, device, rotation(each, device))


def _decodes(device: torch.device, copied: float) -> Iterator[Figure]:
    """Yield the bandwidth of each size over a copy's, and the geometric mean of each range."""
    for name, sizes, target in (("large", _LARGE, 0.85), ("small", _SMALL, 0.70)):
        shares = []
        for batch, context in sizes:
            case = _rotating(batch, context, "bfloat16", device)
            shares.append(case.read_bytes / decode_seconds(case) / copied)
            what = f"decode bandwidth over copy: {batch} rows of {context}, {case.read_bytes >> 20} MiB a layer"
            yield Figure(f"decode_{batch}x{context}_over_copy", shares[-1], what)
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        words = "128 MiB and more" if name == "large" else "8 to 128 MiB"
        yield Figure(f"decode_{name}_over_copy", mean, f"geometric mean, {words} of K and V a layer", target)


def _narrow(device: torch.device, size: tuple[int, int] = (32, 4096)) -> Iterator[Figure]:
    """Yield the time of narrow caches over that of bf16."""
    wide = decode_seconds(_rotating(*size, "bfloat16", device))
    for kv_dtype, target in (("fp8", 0.62), ("int8", None)):
        seconds = decode_seconds(_rotating(*size, kv_dtype, device))
        what = f"decode of {size[0]} rows of {size[1]}: time on {kv_dtype} over time on bf16"
        yield Figure(f"{kv_dtype}_over_bf16", seconds / wide, what, target, at_most=True)


# ---------------------------------------------------------------- varlen_attn


def _varlen(device: torch.device, sizes: Sizes = _VARLEN) -> Iterator[Figure]:
    """Yield Quire's decode time over that of torch's flash kernel, on pages where it has them."""
    paged = "block_table" in inspect.signature(varlen.varlen_attn).parameters
    for batch, context in sizes:
        ours = decode_seconds(_rotating(batch, context, "bfloat16", device))
        for page in _VARLEN_PAGES if paged else (0,):
            where = f"on pages of {page}" if page else "on contiguous K/V (this torch's has no block table)"
            what = f"decode of {batch} rows of {context}: our time over varlen_attn's {where}"
            name = f"decode_{batch}x{context}_over_varlen_{page or 'contiguous'}"
            try:
                seconds = _varlen_seconds(batch, context, page, device)
            except (RuntimeError, ValueError) as error:
                reason = (str(error).splitlines() or [repr(error)])[0]
                yield Figure(name, None, f"varlen_attn {where} refuses: {reason}")
                continue
            yield Figure(name, ours / seconds, what, 1.1, at_most=True)


def _varlen_seconds(batch: int, context: int, page: int, device: torch.device) -> float:
    """Return the time of varlen_attn; `page` 0 is contiguous K and V."""
    heads = LLAMA_8B
    layers = rotation(4 * batch * context * heads.num_kv_heads * heads.head_dim, device)
    query = torch.randn((batch, heads.num_heads, heads.head_dim), device=device).bfloat16()
    pool = (batch * context // page, page) if page else (batch * context,)
    shape = (layers, *pool, heads.num_kv_heads, heads.head_dim)
    keys, values = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    of_keys = None if page else starts * context
    options: dict[str, Any] = {"scale": heads.scale}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = True
    if page:
        table = torch.randperm(batch * context // page, device=device, dtype=torch.int32).view(batch, -1)
        used = torch.full((batch,), context, dtype=torch.int32, device=device)
        options |= {"block_table": table, "seqused_k": used}

    def attend(index: int) -> None:
        varlen.varlen_attn(query, keys[index], values[index], starts, of_keys, 1, context, **options)

    return _seconds_a_layer(attend, layers)


# ---------------------------------------------------------------- prefill and cascade


def _prefills(device: torch.device) -> Iterator[Figure]:
    """Yield the speed of a causal prefill, and over SDPA's flash kernel on contiguous K and V."""
    heads = LLAMA_8B
    for length in _PREFILLS:
        case = make_case(heads, Rows((length,), (length,)), "bfloat16", device)
        ours = _prefill_seconds(case)
        flash = _flash_seconds(length, device)
        work = 2 * length * length * heads.num_heads * heads.head_dim  # two products, half of them masked
        yield Figure(f"prefill_{length}_tflop_s", work / ours / 1e12, f"causal prefill of {length} tokens")
        what = f"its speed over torch SDPA, flash, at {work / flash / 1e12:.0f} TFLOP/s"
        yield Figure(f"prefill_{length}_over_flash", flash / ours, what, 0.70)


def _prefill_seconds(case: Case) -> float:
    attention = TritonAttention(case.cache)
    attention.begin(case.metadata)

    def work() -> None:
        attention.attend(case.layer(), case.query)

    return graph_seconds(work)


def _flash_seconds(length: int, device: torch.device) -> float:
    heads = LLAMA_8B
    query, key, value = (
        torch.randn((1, count, length, heads.head_dim), device=device).bfloat16()
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )

    def work() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return graph_seconds(work)


def _cascade(
    device: torch.device, shapes: tuple[tuple[int, int, int, float | None], ...] = _CASCADES
) -> Iterator[Figure]:
    """Yield the gain of attending a shared prefix once."""
    for batch, shared, tail, target in shapes:
        rows = Rows.decodes(batch, shared + tail, shared)
        case = make_case(LLAMA_8B, rows, "bfloat16", device, layers=4)
        gain = decode_seconds(case) / decode_seconds(case, cascade=True)
        what = f"{batch} rows share {shared} tokens and have {tail} of their own: time without cascade over with"
        yield Figure(f"cascade_{batch}x{shared}", gain, what, target)


if __name__ == "__main__":
    main()
