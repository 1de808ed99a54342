"""The tensors of a model of the Llama family: their names in a checkpoint, and which are multiplied as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from gpuworker.models.llama.spec import ATTENTION, DELTA, ExpertsSpec, LlamaSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_PREFIX = "model."
# How a family names the block with its experts, and the gate, up and down of one of them.
_EXPERT_NAMES: Final = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "olmoe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
# How families name the parts of a layer, and the last norm.
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "llama": {
        "final_norm": "norm",
        "attention_norm": "input_layernorm",
        "query_norm": "q_norm",
        "key_norm": "k_norm",
        "output": "o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp": "mlp",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
    "lfm2": {
        "final_norm": "embedding_norm",
        "attention_norm": "operator_norm",
        "query_norm": "q_layernorm",
        "key_norm": "k_layernorm",
        "output": "out_proj",
        "mlp_norm": "ffn_norm",
        "mlp": "feed_forward",
        "gate": "w1",
        "up": "w3",
        "down": "w2",
    },
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
    """The tensors of one layer. What the layer does not have is None.

    A layer with experts has a router, and as many MLPs as experts; another one has no router and one MLP. `gates` give
    the two numbers of each head of a delta rule; like the router they are never quantised.
    """

    qkv: FusedLinear
    output: FusedLinear
    mlps: tuple[Mlp, ...]
    router: str | None
    attention_norm: str
    mlp_norm: str
    query_norm: str | None = None
    key_norm: str | None = None
    shared: Mlp | None = None
    shared_gate: str | None = None
    conv: str | None = None
    conv_bias: str | None = None
    gates: FusedLinear | None = None
    decay_rate: str | None = None
    decay_bias: str | None = None
    state_norm: str | None = None

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
        mlps = self.mlps if self.shared is None else (*self.mlps, self.shared)
        return (self.qkv, self.output, *(linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)))

    @property
    def singles(self) -> tuple[str | None, ...]:
        """Names of what is not part of a linear that is packed as the options say: norms, the router and so on."""
        return (
            *(self.router, self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm, self.shared_gate),
            *(self.conv, self.conv_bias, self.decay_rate, self.decay_bias, self.state_norm),
            *(() if self.gates is None else self.gates.weights),
        )


def layer_tensors(spec: LlamaSpec, layer: int) -> LayerTensors:
    names, block = _NAMES[spec.names], f"model.layers.{layer}"
    attention, experts = f"{block}.self_attn", spec.experts if spec.has_experts(layer) else None
    hidden, dim = spec.hidden_size, spec.head_dim
    heads, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    qkv = (f"{attention}.{part}_proj" for part in "qkv")
    shares = experts if experts is not None and experts.shared_size else None
    found = LayerTensors(
        qkv=FusedLinear("qkv", tuple(qkv), (heads * (2 if spec.gated else 1), kv, kv), hidden, spec.qkv_bias),
        output=FusedLinear("output", (f"{attention}.{names['output']}",), (hidden,), heads, spec.o_bias),
        mlps=(_mlp(spec, layer),) if experts is None else _experts(experts, layer, hidden),
        router=None if experts is None else f"{_block(experts, layer)}.gate.weight",
        attention_norm=f"{block}.{names['attention_norm']}.weight",
        mlp_norm=f"{block}.{names['mlp_norm']}.weight",
        query_norm=f"{attention}.{names['query_norm']}.weight" if spec.qk_norm else None,
        key_norm=f"{attention}.{names['key_norm']}.weight" if spec.qk_norm else None,
        shared=None if shares is None else _shared(shares, layer, hidden),
        shared_gate=None if shares is None else f"{_block(shares, layer)}.shared_expert_gate.weight",
    )
    if spec.kind(layer) == ATTENTION:
        return found
    found = replace(found, query_norm=None, key_norm=None)
    return _with_delta(found, spec, block) if spec.kind(layer) == DELTA else _with_conv(found, spec, block)


def _with_conv(found: LayerTensors, spec: LlamaSpec, block: str) -> LayerTensors:
    """Return the tensors of a layer with a short convolution."""
    name, hidden = f"{block}.conv", spec.hidden_size
    return replace(
        found,
        qkv=FusedLinear("qkv", (f"{name}.in_proj",), (3 * hidden,), hidden, spec.conv_bias),
        output=FusedLinear("output", (f"{name}.out_proj",), (hidden,), hidden, spec.conv_bias),
        conv=f"{name}.conv.weight",
        conv_bias=f"{name}.conv.bias" if spec.conv_bias else None,
    )


def _with_delta(found: LayerTensors, spec: LlamaSpec, block: str) -> LayerTensors:
    """Return the tensors of a layer with a gated delta rule."""
    name, hidden, delta = f"{block}.linear_attn", spec.hidden_size, spec.delta
    assert delta is not None, "a specification with such layers has it"
    count = delta.value_heads
    inputs = (
        {"qkvz": delta.channels + delta.values} if delta.interleaved else {"qkv": delta.channels, "z": delta.values}
    )
    gates = {"ba": 2 * count} if delta.interleaved else {"b": count, "a": count}
    parts, gate_parts = (tuple(f"{name}.in_proj_{part}" for part in each) for each in (inputs, gates))
    return replace(
        found,
        qkv=FusedLinear("qkv", parts, tuple(inputs.values()), hidden),
        output=FusedLinear("output", (f"{name}.out_proj",), (hidden,), delta.values),
        conv=f"{name}.conv1d.weight",
        gates=FusedLinear("gates", gate_parts, tuple(gates.values()), hidden),
        decay_rate=f"{name}.A_log",
        decay_bias=f"{name}.dt_bias",
        state_norm=f"{name}.norm.weight",
    )


def _mlp(spec: LlamaSpec, layer: int) -> Mlp:
    names = _NAMES[spec.names]
    name, hidden, inner = f"model.layers.{layer}.{names['mlp']}", spec.hidden_size, spec.intermediate_size
    gate_up = (f"{name}.{names['gate']}", f"{name}.{names['up']}")
    return Mlp(
        FusedLinear("gate_up", gate_up, (inner, inner), hidden, spec.mlp_bias),
        FusedLinear("down", (f"{name}.{names['down']}",), (hidden,), inner, spec.mlp_bias),
    )


def _shared(experts: ExpertsSpec, layer: int, hidden: int) -> Mlp:
    name, inner = f"{_block(experts, layer)}.shared_expert", experts.shared_size
    gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
    down = FusedLinear("down", (f"{name}.down_proj",), (hidden,), inner)
    return Mlp(FusedLinear("gate_up", gate_up, (inner, inner), hidden), down)


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


def final_norm(spec: LlamaSpec) -> str:
    """Return the name of the norm before the last linear."""
    return f"model.{_NAMES[spec.names]['final_norm']}.weight"


def tensor_names(spec: LlamaSpec) -> Iterator[str]:
    """Yield the names of all tensors that a model consists of."""
    yield from {EMBEDDING, final_norm(spec), *head_tensors(spec).weights}
    for layer in range(spec.num_layers):
        tensors = layer_tensors(spec, layer)
        yield from (name for name in tensors.singles if name is not None)
        for linear in tensors.linears:
            yield from (*linear.weights, *linear.biases)
