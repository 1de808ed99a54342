"""Packs the weights of a model of the Llama family for the native forward, straight from the pages of its files.

A tensor of the checkpoint is read once and released when it is packed. An embedding that is not also the last linear
stays on the pages of its file, if that has floats: a step reads a few rows of it.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from gpuworker.checkpoints.progress import counted
from gpuworker.models.llama.linears import LinearReader, LinearWeight, in_words
from gpuworker.models.llama.spec import ATTENTION, DELTA, DeltaSpec, ExpertsSpec, GemmaSpec, LlamaSpec
from gpuworker.models.llama.weights import (
    EMBEDDING,
    TOKEN_NORM,
    FusedLinear,
    LayerTensors,
    final_norm,
    head_tensors,
    layer_tensors,
    token_projection,
    token_table,
)
from gpuworker.native.linear import Arena, Kind, LinearStruct, PackedLinear, Rows
from gpuworker.native.llama import (
    AddedNormsStruct,
    ConvStruct,
    DeltaStruct,
    ExpertsStruct,
    ExpertStruct,
    LlamaLayerStruct,
    LlamaStruct,
    SpreadStruct,
    TokenGateStruct,
    TokenInputsStruct,
    bind,
)

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # quire_type
Holder = LlamaLayerStruct | ExpertStruct | LlamaStruct | TokenGateStruct | TokenInputsStruct
"""A structure with linears as its fields, by their roles."""


class PackedModel:
    """Packed weights, and the structures that describe them to the native forward; `struct` is the model's."""

    def __init__(self, library: ctypes.CDLL, spec: LlamaSpec, dtype: torch.dtype) -> None:
        """Describe everything but the weights, which `pack_model` fills in."""
        self.library, self.spec, self.dtype = bind(library), spec, dtype
        self.layers: ctypes.Array[LlamaLayerStruct] = (LlamaLayerStruct * spec.num_layers)()
        self.struct = LlamaStruct(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            vocab=spec.vocab_size,
            norm_eps=spec.norm_eps,
            scale=spec.scale,
            clip=spec.clip or 0.0,
            joint_norm=spec.joint_norm,
            embedding_scale=1.0,
            gated=spec.gated,
            layers=self.layers,
        )
        self._experts: list[ExpertsStruct] = []
        self._mixers: list[ConvStruct | DeltaStruct] = []
        self._added: list[AddedNormsStruct | TokenGateStruct] = []
        for index, layer in enumerate(self.layers):
            layer.head_dim, layer.num_kv_heads = spec.heads(index)
        if spec.experts is not None:
            self._describe(spec.experts)
        for layer in spec.keeping:
            self._describe_state(self.layers[layer], spec.kind(layer))
        if spec.gemma is not None:
            self._describe_gemma(spec.gemma)
        self.state_bytes = self._place_states()
        """Bytes of the states of one sequence, in all layers."""
        self.arena = Arena()
        self._kept: list[torch.Tensor] = []

    def _describe(self, experts: ExpertsSpec) -> None:
        for layer in itertools.compress(self.layers, experts.layers):
            each = (ExpertStruct * experts.count)()
            options = {"top_k": experts.top_k, "normalised": experts.normalised, "sigmoid": experts.sigmoid}
            self._experts.append(ExpertsStruct(each=each, count=experts.count, factor=experts.factor, **options))
            layer.experts = ctypes.pointer(self._experts[-1])

    def _describe_gemma(self, gemma: GemmaSpec) -> None:
        self.struct.gelu, self.struct.logit_cap = True, gemma.cap or 0.0
        # transformers keeps the factor in the type of the embedding.
        self.struct.embedding_scale = float(torch.tensor(gemma.embedding_scale, dtype=self.dtype))
        for index, (layer, its) in enumerate(zip(self.layers, gemma.layers, strict=True)):
            layer.rope, layer.borrows, layer.same_values = not its.slides, its.borrows, its.same_values
            layer.normed_values, layer.input = True, index
            added, gate = AddedNormsStruct(scalar=1.0), TokenGateStruct()
            self._added += (added, gate)
            layer.added = ctypes.pointer(added)
            if gemma.input_size:
                layer.token_gate = ctypes.pointer(gate)
        if gemma.input_size:
            self.inputs = TokenInputsStruct(
                projection_scale=self.spec.hidden_size**-0.5,
                row_scale=float(torch.tensor(gemma.input_size**0.5, dtype=self.dtype)),
                size=gemma.input_size,
                count=gemma.input_layers,
            )
            self.struct.inputs = ctypes.pointer(self.inputs)

    def _describe_state(self, layer: LlamaLayerStruct, kind: str) -> None:
        spec, delta = self.spec, self.spec.delta if kind == DELTA else None
        conv = ConvStruct(width=spec.taps, channels=spec.conv_channels if delta is None else delta.channels)
        self._mixers.append(conv)
        layer.conv = ctypes.pointer(conv)
        if delta is not None:
            found = _delta_struct(delta)
            self._mixers.append(found)
            layer.delta = ctypes.pointer(found)

    def _place_states(self) -> int:
        """Give the state of each layer its place in those of a sequence; return the bytes of all."""
        used = 0
        for layer in self.layers:
            layer.state = used
            used += int(self.library.quire_llama_state_bytes(layer))
        return used

    def linears(self) -> Iterator[tuple[FusedLinear, Holder]]:
        """Yield all linears in the order in which a step runs them, and the structure that each is a field of."""
        for index, layer in enumerate(self.layers):
            tensors = layer_tensors(self.spec, index)
            yield from ((linear, layer) for linear in (tensors.qkv, tensors.output))
            mlps: Sequence[Holder] = layer.experts[0].each[: len(tensors.mlps)] if tensors.router else (layer,)
            for mlp, holder in zip(tensors.mlps, mlps, strict=True):
                yield from ((linear, holder) for linear in (mlp.gate_up, mlp.down))
            if tensors.shared is not None:
                shared = layer.experts[0].shared
                yield from ((linear, shared) for linear in (tensors.shared.gate_up, tensors.shared.down))
            if tensors.token_gate is not None:
                gate = layer.token_gate[0]
                yield from ((linear, gate) for linear in (tensors.token_gate.gate, tensors.token_gate.output))
        if token_table(self.spec) is not None:
            yield token_projection(self.spec), self.inputs
        yield head_tensors(self.spec), self.struct

    @property
    def kinds_in_words(self) -> str:
        return in_words((linear.role, Kind(getattr(holder, linear.role).kind)) for linear, holder in self.linears())

    @property
    def rounds_activations(self) -> bool:
        """Whether some linear multiplies activations of eight bits."""
        return any(getattr(holder, linear.role).kind == Kind.W8A8 for linear, holder in self.linears())

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, the pages of a file among them."""
        return self.arena.nbytes + sum(tensor.nbytes for tensor in self._kept)

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a tensor as long as the model; return its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def only(self, layers: Sequence[int]) -> PackedModel:
        """Return a model of some of the layers, in this order, on the same memory."""
        part = copy.copy(self)
        part.struct = LlamaStruct.from_buffer_copy(self.struct)
        part.layers = (LlamaLayerStruct * len(layers))(*(self.layers[layer] for layer in layers))
        part.struct.layers, part.struct.num_layers = part.layers, len(layers)
        part.spec = self.spec.only(layers)
        part.state_bytes = part._place_states()
        return part


def pack_model(library: ctypes.CDLL, spec: LlamaSpec, reader: LinearReader) -> PackedModel:
    """Return the packed weights of a model, whose linears are held as the reader says.

    Raises KeyError where a tensor is missing, ValueError where one has another shape than the configuration says.
    """
    packed = PackedModel(library, spec, reader.dtype)
    linears = list(packed.linears())
    reader.choose((linear for linear, _ in linears), library)
    for linear, holder in counted(linears):
        setattr(holder, linear.role, _pack(packed, linear, reader))
    for index, layer in enumerate(packed.layers):
        _fill_norms(packed, layer_tensors(spec, index), layer, reader)
        layer.window = spec.windows[index] or 0
        _fill_router(packed, layer_tensors(spec, index), layer, reader)
        if spec.kind(index) != ATTENTION:
            _fill_mixer(packed, layer_tensors(spec, index), layer, reader)
        if spec.gemma is not None:
            _fill_added(packed, layer_tensors(spec, index), layer, reader)
    if (table := token_table(spec)) is not None:
        _fill_inputs(packed, table, reader)
    packed.struct.final_norm = _norm(packed, final_norm(spec), spec.hidden_size, reader)
    if not _rows_are_in_head(packed, reader):
        _fill_rows(packed, reader)
    return packed


def _rows_are_in_head(packed: PackedModel, reader: LinearReader) -> bool:
    """Return whether the last linear holds the rows of the embedding, exactly."""
    if not packed.spec.tied:
        return False
    return not Kind(packed.struct.head.kind).whole or reader.holds_integers(head_tensors(packed.spec))


def _fill_rows(packed: PackedModel, reader: LinearReader) -> None:
    """Keep an embedding that is not the last linear: in its integers if it is stored in some, else as it is stored."""
    shape, role = (packed.spec.vocab_size, packed.spec.hidden_size), "embedding"
    linear = FusedLinear(role, (EMBEDDING.removesuffix(".weight"),), shape[:1], shape[1])
    stored = reader.stored(linear)
    if stored is not None:
        packed.struct.rows = _packed(packed, linear, stored)
        return
    embedding = reader.tensor(EMBEDDING, shape)
    packed.struct.embedding, packed.struct.embedding_type = packed.keep(embedding), _TYPES[embedding.dtype]


def _pack(packed: PackedModel, linear: FusedLinear, reader: LinearReader) -> LinearStruct:
    return _packed(packed, linear, reader.read(linear))


def _packed(packed: PackedModel, linear: FusedLinear, weight: LinearWeight) -> LinearStruct:
    threads = torch.get_num_threads()
    return PackedLinear(
        weight.parts, weight.kind, paired=linear.paired, threads=threads, library=packed.library, arena=packed.arena
    ).struct


def _fill_norms(packed: PackedModel, tensors: LayerTensors, layer: LlamaLayerStruct, reader: LinearReader) -> None:
    spec, hidden = packed.spec, packed.spec.hidden_size
    joint = spec.joint_norm
    layer.attention_norm = _norm(packed, tensors.attention_norm, hidden, reader)
    layer.mlp_norm = _norm(packed, tensors.mlp_norm, hidden, reader)
    layer.query_norm = _norm(packed, tensors.query_norm, spec.query_norm_size if joint else layer.head_dim, reader)
    layer.key_norm = _norm(packed, tensors.key_norm, spec.key_norm_size if joint else layer.head_dim, reader)


def _fill_added(packed: PackedModel, tensors: LayerTensors, layer: LlamaLayerStruct, reader: LinearReader) -> None:
    """Fill in the norms of what a layer of Gemma 4 gives."""
    names, hidden, found = tensors.added, packed.spec.hidden_size, layer.added[0]
    assert names is not None
    found.attention, found.mlp = (_norm(packed, each, hidden, reader) for each in (names.attention, names.mlp))
    found.scalar = float(reader.tensor(names.scalar, (1,)))
    if tensors.token_gate is not None:
        layer.token_gate[0].norm = _norm(packed, tensors.token_gate.norm, hidden, reader)
    if names.router is None or names.experts is None or tensors.expert_scales is None:
        return
    found.router = _floats(packed, reader.tensor(names.router, (hidden,)).float() * hidden**-0.5)
    each = (_norm(packed, name, hidden, reader) for name in names.experts)
    found.experts, found.behind_shared, found.behind_experts = each
    layer.experts[0].scales = _floats(packed, reader.tensor(tensors.expert_scales, (layer.experts[0].count,)))


def _fill_inputs(packed: PackedModel, name: str, reader: LinearReader) -> None:
    """Keep the table of what layers take of tokens besides, on the pages of its file."""
    gemma, inputs = packed.spec.gemma, packed.inputs
    assert gemma is not None
    table = reader.tensor(name, (gemma.input_vocab, gemma.input_size * gemma.input_layers))
    inputs.table, inputs.table_type = packed.keep(table), _TYPES[table.dtype]
    inputs.norm = _floats(packed, reader.tensor(TOKEN_NORM, (gemma.input_size,)))


def _fill_router(packed: PackedModel, tensors: LayerTensors, layer: LlamaLayerStruct, reader: LinearReader) -> None:
    """Pack a layer's router, and the gate of its shared expert. They are never quantised: they decide between experts,
    and are a small part of a layer."""
    hidden = packed.spec.hidden_size
    if tensors.router is not None:
        layer.experts[0].router = _whole(packed, [reader.tensor(tensors.router, (len(tensors.mlps), hidden))])
    if tensors.shared_gate is not None:
        layer.experts[0].shared_gate = _floats(packed, reader.tensor(tensors.shared_gate, (1, hidden)))
    if tensors.expert_bias is not None:
        layer.experts[0].bias = _floats(packed, reader.tensor(tensors.expert_bias, (len(tensors.mlps),)))


def _fill_mixer(packed: PackedModel, tensors: LayerTensors, layer: LlamaLayerStruct, reader: LinearReader) -> None:
    """Fill in the convolution and the delta rule of a layer that keeps a state."""
    conv, delta = layer.conv[0], packed.spec.delta
    assert tensors.conv is not None
    weight = reader.tensor(tensors.conv, (conv.channels, 1, conv.width))
    conv.weight = _floats(packed, weight[:, 0].T.contiguous())
    if tensors.conv_bias is not None:
        conv.bias = _floats(packed, reader.tensor(tensors.conv_bias, (conv.channels,)))
    if tensors.gates is None:
        return
    assert delta is not None
    assert tensors.decay_rate is not None
    assert tensors.decay_bias is not None
    assert tensors.state_norm is not None
    found, gates = layer.delta[0], tensors.gates
    shapes = ((size, gates.inputs) for size in gates.sizes)
    found.gates = _whole(packed, [reader.tensor(*each) for each in zip(gates.weights, shapes, strict=True)])
    heads = (delta.value_heads,)
    found.decay_rate = _floats(packed, reader.tensor(tensors.decay_rate, heads).float().exp())
    found.decay_bias = _floats(packed, reader.tensor(tensors.decay_bias, heads))
    found.norm = _floats(packed, reader.tensor(tensors.state_norm, (delta.value_dim,)))


def _whole(packed: PackedModel, weights: Sequence[torch.Tensor]) -> LinearStruct:
    """Pack a small linear in float32."""
    return PackedLinear(list(map(Rows, weights)), Kind.F32, library=packed.library, arena=packed.arena).struct


def _delta_struct(delta: DeltaSpec) -> DeltaStruct:
    """Describe where the numbers of each head stand in the outputs of its linears."""
    each = delta.value_heads // delta.key_heads
    values = each * delta.value_dim
    if delta.interleaved:
        step, first = 2 * (delta.key_dim + values), 2 * delta.key_dim
        spreads = [(0, step), (delta.key_dim, step), (first, step), (first + values, step)]
        spreads += [(0, 2 * each), (each, 2 * each)]
    else:
        dim = delta.key_dim
        spreads = [(0, dim), (delta.keys, dim), (2 * delta.keys, values), (delta.channels, values)]
        spreads += [(0, each), (delta.value_heads, each)]
    names = ("query", "key", "value", "gate", "update", "decay")
    found = {name: SpreadStruct(*spread) for name, spread in zip(names, spreads, strict=True)}
    sizes = {name: getattr(delta, name) for name in ("key_heads", "value_heads", "key_dim", "value_dim")}
    return DeltaStruct(**found, **sizes)


def _norm(packed: PackedModel, name: str | None, size: int, reader: LinearReader) -> int | None:
    """Copy the weights of a norm as float32; return their address."""
    if name is None:
        return None
    stored = reader.tensor(name, (size,)).float()
    return _floats(packed, 1.0 + stored if packed.spec.centred else stored)


def _floats(packed: PackedModel, tensor: torch.Tensor) -> int:
    """Copy a tensor as float32; return its address."""
    return packed.keep(tensor.to(torch.float32, copy=True).contiguous())
