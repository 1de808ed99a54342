"""How each linear of a native model holds its weights: as the checkpoint stores them, or quantised at start.

Integers of a checkpoint stay integers where the native library can multiply them. Linears that run as one may differ:
all of them then have the bits of the widest and the groups of the finest. All other linears follow the `quantization`
option (`gpuworker.models.hf.precision`). Weights in float16 keep their 16 bits where products are in float32. No option
makes four bits of the last linear: it decides between tokens, and is a small part of a model.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpuworker.checkpoints.quantised import QuantisedLinear
from gpuworker.models.llama.weights import FusedLinear, TensorOf
from gpuworker.native import library as native
from gpuworker.native.linear import IntegerWeight, Kind, LinearStruct, Memory, Rows, Store, declared

MOST_LOST: Final = 1.01
_WHERE: Final = "SmolLM2-135M"


# Which quantisations `--quantization auto` may take: those that lose at most 1 % of perplexity. Pure functions.
# The losses are measured on a real model (`bench.quality`). The loss of another model is predicted from how its
# weights round: the power of the noise in a product grows with the square of the error, and the loss is taken to
# grow so too. What rounding activations loses depends on their outliers, which weights do not show.
@dataclass(frozen=True, slots=True)
class Loss:
    """What a quantisation lost: `ratio` is its perplexity over that of bf16.

    `error` is that of the measured model's weights (`quantise.rounding_error`), of the linear in the middle of all.
    """

    ratio: float
    error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a quantisation may be taken, and why, for the log."""

    accepted: bool
    why: str


# bench.quality on SmolLM2-135M-Instruct, 12,264 tokens, AVX-512 bf16 (bench/RESULTS.md).
MEASURED: Final[Mapping[str, Loss]] = {
    "int8": Loss(1.0011, 0.011),
    "w8a8": Loss(1.0342, 0.011),
    "int4": Loss(1.4052, 0.134),
}


def by_type(name: str, measured: Mapping[str, Loss] = MEASURED) -> Verdict:
    """Return whether "auto" considers a quantisation at all; one that was not measured loses too much."""
    loss = measured.get(name)
    if loss is None:
        return Verdict(False, f"{name}: its loss is not measured")
    lost = f"{name}: {loss.ratio:.4f} of bf16's perplexity on {_WHERE}"
    if loss.ratio <= MOST_LOST:
        return Verdict(True, lost)
    return Verdict(False, f"{lost}, more than {MOST_LOST:g}")


def by_error(name: str, error: float, measured: Mapping[str, Loss] = MEASURED) -> Verdict:
    """Return whether a linear whose weights round with this relative error may be held so."""
    considered = by_type(name, measured)
    if not considered.accepted:
        return considered
    loss = measured[name]
    expected = 1 + max(0.0, loss.ratio - 1) * (error / loss.error) ** 2
    words = f"{name}: weights round with an error of {error:.2%}, those of {_WHERE} with {loss.error:.2%}"
    return Verdict(expected <= MOST_LOST, f"{words}; {expected:.4f} of bf16's perplexity expected")


# Calls read weights in turn from so much memory that no cache keeps a weight until its next use.
_BYTES: Final = 128 << 20
# The fastest call of each kind counts, among at least so many calls in at least so many seconds.
_TURNS: Final = 6
_SECONDS: Final = 0.006
_FILL: Final = 0x3C  # makes small numbers of bytes, halves and floats alike


# The fastest kind of packed weight for a shape on this machine, measured briefly at start.
# Reading decides at few rows and arithmetic at many, and both differ from machine to machine. So the kinds are
# timed, on memory of the packed size whose content does not matter, large enough that no cache holds it.
@dataclass(frozen=True, slots=True)
class LinearShape:
    """A weight [n, k]; `group` inputs share a scale in the int4 kinds."""

    n: int
    k: int
    group: int = 128


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """The kind that takes the least time, and the seconds of each kind for each number of rows."""

    shape: LinearShape
    kind: Kind
    rows: tuple[int, ...]
    seconds: Mapping[Kind, tuple[float, ...]]

    def __str__(self) -> str:
        timed = (
            f"{kind.name} {'/'.join(f'{second * 1e6:.0f}' for second in seconds)}"
            for kind, seconds in self.seconds.items()
        )
        rows = "/".join(map(str, self.rows))
        return f"linear {self.shape.n} x {self.shape.k}: {self.kind.name} (us for {rows} rows: {', '.join(timed)})"


def choose(
    shapes: Sequence[LinearShape],
    kinds: Sequence[Kind],
    threads: int,
    rows: tuple[int, ...] = (1, 8, 64),
    library: ctypes.CDLL | None = None,
) -> list[LinearChoice]:
    """Return the choice for each shape: the kind with the least geometric mean of the times over `rows`.

    Raises NativeUnavailable without a library, ValueError for a shape that a kind cannot serve.
    """
    found = declared(library or native.best())
    memory = Memory(_BYTES)
    ctypes.memset(memory.address, _FILL, memory.nbytes)
    choices = []
    for shape in shapes:
        timed = [_seconds(found, memory, [_struct(shape, kind) for kind in kinds], count, threads) for count in rows]
        seconds = dict(zip(kinds, zip(*timed, strict=True), strict=True))
        best = min((math.prod(each), kind) for kind, each in seconds.items())[1]
        choices.append(LinearChoice(shape, best, rows, seconds))
    return choices


def _struct(shape: LinearShape, kind: Kind) -> LinearStruct:
    group = shape.group if kind in (Kind.I4_F32, Kind.I4_BF16) else 0
    return LinearStruct(kind, group, False, False, False, 0, shape.n, shape.k, None)


def _seconds(
    library: ctypes.CDLL, memory: Memory, linears: Sequence[LinearStruct], rows: int, threads: int
) -> list[float]:
    """Return the seconds of a call for each; calls take turns, so that a disturbance affects all alike."""
    calls = [_Call(library, memory, linear, rows, threads) for linear in linears]
    best, until, turn = [math.inf] * len(calls), time.perf_counter() + _SECONDS * len(calls), 0
    while turn <= _TURNS or time.perf_counter() < until:
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call(turn)
            if turn:  # the first call warms up
                best[place] = min(best[place], time.perf_counter() - began)
        turn += 1
    return [second * call.parts for second, call in zip(best, calls, strict=True)]


class _Call:
    """A product whose weights come from another place of the memory at each call."""

    def __init__(self, library: ctypes.CDLL, memory: Memory, linear: LinearStruct, rows: int, threads: int) -> None:
        nbytes = int(library.quire_linear_bytes(ctypes.byref(linear)))
        if not nbytes:
            raise ValueError(f"no native linear of kind {Kind(linear.kind).name}, {linear.n} x {linear.k}")
        self.parts = 1
        while nbytes > memory.nbytes // 2:  # a part of so many outputs shows the same
            self.parts *= 2
            linear.n = max(1, linear.n // 2)
            nbytes = int(library.quire_linear_bytes(ctypes.byref(linear)))
        halves = linear.kind in (Kind.BF16, Kind.I8_BF16, Kind.I4_BF16)
        self._x = torch.ones(rows, linear.k, dtype=torch.bfloat16 if halves else torch.float32)
        self._out = torch.empty(rows, linear.n)
        self._scratch = Memory(int(library.quire_linear_scratch(ctypes.byref(linear), rows)))
        self._linear, self._run = linear, library.quire_linear_run
        self._places = range(memory.address, memory.address + memory.nbytes - nbytes + 1, -(-nbytes // 64) * 64)
        target = (self._out.data_ptr(), linear.n, int(Store.F32), self._scratch.address, threads)
        self._arguments = (self._x.data_ptr(), int(halves), linear.k, rows, *target)

    def __call__(self, turn: int) -> None:
        self._linear.memory = self._places[turn % len(self._places)]
        self._run(ctypes.byref(self._linear), *self._arguments)


# Rows are quantised this many numbers at a time: what is in between stays small beside the weight.
_AT_ONCE: Final = 4 << 20
_CLIPS: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


# Integers for a float weight: 8 bits for each output, or 4 bits for each group of inputs, to nearest.
# For 4 bits the largest number need not be kept: a range clipped to what gives the least squared error is better.
def int8_by_output(weight: torch.Tensor) -> IntegerWeight:
    """Return a weight [N, K] as int8 in [-127, 127], one scale for each output: the largest number there is 127."""
    parts = [_symmetric(rows[:, None], 127)[:2] for rows in _slices(weight)]
    return _joined([(values, scales, None) for values, scales in parts], weight)


def int8_by_group(weight: torch.Tensor, group: int) -> IntegerWeight:
    """Return a weight [N, K] as int8 in [-127, 127], one scale for each `group` inputs of an output."""
    parts = [_symmetric(_grouped(rows, group), 127)[:2] for rows in _slices(weight)]
    return _joined([(values, scales, None) for values, scales in parts], weight)


def int4_by_group(weight: torch.Tensor, group: int, *, zeros: bool = False) -> IntegerWeight:
    """Return a weight [N, K] as integers in [-8, 7], one scale (and zero) for each `group` inputs of an output.

    Of several ranges, from that of the group's numbers to 0.7 of it, each group takes the one of least squared error.
    """
    return _joined([_least_squares(_grouped(rows, group), zeros) for rows in _slices(weight)], weight)


def rounding_error(weight: torch.Tensor, rounded: IntegerWeight) -> float:
    """Return the root mean square of what rounding changed, over the mean magnitude of a weight [N, K].

    The mean is less than the root mean square where a few large numbers make the steps of all others coarse. Integers
    with zeros are not expected; a weight of zeros has no error.
    """
    lost, whole, begin = 0.0, 0.0, 0
    for rows in _slices(weight):
        values, scales = (part[begin : begin + len(rows)] for part in (rounded.values, rounded.scales))
        found = _grouped(values.float(), weight.shape[1] // scales.shape[1]) * scales[..., None]
        lost += float((found.view(rows.shape) - rows).square().sum())
        whole, begin = whole + float(rows.abs().sum()), begin + len(rows)
    count = weight.numel()
    return (lost / count) ** 0.5 / (whole / count) if whole else 0.0


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # values [R, G, group], scales and zeros [R, G]


def _least_squares(groups: torch.Tensor, zeros: bool) -> _Part:
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least = torch.full(groups.shape[:2], torch.inf)
    for clip in _CLIPS:
        values, scales, zero = _asymmetric(groups, clip) if zeros else _symmetric(groups, 7, clip)
        error = ((values - zero[..., None]) * scales[..., None] - groups).square().sum(-1)
        if best is None:
            best, least = (values, scales, zero), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best[0][better], best[1][better], best[2][better] = values[better], scales[better], zero[better]
    assert best is not None
    return best[0], best[1], best[2] if zeros else None


def _symmetric(groups: torch.Tensor, most: int, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [R, G, group] in [-most, most] and scales [R, G]; zeros are 0."""
    largest = groups.abs().amax(-1) * clip
    scales = torch.where(largest > 0, largest / most, 1.0)
    values = (groups / scales[..., None]).round().clamp(-most, most)
    return values, scales, torch.zeros_like(scales)


def _asymmetric(groups: torch.Tensor, clip: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values in [-8, 7], scales, and whole zeros in [-8, 7], so that 0 is exact."""
    low, high = groups.amin(-1).clamp(max=0) * clip, groups.amax(-1).clamp(min=0) * clip
    scales = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-8 - low / scales).round().clamp(-8, 7)
    values = (groups / scales[..., None] + zero[..., None]).round().clamp(-8, 7)
    return values, scales, zero


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    if rows.shape[1] % group:
        raise ValueError(f"{rows.shape[1]} inputs cannot be cut into groups of {group}")
    return rows.view(len(rows), -1, group)


def _slices(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    at_once = max(1, _AT_ONCE // max(1, weight.shape[1]))
    return (weight[begin : begin + at_once].float() for begin in range(0, len(weight), at_once))


def _joined(parts: list[_Part], weight: torch.Tensor) -> IntegerWeight:
    values = torch.cat([part[0].to(torch.int8) for part in parts]).view(weight.shape)
    zeros = [part[2] for part in parts if part[2] is not None]
    return IntegerWeight(values, torch.cat([part[1] for part in parts]), torch.cat(zeros) if zeros else None)


KINDS: Final = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
_INT8: Final = {torch.float32: Kind.I8_F32, torch.bfloat16: Kind.I8_BF16}
_INT4: Final = {torch.float32: Kind.I4_F32, torch.bfloat16: Kind.I4_BF16}
# What "auto" chooses among, beside the model's own type, by the name of the option that asks for it.
_QUANTISED: Final = {"int8": _INT8, "w8a8": dict.fromkeys(KINDS, Kind.W8A8)}
_NAMES: Final = {kind: name for name, kinds in _QUANTISED.items() for kind in kinds.values()}
# The option under which stored integers of a kind stay what they are, beside "none" and "auto".
_OPTION_OF: Final = {kind: name for name, kinds in (("int8", _INT8), ("int4", _INT4)) for kind in kinds.values()}
_READABLE: Final = (torch.float32, torch.bfloat16, torch.float16)
_GROUPS: Final = (128, 64, 32)  # inputs that share a scale in four bits: the first that divides them all
_GRAIN: Final = 16  # a group of inputs is a multiple of this many
CHOICES: Final = __name__
"""The log that says what "auto" chose, and why."""
_log = logging.getLogger(CHOICES)

IntegersOf = Callable[[str], QuantisedLinear | None]
"""Gives a weight of a checkpoint by its name as the integers that are stored; None where it is not stored so."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What is packed: a kind, and the parts of a linear in a form that suits it."""

    kind: Kind
    parts: tuple[Rows, ...]


class LinearReader:
    """Reads the linears of a checkpoint, and quantises them where the options ask for it."""

    def __init__(self, tensor_of: TensorOf, integers_of: IntegersOf, dtype: torch.dtype, quantization: str) -> None:
        """Products are in `dtype`, float32 or bfloat16; `quantization` is that of `Precision`."""
        self._tensor_of, self._integers_of = tensor_of, integers_of
        self.dtype, self._quantization = dtype, quantization
        self._chosen: dict[tuple[int, int], Kind] = {}
        self._held: set[FusedLinear] = set()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in a type that the library reads. Raises KeyError, ValueError for another shape."""
        tensor = self._tensor_of(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; the configuration says {shape}")
        return (tensor if tensor.dtype in _READABLE else tensor.float()).contiguous()

    def choose(self, linears: Iterable[FusedLinear], library: ctypes.CDLL) -> None:
        """With "auto", time the kinds that lose little for each shape, and log the choice."""
        if self._quantization != "auto":
            return
        verdicts = {name: by_type(name) for name in _QUANTISED}
        _log.info("auto takes what loses at most 1 %%: %s", "; ".join(each.why for each in verdicts.values()))
        accepted = [_QUANTISED[name][self.dtype] for name, each in verdicts.items() if each.accepted]
        first = {(linear.outputs, linear.inputs): linear for linear in linears}
        floats = {shape: self._float_kind(map(self._tensor_of, first[shape].weights)) for shape in sorted(first)}
        for kind in sorted(set(floats.values())):
            shapes = [shape for shape in floats if floats[shape] == kind]
            described = [LinearShape(*shape) for shape in shapes]
            timed = choose(described, (kind, *accepted), torch.get_num_threads(), library=library)
            for shape, choice in zip(shapes, timed, strict=True):
                _log.info("%s", choice)
                self._chosen[shape] = choice.kind

    def read(self, linear: FusedLinear) -> LinearWeight:
        """Return the weights of a linear as they are to be packed."""
        stored = self.stored(linear)
        if stored is not None and self._quantization in ("none", "auto", _OPTION_OF[stored.kind]):
            self._held.add(linear)
            return stored
        kind = self._kind(linear)
        found = self._packed_as(kind, linear)
        if self._quantization == "auto" and kind.whole and self._loses_too_much(linear, found):
            return self._packed_as(KINDS[self.dtype], linear)
        return found

    def stored(self, linear: FusedLinear) -> LinearWeight | None:
        """Return the integers that the checkpoint stores, if all parts have some that fit together."""
        found = [self._integers_of(name) for name in linear.weights]
        whole = [each for each in found if each is not None and _fits(each)]
        if len(whole) < len(found) or not _agree(whole):
            return None
        kinds = _INT8 if any(each.bits == 8 for each in whole) else _INT4
        weights = _integer_weights(whole)
        parts = (Rows(weight, self._bias(linear, index)) for index, weight in enumerate(weights))
        return LinearWeight(kinds[self.dtype], tuple(parts))

    def holds_integers(self, linear: FusedLinear) -> bool:
        """Return whether a linear that was read is held as the integers that the checkpoint stores."""
        return linear in self._held

    def dequantised(self, linear: FusedLinear) -> list[torch.Tensor]:
        """Return the weights of a linear's parts in the model's type, as its products see them."""
        weights = (rows.weight for rows in self.read(linear).parts)
        return [self._floats(weight) if isinstance(weight, IntegerWeight) else weight for weight in weights]

    def _kind(self, linear: FusedLinear) -> Kind:
        """Return how a linear is held that the checkpoint does not store in integers."""
        if self._quantization == "none":
            return KINDS[self.dtype]
        if self._quantization == "auto":
            chosen = self._chosen.get((linear.outputs, linear.inputs))
            return chosen if chosen is not None and chosen.whole else KINDS[self.dtype]
        if self._quantization == "w8a8":
            return Kind.W8A8
        four_bits = self._quantization == "int4" and not linear.last and linear.inputs % _GROUPS[-1] == 0
        return (_INT4 if four_bits else _INT8)[self.dtype]

    def _float_kind(self, weights: Iterable[torch.Tensor]) -> Kind:
        """Return how the parts of a linear are held unless in integers. float16 widens to float32 exactly."""
        halves = self.dtype == torch.float32 and all(weight.dtype == torch.float16 for weight in weights)
        return Kind.F16 if halves else KINDS[self.dtype]

    def _packed_as(self, kind: Kind, linear: FusedLinear) -> LinearWeight:
        parts = tuple(self._rows(linear, index, kind) for index in range(len(linear.parts)))
        if not kind.whole:
            kind = self._float_kind(rows.weight for rows in parts if isinstance(rows.weight, torch.Tensor))
        return LinearWeight(kind, parts)

    def _loses_too_much(self, linear: FusedLinear, found: LinearWeight) -> bool:
        """Return whether weights round worse than "auto" accepts, and log why."""
        shapes = ((size, linear.inputs) for size in linear.sizes)
        weights = [self.tensor(name, shape) for name, shape in zip(linear.weights, shapes, strict=True)]
        pairs = zip(weights, (rows.weight for rows in found.parts), strict=True)
        error = max(rounding_error(weight, whole) for weight, whole in pairs if isinstance(whole, IntegerWeight))
        verdict = by_error(_NAMES[found.kind], error)
        if not verdict.accepted:
            _log.info("%s stays in %s: %s", linear.parts[0], self._float_kind(weights).name, verdict.why)
        return not verdict.accepted

    def _rows(self, linear: FusedLinear, index: int, kind: Kind) -> Rows:
        weight = self.tensor(linear.weights[index], (linear.sizes[index], linear.inputs))
        bias = self._bias(linear, index)
        if not kind.whole:
            return Rows(weight, bias)
        if kind in _INT4.values():
            group = next(group for group in _GROUPS if linear.inputs % group == 0)
            return Rows(int4_by_group(weight, group), bias)
        return Rows(int8_by_output(weight), bias)

    def _bias(self, linear: FusedLinear, index: int) -> torch.Tensor | None:
        return self.tensor(linear.biases[index], (linear.sizes[index],)) if linear.bias else None

    def _floats(self, weight: IntegerWeight) -> torch.Tensor:
        group = weight.values.shape[1] // weight.scales.shape[1]
        zeros = None if weight.zeros is None else weight.zeros.to(torch.int16)
        whole = QuantisedLinear("", 8, group, weight.values, weight.scales, zeros, minimums=weight.minimums)
        return whole.dequantise(self.dtype)


def _fits(stored: QuantisedLinear) -> bool:
    """Return whether the library can multiply by these integers: inputs in order, groups of a supported size."""
    whole = stored.scales.shape[1] == 1 and not _shifted(stored)
    return stored.group_of is None and (whole or stored.group_size % _GRAIN == 0)


def _agree(stored: Sequence[QuantisedLinear]) -> bool:
    """Return whether the groups of each part can be cut into those of the finest."""
    finest = min(each.group_size for each in stored)
    return all(each.group_size % finest == 0 for each in stored)


def _integer_weights(stored: Sequence[QuantisedLinear]) -> list[IntegerWeight]:
    """Return the parts of a linear in groups of one size; where one has zeros or minimums, all have some."""
    shifted, finest = any(map(_shifted, stored)), min(each.group_size for each in stored)
    weights = []
    for each in stored:
        times = each.group_size // finest
        scales, zeros, minimums = (_finer(groups, times) for groups in (each.scales, each.zeros, each.minimums))
        assert scales is not None
        if shifted and not _shifted(each):
            zeros = torch.zeros_like(scales)
        weights.append(IntegerWeight(each.values, scales, zeros, minimums))
    return weights


def _finer(groups: torch.Tensor | None, times: int) -> torch.Tensor | None:
    return groups if groups is None or times == 1 else groups.repeat_interleave(times, dim=1)


def _shifted(stored: QuantisedLinear) -> bool:
    return stored.zeros is not None or stored.minimums is not None


def in_words(kinds: Iterable[tuple[str, Kind]]) -> str:
    """Return the text for the log that says how linears are held, given the role and kind of each."""
    by_role: dict[str, set[str]] = {}
    for role, kind in kinds:
        by_role.setdefault(role, set()).add(kind.name)
    every = set[str]().union(*by_role.values())
    if len(every) == 1:
        return f"linears in {every.pop()}"
    return "linears in " + ", ".join(f"{role} {' and '.join(sorted(found))}" for role, found in by_role.items())
