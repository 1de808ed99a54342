"""Times the attention kernel at other tiles than `gpuworker/attention/triton_tuning.py` chooses for this chip.

The first lines are what to write there. Decodes are timed on K and V out of the L2 cache, prefills alone. A shape that
does not fit into the chip's shared memory is left out; a shape with wrong results ends the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from triton import OutOfResources

from bench.gpu.attention_checks import check_case, planned
from bench.gpu.cases import LLAMA_8B, Case, Rows, make_case
from bench.gpu.measure import Figure, graph_seconds, parser, report, rotation, the_device
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.attention.triton_tuning import Heads, KernelShape, Tuning, chip_of, tuning

_DECODES = ((1, 8192), (32, 1024))
_PREFILL = 4096
_SINGLES = tuple(itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (2, 4, 8)))  # tile, warps, stages, programs
_MANIES = tuple(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)))  # rows, tile, warps, stages


@dataclass(frozen=True, slots=True)
class Tried:
    """A tuning that was timed: its description, and its time in seconds."""

    words: str
    seconds: float


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--best", type=int, default=5, help="how many shapes to print of each kind")
    args = flags.parse_args()
    device = the_device("gpu_tuning")
    figures: list[Figure] = []
    for kv_dtype in ("bfloat16", "fp8"):
        for batch, context in _DECODES[: 1 if args.quick else None]:
            name = f"{kv_dtype}_{batch}x{context}"
            figures += ranked(name, decodes(batch, context, kv_dtype, device), args.best)
    if not args.quick:
        figures += ranked(f"prefill_{_PREFILL}", prefills(device), args.best)
    report("gpu_tuning", device, figures)


def ranked(name: str, tried: Iterator[Tried], best: int) -> Iterator[Figure]:
    """Yield the time of the first tuning, which the chip uses today, and of the fastest."""
    today, *others = tried
    yield Figure(f"{name}_today_us", 1e6 * today.seconds, today.words)
    for place, each in enumerate(sorted(others, key=lambda other: other.seconds)[:best], start=1):
        yield Figure(f"{name}_{place}_us", 1e6 * each.seconds, each.words)


def chosen(case: Case, device: torch.device) -> Tuning:
    """Return the chip's present tuning for the heads of a case."""
    heads, dim = case.heads, case.heads.head_dim
    shape = Heads(heads.num_heads, heads.num_kv_heads, dim, dim, heads.dtype.itemsize, case.cache.keys.itemsize)
    return tuning(chip_of(device), shape)


def decodes(batch: int, context: int, kv_dtype: str, device: torch.device) -> Iterator[Tried]:
    """Yield the time of one layer's attention over decodes, today's tuning first."""
    each = 4 * batch * context * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim
    case = make_case(LLAMA_8B, Rows.decodes(batch, context), kv_dtype, device, rotation(each // 2, device))
    today, layers = chosen(case, device), case.cache.geometry.num_layers

    def seconds(tuned: Tuning) -> float:
        attend = planned(case, TritonAttention(case.cache, tuned=tuned, cascade_bytes=None))

        def work() -> None:
            for index in range(layers):
                attend(index)

        return graph_seconds(work) / layers

    yield Tried(f"today: {_words(today.single)}", seconds(today))
    for tile, warps, stages, programs in _SINGLES:
        shape = KernelShape(today.single.block_m, tile, warps, stages)
        items = -(-programs * chip_of(device).multiprocessors // LLAMA_8B.num_kv_heads)
        tuned = replace(today, single=shape, single_cut=replace(today.single_cut, tile=tile, items=items))
        yield from _tried(f"{_words(shape)}, {programs} programs a multiprocessor", tuned, case, seconds)


def prefills(device: torch.device) -> Iterator[Tried]:
    """Yield the time of a causal prefill, today's tuning first."""
    case = make_case(LLAMA_8B, Rows((_PREFILL,), (_PREFILL,)), "bfloat16", device)
    today = chosen(case, device)

    def seconds(tuned: Tuning) -> float:
        attention = TritonAttention(case.cache, tuned=tuned)
        attention.begin(case.metadata)

        def work() -> None:
            attention.attend(case.layer(), case.query)

        return graph_seconds(work)

    yield Tried(f"today: {_words(today.many)}", seconds(today))
    group = LLAMA_8B.num_heads // LLAMA_8B.num_kv_heads
    for rows, tile, warps, stages in _MANIES:
        shape = KernelShape(max(rows, group), tile, warps, stages)
        tuned = replace(today, many=shape, many_cut=replace(today.many_cut, tile=tile, queries=shape.block_m // group))
        yield from _tried(f"{shape.block_m} rows, {_words(shape)}", tuned, case, seconds)


def _tried(words: str, tuned: Tuning, case: Case, seconds: Callable[[Tuning], float]) -> Iterator[Tried]:
    """Yield one tuning, after its result was compared with float64; nothing where it does not fit the chip."""
    try:
        check_case(words, _small(case), tuned)
        found = Tried(words, seconds(tuned))
    except OutOfResources as error:
        print(f"left out  {words}: {error}", flush=True)
        return
    yield found


def _small(case: Case) -> Case:
    """Return a small case with the same heads and types, for a quick reference in float64."""
    rows = Rows((300, 1, 1040, 200), (1, 1, 1, 150))
    return make_case(case.heads, rows, case.cache.geometry.dtype, case.query.device)


def _words(shape: KernelShape) -> str:
    return f"tile {shape.tile}, {shape.num_warps} warps, {shape.num_stages} stages"


if __name__ == "__main__":
    main()
