"""The weights of a model of the Llama family on a GPU, with products of the same input fused.

q, k and v of a layer are one matrix, gate and up another. One wide product replaces two or three, with fewer launches.
Matrices stay [out, in] as in checkpoints; cuBLAS reads either order equally fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from gpuworker.models.llama.spec import LlamaSpec
from gpuworker.models.llama.weights import (
    EMBEDDING,
    HEAD,
    FusedLinear,
    LayerTensors,
    TensorOf,
    final_norm,
    layer_tensors,
)


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """The weights of one layer; those that the model does not have are None.

    A layer with experts has a router, and its gate_up and down have one more axis before the others: the experts.
    """

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]; [num_heads * head_dim] where the norm is joint
    key_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, num_heads * head_dim]
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    router: torch.Tensor | None  # [experts, hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All weights of a model, on one device and of one type. A tied `head` is `embedding` itself."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[GpuLayer, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor once."""
        yield from (self.embedding, self.norm)
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            held = (getattr(layer, each.name) for each in fields(layer))
            yield from (tensor for tensor in held if tensor is not None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors())


def fused_weights(spec: LlamaSpec, tensor_of: TensorOf, dtype: torch.dtype, device: torch.device) -> GpuWeights:
    """Return the weights of a checkpoint, fused, in `dtype` on `device`. Raises KeyError where one is missing."""

    def joined(*names: str) -> torch.Tensor:
        return _joined([tensor_of(name) for name in names], dtype, device)

    embedding = joined(EMBEDDING)
    layers = tuple(_layer(layer_tensors(spec, index), joined) for index in range(spec.num_layers))
    return GpuWeights(embedding, layers, joined(final_norm(spec)), embedding if spec.tied else joined(HEAD))


def _layer(names: LayerTensors, joined: Callable[..., torch.Tensor]) -> GpuLayer:
    def bias(linear: FusedLinear) -> torch.Tensor | None:
        return joined(*linear.biases) if linear.bias else None

    def mlp(linears: Sequence[FusedLinear]) -> torch.Tensor:
        made = joined(*(name for linear in linears for name in linear.weights))
        return made if names.router is None else made.unflatten(0, (len(linears), -1))

    single = names.mlps[0]  # experts have no biases
    return GpuLayer(
        attention_norm=joined(names.attention_norm),
        qkv=joined(*names.qkv.weights),
        qkv_bias=bias(names.qkv),
        query_norm=None if names.query_norm is None else joined(names.query_norm),
        key_norm=None if names.key_norm is None else joined(names.key_norm),
        out=joined(*names.output.weights),
        out_bias=bias(names.output),
        mlp_norm=joined(names.mlp_norm),
        router=None if names.router is None else joined(names.router),
        gate_up=mlp([each.gate_up for each in names.mlps]),
        gate_up_bias=bias(single.gate_up),
        down=mlp([each.down for each in names.mlps]),
        down_bias=bias(single.down),
    )


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return parts one below the other, in memory of their own; the parts never stand on the device beside it."""
    whole = torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=dtype, device=device)
    for into, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        into.copy_(part)
    return whole


def random_weights(spec: LlamaSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> GpuWeights:
    """Return weights of a model's shape, made on the device: normal numbers, but ones in norms and zeros in biases.

    The deviation of a matrix is 1 / sqrt(in), so that activations stay of one size through any number of layers.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def bias(size: int, there: bool) -> torch.Tensor | None:
        return torch.zeros(size, dtype=dtype, device=device) if there else None

    def layer(number: int) -> GpuLayer:
        experts = spec.experts if spec.has_experts(number) else None
        inner = spec.intermediate_size if experts is None else experts.intermediate_size
        count = () if experts is None else (experts.count,)
        return GpuLayer(
            attention_norm=ones(hidden),
            qkv=matrix(heads * spec.head_dim, hidden),
            qkv_bias=bias(heads * spec.head_dim, spec.qkv_bias),
            query_norm=ones(spec.query_norm_size) if spec.qk_norm else None,
            key_norm=ones(spec.key_norm_size) if spec.qk_norm else None,
            out=matrix(hidden, width),
            out_bias=bias(hidden, spec.o_bias),
            mlp_norm=ones(hidden),
            router=None if experts is None else matrix(experts.count, hidden),
            gate_up=matrix(*count, 2 * inner, hidden),
            gate_up_bias=bias(2 * inner, spec.mlp_bias and experts is None),
            down=matrix(*count, hidden, inner),
            down_bias=bias(hidden, spec.mlp_bias and experts is None),
        )

    hidden, width, heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_heads + 2 * spec.num_kv_heads
    layers = tuple(layer(number) for number in range(spec.num_layers))
    embedding = matrix(spec.vocab_size, hidden)
    return GpuWeights(embedding, layers, ones(hidden), embedding if spec.tied else matrix(spec.vocab_size, hidden))
