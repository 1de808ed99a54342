"""How each linear of a native model holds its weights: as the checkpoint stores them, or quantised at start.

Integers of a checkpoint stay integers where the native library can multiply them. Linears that run as one may differ:
all of them then have the bits of the widest and the groups of the finest. All other linears follow the `quantization`
option (`gpuworker.models.hf.precision`). Weights in float16 keep their 16 bits where products are in float32. No option
makes four bits of the last linear: it decides between tokens, and is a small part of a model.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpuworker.checkpoints.quantised import QuantisedLinear
from gpuworker.models.llama.accepted_losses import by_error, by_type
from gpuworker.models.llama.linear_choice import LinearShape, choose
from gpuworker.models.llama.quantise import int4_by_group, int8_by_output, rounding_error
from gpuworker.models.llama.weights import FusedLinear, TensorOf
from gpuworker.native.linear import IntegerWeight, Kind, Rows

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
