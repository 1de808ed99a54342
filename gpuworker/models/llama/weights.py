"""The tensors of a model of the Llama family: their names in a checkpoint, and which are multiplied as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpuworker.models.llama.spec import LlamaSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

TensorOf = Callable[[str], torch.Tensor]
"""Gives a tensor of a checkpoint by its name. Raises KeyError where there is none."""


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Linears that take the same input, as one: its role in a layer, the names of its parts, the outputs of each."""

    role: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: int
    bias: bool = False

    @property
    def paired(self) -> bool:
        """Whether the linear has two parts, gate and up, whose outputs are joined pairwise."""
        return self.role == "gate_up"

    @property
    def last(self) -> bool:
        """Whether the linear makes the logits."""
        return self.role == "head"

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights; the shape of each is [its size, inputs]."""
        return tuple(f"{part}.weight" for part in self.parts)

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases, one for each weight or none."""
        return tuple(f"{part}.bias" for part in self.parts) if self.bias else ()

    @property
    def outputs(self) -> int:
        """Outputs of all parts together."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer. The norms of queries and keys are None in a model without them."""

    qkv: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    attention_norm: str
    mlp_norm: str
    query_norm: str | None
    key_norm: str | None

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """The linears in the order in which a step runs them."""
        return (self.qkv, self.output, self.gate_up, self.down)

    @property
    def norms(self) -> tuple[str | None, ...]:
        return (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)


def layer_tensors(spec: LlamaSpec, layer: int) -> LayerTensors:
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    heads, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    qkv, gate_up = (f"{attention}.{part}_proj" for part in "qkv"), (f"{mlp}.{part}_proj" for part in ("gate", "up"))
    return LayerTensors(
        qkv=FusedLinear("qkv", tuple(qkv), (heads, kv, kv), hidden, spec.qkv_bias),
        output=FusedLinear("output", (f"{attention}.o_proj",), (hidden,), heads, spec.o_bias),
        gate_up=FusedLinear("gate_up", tuple(gate_up), (inner, inner), hidden, spec.mlp_bias),
        down=FusedLinear("down", (f"{mlp}.down_proj",), (hidden,), inner, spec.mlp_bias),
        attention_norm=f"model.layers.{layer}.input_layernorm.weight",
        mlp_norm=f"model.layers.{layer}.post_attention_layernorm.weight",
        query_norm=f"{attention}.q_norm.weight" if spec.qk_norm else None,
        key_norm=f"{attention}.k_norm.weight" if spec.qk_norm else None,
    )


def head_tensors(spec: LlamaSpec) -> FusedLinear:
    """Return the last linear; in a tied model its weight is the embedding."""
    name = EMBEDDING if spec.tied else HEAD
    return FusedLinear("head", (name.removesuffix(".weight"),), (spec.vocab_size,), spec.hidden_size)


def tensor_names(spec: LlamaSpec) -> Iterator[str]:
    """Yield the names of all tensors that a model consists of."""
    yield from {EMBEDDING, FINAL_NORM, *head_tensors(spec).weights}
    for layer in range(spec.num_layers):
        tensors = layer_tensors(spec, layer)
        yield from (name for name in tensors.norms if name is not None)
        for linear in tensors.linears:
            yield from (*linear.weights, *linear.biases)
