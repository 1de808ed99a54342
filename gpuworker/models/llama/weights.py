"""The tensors of a model of the Llama family: their names in a checkpoint, and which are multiplied as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from gpuworker.models.llama.spec import ExpertsSpec, LlamaSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_PREFIX = "model."
# How a family names the block with its experts, and the gate, up and down of one of them.
_EXPERT_NAMES: Final = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "olmoe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
_EXPERT: Final = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")

TensorOf = Callable[[str], torch.Tensor]
"""Gives a tensor of a checkpoint by its name. Raises KeyError where there is none."""


def without_prefix(names: Container[str]) -> str:
    """Return what a checkpoint leaves out of names: models for embeddings are stored as the bare decoder, often."""
    return _PREFIX if EMBEDDING not in names and EMBEDDING.removeprefix(_PREFIX) in names else ""


def with_merged_experts(names: Container[str], tensor_of: TensorOf) -> TensorOf:
    """Return a source of tensors that also reads experts as transformers holds them, where `names` lacks single ones.

    transformers holds the experts of a layer in two tensors: gate_up_proj [E, 2 · inner, hidden], down_proj [E, hidden,
    inner]. A checkpoint has three tensors for each expert, as a rule.
    """

    def tensor(name: str) -> torch.Tensor:
        held = name if name in names else name.replace(".block_sparse_moe.", ".mlp.")
        found = None if held in names else _EXPERT.fullmatch(held)
        return tensor_of(held) if found is None else _of_expert(tensor_of, found[1], int(found[2]), found[3])

    return tensor


def _of_expert(tensor_of: TensorOf, experts: str, index: int, part: str) -> torch.Tensor:
    """Return a part of one expert, as a view of the tensor of all. Raises KeyError where there is none."""
    is_down = part in ("down_proj", "w2")
    merged = tensor_of(f"{experts}.{'down' if is_down else 'gate_up'}_proj")
    if not index < len(merged):
        raise KeyError(f"{experts}.{index}")
    if is_down:
        return merged[index]
    gate, up = merged[index].chunk(2)
    return gate if part in ("gate_proj", "w1") else up


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
class Mlp:
    """The linears of an MLP, or of one expert."""

    gate_up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer. The norms of queries and keys are None in a model without them.

    A layer with experts has a router, and as many MLPs as experts; another one has no router and one MLP.
    """

    qkv: FusedLinear
    output: FusedLinear
    mlps: tuple[Mlp, ...]
    router: str | None
    attention_norm: str
    mlp_norm: str
    query_norm: str | None
    key_norm: str | None

    @property
    def gate_up(self) -> FusedLinear:
        """Gate and up of a layer without experts."""
        return self.mlps[0].gate_up

    @property
    def down(self) -> FusedLinear:
        """Down of a layer without experts."""
        return self.mlps[0].down

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """The linears in the order in which a step runs them."""
        return (self.qkv, self.output, *(linear for mlp in self.mlps for linear in (mlp.gate_up, mlp.down)))

    @property
    def singles(self) -> tuple[str | None, ...]:
        """Names of what is not part of a linear that is packed as the options say: norms and the router."""
        return (self.router, self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)


def layer_tensors(spec: LlamaSpec, layer: int) -> LayerTensors:
    attention, experts = f"model.layers.{layer}.self_attn", spec.experts if spec.has_experts(layer) else None
    hidden, dim = spec.hidden_size, spec.head_dim
    heads, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    qkv = (f"{attention}.{part}_proj" for part in "qkv")
    return LayerTensors(
        qkv=FusedLinear("qkv", tuple(qkv), (heads, kv, kv), hidden, spec.qkv_bias),
        output=FusedLinear("output", (f"{attention}.o_proj",), (hidden,), heads, spec.o_bias),
        mlps=(_mlp(spec, layer),) if experts is None else _experts(experts, layer, hidden),
        router=None if experts is None else f"{_block(experts, layer)}.gate.weight",
        attention_norm=f"model.layers.{layer}.input_layernorm.weight",
        mlp_norm=f"model.layers.{layer}.post_attention_layernorm.weight",
        query_norm=f"{attention}.q_norm.weight" if spec.qk_norm else None,
        key_norm=f"{attention}.k_norm.weight" if spec.qk_norm else None,
    )


def _mlp(spec: LlamaSpec, layer: int) -> Mlp:
    name, hidden, inner = f"model.layers.{layer}.mlp", spec.hidden_size, spec.intermediate_size
    return Mlp(
        FusedLinear("gate_up", (f"{name}.gate_proj", f"{name}.up_proj"), (inner, inner), hidden, spec.mlp_bias),
        FusedLinear("down", (f"{name}.down_proj",), (hidden,), inner, spec.mlp_bias),
    )


def _experts(experts: ExpertsSpec, layer: int, hidden: int) -> tuple[Mlp, ...]:
    _, gate_up, down = _EXPERT_NAMES[experts.family]
    inner, found = experts.intermediate_size, []
    for number in range(experts.count):
        name = f"{_block(experts, layer)}.experts.{number}"
        parts = tuple(f"{name}.{part}" for part in gate_up)
        fused = FusedLinear("gate_up", parts, (inner, inner), hidden)
        found.append(Mlp(fused, FusedLinear("down", (f"{name}.{down}",), (hidden,), inner)))
    return tuple(found)


def _block(experts: ExpertsSpec, layer: int) -> str:
    return f"model.layers.{layer}.{_EXPERT_NAMES[experts.family][0]}"


def head_tensors(spec: LlamaSpec) -> FusedLinear:
    """Return the last linear; in a tied model its weight is the embedding."""
    name = EMBEDDING if spec.tied else HEAD
    return FusedLinear("head", (name.removesuffix(".weight"),), (spec.vocab_size,), spec.hidden_size)


def tensor_names(spec: LlamaSpec) -> Iterator[str]:
    """Yield the names of all tensors that a model consists of."""
    yield from {EMBEDDING, FINAL_NORM, *head_tensors(spec).weights}
    for layer in range(spec.num_layers):
        tensors = layer_tensors(spec, layer)
        yield from (name for name in tensors.singles if name is not None)
        for linear in tensors.linears:
            yield from (*linear.weights, *linear.biases)
