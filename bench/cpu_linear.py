"""Native linear layers on this CPU: time of a call by kind, shape and rows, beside oneDNN and the read floor.

Shapes are those of a 128M model (hidden 768) and, with --model 8b, of an 8B one. Calls rotate over enough copies of the
weights that no cache keeps them. Three contenders take turns with output of the same type: Quire, oneDNN with a
prepacked weight, and torch's F.linear. For integer kinds the others use the float weight. The floor is the bytes of the
packed weight over the read rate of the same threads, measured in the same run.

With `--level`, each level runs in turn, and a figure's name ends with its level: f32_many_over_onednn_avx2.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from bench.lib.cpu_levels import add_level_flag, at_levels
from bench.lib.harness import end_with_json, parser, report
from bench.lib.rates import fastest_in_turns
from gpuworker.native.linear import IntegerWeight, Kind, Memory, PackedLinear, Rows, Store

_SHAPES = {  # name: [N, K]
    "128m": {"qkv": (1280, 768), "o": (768, 768), "gate_up": (6144, 768), "down": (768, 3072), "lm_head": (32000, 768)},
    "8b": {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
_ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
_FEW, _MANY = 8, 64  # rows up to which reading is the limit, and from which arithmetic is
_COPIES_BYTES = 160 << 20
_FLOPS = 4e10  # FLOP of all calls of a contender in one turn, at most
_READ_BYTES = 256 << 20
_T = TypeVar("_T")
_HALVES = (Kind.BF16, Kind.I8_BF16, Kind.I4_BF16)


@dataclass(frozen=True, slots=True)
class Cell:
    """The seconds of a call of one shape, kind and number of rows, by contender; oneDNN has no bf16 at AVX2."""

    kind: Kind
    shape: str
    n: int
    k: int
    rows: int
    nbytes: int
    ours: float
    onednn: float | None
    plain: float

    @property
    def flops(self) -> float:
        return 2.0 * self.n * self.k * self.rows


def main() -> None:
    options = _options()
    if at_levels("cpu_linear", options, _NOTES):
        return
    torch.set_num_threads(options.threads)
    rate = _read_rate(options.threads)
    cells = list(_measure(options))
    Console(width=140).print(_table(cells, rate))
    figures = {"read_gbs": rate / 1e9} | _summary(cells, rate)
    report("cpu_linear", figures, _NOTES, as_json=False)
    for cell in cells:
        name = f"{cell.kind.name.lower()}_{cell.shape}_m{cell.rows}"
        figures[f"{name}_us"] = cell.ours * 1e6
        figures |= {f"{name}_over_onednn": ratio for ratio in _over_onednn([cell])}
    end_with_json("cpu_linear", figures, options.json)


_KINDS = {
    "few_over_floor": f"time over the floor, up to {_FEW} rows: geometric mean over shapes and rows",
    "few_over_onednn": "oneDNN's time over ours, the same",
    "many_gflops": f"GFLOP/s from {_MANY} rows",
    "many_over_onednn": "oneDNN's time over ours, the same",
}
_NOTES = {"read_gbs": "GB/s, a sum over memory on huge pages"} | {
    f"{kind.name.lower()}_{name}": note for kind in Kind for name, note in _KINDS.items()
}


def _options() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", choices=sorted(_SHAPES), default="128m")
    flags.add_argument("--kinds", default="f32,bf16,i8_bf16,i4_bf16,w8a8", help="of " + ",".join(k.name for k in Kind))
    flags.add_argument("--rows", default=",".join(map(str, _ROWS)))
    flags.add_argument("--shapes", default="", help="names, all unless given")
    flags.add_argument("--threads", type=int, default=3)
    flags.add_argument("--repeats", type=int, default=5)
    add_level_flag(flags)
    return flags.parse_args()


def _read_rate(threads: int) -> float:
    memory = Memory(_READ_BYTES)
    ctypes.memset(memory.address, 1, _READ_BYTES)
    whole = (ctypes.c_uint8 * _READ_BYTES).from_address(memory.address)
    numbers = torch.frombuffer(whole, dtype=torch.float32)
    torch.set_num_threads(threads)
    return _READ_BYTES / fastest_in_turns(numbers.sum)[0]


def _measure(options: argparse.Namespace) -> Iterator[Cell]:
    names = options.shapes.split(",") if options.shapes else list(_SHAPES[options.model])
    for kind in (Kind[name.upper()] for name in options.kinds.split(",")):
        for name in names:
            n, k = _SHAPES[options.model][name]
            yield from _shape(kind, name, n, k, options)


def _shape(kind: Kind, name: str, n: int, k: int, options: argparse.Namespace) -> Iterator[Cell]:
    dtype = torch.bfloat16 if kind in _HALVES or kind is Kind.W8A8 else torch.float32
    floats = torch.randn(n, k).mul_(k**-0.5).to(dtype)
    rows = Rows(_integers(kind, n, k) if kind.whole else floats)
    pack = partial(PackedLinear, [rows], kind, threads=options.threads)
    first = pack()
    ours = _copies(first, pack, first.nbytes)
    theirs = _prepacked(floats)
    plain = _copies(floats, floats.clone, floats.nbytes)
    for count in map(int, options.rows.split(",")):
        if name == "lm_head" and count > _MANY:
            continue  # logits are computed where a token is sampled: never for so many rows
        x, out = torch.randn(count, k).to(dtype), torch.empty(count, n, dtype=dtype)
        store = Store.BF16 if dtype is torch.bfloat16 else Store.F32
        pointwise = torch.ops.mkldnn._linear_pointwise
        turns = (
            _turn([packed.bound(_spread(x), store, out) for packed in ours], n * k * count),
            _turn([_call(linear, x, weight) for weight in plain], n * k * count),
            *(
                _turn([_call(pointwise, x, w, None, "none", [], "") for w in copies], n * k * count)
                for copies in theirs
            ),
        )
        with torch.inference_mode():
            seconds = fastest_in_turns(*(run for run, _ in turns), repeats=options.repeats)
        each = [second / calls for second, (_, calls) in zip(seconds, turns, strict=True)]
        yield Cell(kind, name, n, k, count, first.nbytes, each[0], each[2] if theirs else None, each[1])


def _prepacked(floats: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return a list of copies in oneDNN's layout, alone in a list; none where it cannot multiply this type."""
    layout = torch.ops.mkldnn._reorder_linear_weight
    try:
        first = layout(floats, 32)
    except RuntimeError:
        return []
    return [_copies(first, lambda: layout(floats.clone(), 32), floats.nbytes)]


def _integers(kind: Kind, n: int, k: int) -> IntegerWeight:
    four = kind in (Kind.I4_F32, Kind.I4_BF16)
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    return IntegerWeight(values, torch.rand(n, k // 128 if four else 1))


def _copies(first: _T, make: Callable[[], _T], nbytes: int) -> list[_T]:
    return [first, *(make() for _ in range(1, max(2, -(-_COPIES_BYTES // nbytes))))]


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Return the rows at a stride of an odd number of cache lines, as the model keeps them."""
    lines = -(-x.shape[1] * x.itemsize // 64) | 1
    wide = torch.zeros(len(x), lines * 64 // x.itemsize, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _turn(calls: list[Callable[[], object]], products: float) -> tuple[Callable[[], None], int]:
    """Return a function that runs the calls in turn, and the number of calls; of long calls it runs only some."""
    kept = calls[: max(2, int(_FLOPS / (2 * products)))]

    def run() -> None:
        for call in kept:
            call()

    return run, len(kept)


def _table(cells: list[Cell], rate: float) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("kind", "shape", "N x K", "rows"):
        table.add_column(column)
    for column in ("us", "GFLOP/s", "GB/s", "over floor", "oneDNN/ours", "F.linear/ours"):
        table.add_column(column, justify="right")
    for cell in cells:
        figures = (cell.flops / cell.ours / 1e9, cell.nbytes / cell.ours / 1e9, cell.ours * rate / cell.nbytes)
        table.add_row(
            *(cell.kind.name, cell.shape, f"{cell.n} x {cell.k}", str(cell.rows), f"{cell.ours * 1e6:.0f}"),
            *(f"{figures[0]:.0f}", f"{figures[1]:.1f}", f"{figures[2]:.2f}"),
            *("-" if cell.onednn is None else f"{cell.onednn / cell.ours:.2f}", f"{cell.plain / cell.ours:.2f}"),
        )
    return table


def _summary(cells: list[Cell], rate: float) -> dict[str, float]:
    """Return geometric means over the shapes for each kind: at few rows and at many."""
    figures = {}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        name, mine = kind.name.lower(), [cell for cell in cells if cell.kind is kind]
        few, many = [cell for cell in mine if cell.rows <= _FEW], [cell for cell in mine if cell.rows >= _MANY]
        if few:
            figures[f"{name}_few_over_floor"] = _mean(cell.ours * rate / cell.nbytes for cell in few)
            figures |= {f"{name}_few_over_onednn": _mean(ratios) for ratios in [_over_onednn(few)] if ratios}
        if many:
            figures[f"{name}_many_gflops"] = _mean(cell.flops / cell.ours / 1e9 for cell in many)
            figures |= {f"{name}_many_over_onednn": _mean(ratios) for ratios in [_over_onednn(many)] if ratios}
    return figures


def _over_onednn(cells: list[Cell]) -> list[float]:
    return [cell.onednn / cell.ours for cell in cells if cell.onednn is not None]


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    main()
