"""How the weights of a model of the Llama family are cut for ranks, tensor parallel. Which rank has what is pure.

    outputs of a product  q, k, v by heads; gate and up; embedding and last linear by vocabulary
    inputs of a product   what follows: output by heads, down
    whole at each rank    norms, routers, what layers of Gemma 4 take of tokens besides

Heads of K and V are at several ranks where there are fewer of them. A short convolution is cut by channels, a gated
delta rule by its key heads with their value heads. A bias behind a cut of inputs is at rank 0 alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from gpuworker.checkpoints.lora import LoraAdapter, LowRank
from gpuworker.models.llama.linears import LinearReader, LinearWeight
from gpuworker.models.llama.spec import ATTENTION, DELTA, LlamaSpec
from gpuworker.models.llama.weights import EMBEDDING, FusedLinear, LayerTensors, Mlp, head_tensors, layer_tensors
from gpuworker.native.linear import IntegerWeight, Rows

Ranges = tuple[tuple[int, int], ...]
"""From one index to before another one, in order."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among the ranks of a worker."""

    rank: int
    size: int

    def of(self, count: int) -> tuple[int, int]:
        """Return the part of so many things that is this rank's; parts differ by one at most."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def kv_heads(self, count: int) -> tuple[int, int]:
        """Return the heads of K and V that this rank has, one at least."""
        if count >= self.size:
            return self.of(count)
        first = self.rank * count // self.size
        return first, first + 1


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a tensor is a rank's: ranges of one dimension, which has `whole` indices."""

    dim: int
    ranges: Ranges
    whole: int

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part, a view where it is one range. Raises ValueError for a tensor of another size."""
        if tensor.shape[self.dim] != self.whole:
            raise ValueError(f"dimension {self.dim} has {tensor.shape[self.dim]}; the configuration says {self.whole}")
        parts = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


def why_not_sharded(spec: LlamaSpec, size: int) -> str | None:
    """Return why so many ranks cannot run a model, with what to do; None when they can."""
    if size > 1 and spec.num_heads % size:
        return f"does not divide the {spec.num_heads} heads of attention; expected one of {_words(spec.num_heads)}"
    for layer in range(spec.num_layers):
        _, kv_heads = spec.heads(layer)
        if kv_heads % size and size % kv_heads:
            what = f"neither divides the {kv_heads} heads of K and V of layer {layer} nor is a multiple of them"
            return f"{what}; expected one of {_words(kv_heads)}"
    for what, count in _counts(spec):
        if count % size:
            return f"does not divide the {count} {what}; expected one of {_words(count)}"
    if spec.vocab_size < size:
        return f"is more than the {spec.vocab_size} tokens of the vocabulary; expected fewer"
    return None


def _counts(spec: LlamaSpec) -> Iterator[tuple[str, int]]:
    gemma, experts = spec.gemma, spec.experts
    inner = {spec.intermediate_size} if gemma is None else {layer.inner for layer in gemma.layers}
    yield from (("inputs of an MLP", size) for size in sorted(inner))
    if experts is not None:
        yield "inputs of an expert", experts.intermediate_size
        yield "inputs of the shared expert", experts.shared_size
    if spec.delta is not None:
        yield "key heads of linear attention", spec.delta.key_heads
    if spec.keeping and spec.delta is None:
        yield "channels of a convolution", spec.conv_channels


def _words(count: int) -> str:
    return ", ".join(str(size) for size in range(1, min(count, 16) + 1) if count % size == 0)


def shard_spec(spec: LlamaSpec, size: int) -> LlamaSpec:
    """Return the sizes that a rank has. Those of the residual stream and of the vocabulary are the model's."""
    experts, delta, gemma = spec.experts, spec.delta, spec.gemma
    if experts is not None:
        sizes = experts.intermediate_size // size, experts.shared_size // size
        experts = replace(experts, intermediate_size=sizes[0], shared_size=sizes[1])
    if delta is not None:
        delta = replace(delta, key_heads=delta.key_heads // size, value_heads=delta.value_heads // size)
    if gemma is not None:
        layers = (
            replace(layer, num_kv_heads=max(1, layer.num_kv_heads // size), inner=layer.inner // size)
            for layer in gemma.layers
        )
        gemma = replace(gemma, layers=tuple(layers))
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
        conv_size=spec.conv_channels // size,
        experts=experts,
        delta=delta,
        gemma=gemma,
    )


class Shard:
    """What of a model is one rank's: its sizes, and how each tensor is cut. `whole` describes the model."""

    def __init__(self, whole: LlamaSpec, place: Place) -> None:
        """Raises ValueError where `why_not_sharded` has a reason."""
        if (why := why_not_sharded(whole, place.size)) is not None:
            raise ValueError(f"{place.size} {why}")
        self.whole, self.place = whole, place
        self.spec = shard_spec(whole, place.size)
        self.cuts: dict[str, Cut] = {}
        """By the name of a tensor; one that has none is whole."""
        self.first_rank_alone: set[str] = set()
        """Biases that are added once."""
        self._linears: dict[tuple[str, ...], FusedLinear] = {}
        self.tokens = place.of(whole.vocab_size)
        for layer in range(whole.num_layers):
            self._cut_layer(layer, layer_tensors(whole, layer))
        head = head_tensors(whole)
        self._rows(head, (self.tokens,))
        self.cuts[EMBEDDING] = Cut(0, (self.tokens,), whole.vocab_size)

    def in_whole(self, linear: FusedLinear) -> FusedLinear:
        """Return what a linear of the rank is in the model."""
        return self._linears.get(linear.parts, linear)

    def adapter(self, whole: LoraAdapter) -> LoraAdapter:
        """Return the rank's part of an adapter: B is cut as the outputs of its linear, A as its inputs.

        A is whole where outputs are cut, and B where inputs are: the parts of all ranks are added up with the product.
        """
        parts = {}
        for name, part in whole.parts.items():
            cut = self.cuts.get(f"{name}.weight")
            if cut is None:
                parts[name] = part
            elif cut.dim == 0:
                parts[name] = LowRank(part.a, cut.of(part.b).contiguous())
            else:
                parts[name] = LowRank(cut.of(part.a).contiguous(), part.b)
        return replace(whole, parts=parts)

    def _cut_layer(self, layer: int, tensors: LayerTensors) -> None:
        kind = self.whole.kind(layer)
        if kind == ATTENTION:
            self._cut_attention(layer, tensors)
        elif kind == DELTA:
            self._cut_delta(tensors)
        else:
            self._cut_conv(tensors)
        for mlp in (*tensors.mlps, *(() if tensors.shared is None else (tensors.shared,))):
            self._cut_mlp(mlp)

    def _cut_attention(self, layer: int, tensors: LayerTensors) -> None:
        spec, (dim, kv_heads) = self.whole, self.whole.heads(layer)
        heads, own = self.place.of(spec.num_heads), self.place.kv_heads(kv_heads)
        queries, kept = _times(heads, dim * (2 if spec.gated else 1)), _times(own, dim)
        self._rows(tensors.qkv, *((queries,), (kept,), (kept,))[: len(tensors.qkv.parts)])
        self._inputs(tensors.output, _times(heads, dim))
        if spec.joint_norm and tensors.query_norm is not None and tensors.key_norm is not None:
            self.cuts[tensors.query_norm] = Cut(0, (_times(heads, dim),), spec.query_norm_size)
            self.cuts[tensors.key_norm] = Cut(0, (kept,), spec.key_norm_size)

    def _cut_mlp(self, mlp: Mlp) -> None:
        own = self.place.of(mlp.down.inputs)
        self._rows(mlp.gate_up, (own,), (own,))
        self._inputs(mlp.down, own)

    def _cut_conv(self, tensors: LayerTensors) -> None:
        size = self.whole.conv_channels
        own = self.place.of(size)
        assert tensors.conv is not None
        self._rows(tensors.qkv, tuple(_moved(own, part * size) for part in range(3)))
        self._inputs(tensors.output, own)
        self.cuts[tensors.conv] = Cut(0, (own,), size)
        if tensors.conv_bias is not None:
            self.cuts[tensors.conv_bias] = Cut(0, (own,), size)

    def _cut_delta(self, tensors: LayerTensors) -> None:
        delta, gates = self.whole.delta, tensors.gates
        assert delta is not None
        assert gates is not None
        assert tensors.conv is not None
        assert tensors.decay_rate is not None
        assert tensors.decay_bias is not None
        each = delta.value_heads // delta.key_heads
        own = self.place.of(delta.key_heads)
        heads = _times(own, each)
        keys, values = _times(own, delta.key_dim), _times(heads, delta.value_dim)
        channels = (keys, _moved(keys, delta.keys), _moved(values, 2 * delta.keys))
        if delta.interleaved:
            self._rows(tensors.qkv, (_times(own, 2 * (delta.key_dim + each * delta.value_dim)),))
            cuts = [_times(own, 2 * each)]
        else:
            self._rows(tensors.qkv, channels, (values,))
            cuts = [heads, heads]
        for name, size, cut in zip(gates.weights, gates.sizes, cuts, strict=True):
            self.cuts[name] = Cut(0, (cut,), size)
        self._inputs(tensors.output, values)
        self.cuts[tensors.conv] = Cut(0, channels, delta.channels)
        for name in (tensors.decay_rate, tensors.decay_bias):
            self.cuts[name] = Cut(0, (heads,), delta.value_heads)

    def _rows(self, linear: FusedLinear, *cuts: Ranges) -> None:
        """Cut the outputs of each part of a linear, and its biases with them."""
        self._linears[linear.parts] = linear
        for part, size, ranges in zip(linear.parts, linear.sizes, cuts, strict=True):
            self.cuts[f"{part}.weight"] = self.cuts[f"{part}.bias"] = Cut(0, ranges, size)

    def _inputs(self, linear: FusedLinear, own: tuple[int, int]) -> None:
        self._linears[linear.parts] = linear
        for part in linear.parts:
            self.cuts[f"{part}.weight"] = Cut(1, (own,), linear.inputs)
            self.first_rank_alone.add(f"{part}.bias")


def _times(own: tuple[int, int], each: int) -> tuple[int, int]:
    return own[0] * each, own[1] * each


def _moved(own: tuple[int, int], by: int) -> tuple[int, int]:
    return own[0] + by, own[1] + by


class ShardReader(LinearReader):
    """Reads what is a rank's of the linears and of all other tensors.

    Floats are cut on the pages of their files. Integers are made, or read, of the whole weight and cut then: the ranks
    multiply by the same numbers as one process that has them all.
    """

    def __init__(self, reader: LinearReader, shard: Shard) -> None:
        self._reader, self._shard = reader, shard
        self.dtype = reader.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the rank's part of a tensor; `shape` is that of the part."""
        cut = self._shard.cuts.get(name)
        if cut is None:
            found = self._reader.tensor(name, shape)
        else:
            whole = (*shape[: cut.dim], cut.whole, *shape[cut.dim + 1 :])
            found = cut.of(self._reader.tensor(name, whole))
        return found.contiguous()

    def choose(self, linears: Iterable[FusedLinear], library: ctypes.CDLL) -> None:
        """Choose nothing: `--quantization auto` is refused, for each rank would choose by its own times."""

    def read(self, linear: FusedLinear) -> LinearWeight:
        whole = self._shard.in_whole(linear)
        return self._cut(whole, self._reader.read(whole))

    def stored(self, linear: FusedLinear) -> LinearWeight | None:
        whole = self._shard.in_whole(linear)
        found = self._reader.stored(whole)
        return None if found is None else self._cut(whole, found)

    def holds_integers(self, linear: FusedLinear) -> bool:
        return self._reader.holds_integers(self._shard.in_whole(linear))

    def _cut(self, linear: FusedLinear, weight: LinearWeight) -> LinearWeight:
        """Return the rank's part of a linear. Raises ValueError where it would cut a group of integers."""
        cuts, parts = self._shard.cuts, []
        for name, bias_name, rows in zip(linear.weights, _bias_names(linear), weight.parts, strict=True):
            cut = cuts.get(name)
            bias = rows.bias
            if bias is not None and bias_name in self._shard.first_rank_alone and self._shard.place.rank:
                bias = None if len(weight.parts) == 1 else torch.zeros_like(bias)
            elif bias is not None and cut is not None and cut.dim == 0:
                bias = cut.of(bias)
            parts.append(rows if cut is None else Rows(_cut_weight(rows.weight, cut, name), bias))
        return LinearWeight(weight.kind, tuple(parts))


def _bias_names(linear: FusedLinear) -> tuple[str, ...]:
    return tuple(f"{part}.bias" for part in linear.parts)


def _cut_weight(weight: torch.Tensor | IntegerWeight, cut: Cut, name: str) -> torch.Tensor | IntegerWeight:
    if isinstance(weight, torch.Tensor):
        return cut.of(weight)
    groups = _cut_of_groups(weight, cut, name)
    scales, zeros, minimums = (
        None if each is None else (groups.of(each) if groups is not None else each)
        for each in (weight.scales, weight.zeros, weight.minimums)
    )
    assert scales is not None
    return IntegerWeight(cut.of(weight.values).contiguous(), scales.contiguous(), zeros, minimums)


def _cut_of_groups(weight: IntegerWeight, cut: Cut, name: str) -> Cut | None:
    """Return how scales are cut; None where the inputs are cut and an output has one scale."""
    count = weight.scales.shape[1]
    if cut.dim == 0:
        return cut
    if count == 1:
        return None
    group = cut.whole // count
    if any(edge % group for bounds in cut.ranges for edge in bounds):
        raise ValueError(
            f"{name} has {cut.whole} inputs in groups of {group}, and a rank would have"
            f" {cut.count} of them, which cuts a group; use fewer ranks"
        )
    return Cut(1, tuple((begin // group, end // group) for begin, end in cut.ranges), count)
