"""The tensors of a model of the Llama family: their names in a checkpoint, and which are multiplied as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
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
    "lfm2_moe": ("feed_forward", ("w1", "w3"), "w2"),
    "gemma4": ("", ("gate_proj", "up_proj"), "down_proj"),
}
# How families name the parts of a layer, and the last norm.
_NAMES: Final[dict[str, dict[str, str]]] = {
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
_NAMES["gemma4"] = _NAMES["llama"] | {"mlp_norm": "pre_feedforward_layernorm"}
_EXPERT: Final = re.compile(r"(model\.layers\.\d+\.(?:mlp\.|feed_forward\.)?experts)\.(\d+)\.(\w+)\.weight")
_TOKEN_TABLE: Final = "model.embed_tokens_per_layer.weight"
TOKEN_NORM: Final = "model.per_layer_projection_norm.weight"

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
class AddedNorms:
    """The norms of what a layer adds to the residual stream, and the number that multiplies this behind the layer.

    `router` scales the normed input of the router, `experts` are the norms of the experts' inputs, of what their shared
    one gives, and of what the others give; without experts both are None.
    """

    attention: str
    mlp: str
    scalar: str
    router: str | None = None
    experts: tuple[str, str, str] | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.attention, self.mlp, self.scalar, self.router, *(self.experts or ()))


@dataclass(frozen=True, slots=True)
class TokenGate:
    """What a layer takes of its tokens besides: a gate, what runs behind it, and its norm."""

    gate: FusedLinear
    output: FusedLinear
    norm: str


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer. What the layer does not have is None.

    A layer with experts has a router, and as many MLPs as experts; another one has no router and one MLP. `gates` give
    the two numbers of each head of a delta rule; like the router they are never quantised. Of Gemma 4 `added` are the
    norms of what a layer gives, and `token_gate` is what runs behind its MLP.
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
    expert_bias: str | None = None
    expert_scales: str | None = None
    added: AddedNorms | None = None
    token_gate: TokenGate | None = None

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
        gate = () if self.token_gate is None else (self.token_gate.gate, self.token_gate.output)
        return (self.qkv, self.output, *(linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)), *gate)

    @property
    def singles(self) -> tuple[str | None, ...]:
        """Names of what is not part of a linear that is packed as the options say: norms, the router and so on."""
        return (
            *(self.router, self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm, self.shared_gate),
            *(self.conv, self.conv_bias, self.decay_rate, self.decay_bias, self.state_norm),
            *(self.expert_bias, self.expert_scales),
            *(() if self.added is None else self.added.names),
            *(() if self.token_gate is None else (self.token_gate.norm,)),
            *(() if self.gates is None else self.gates.weights),
        )


def layer_tensors(spec: LlamaSpec, layer: int) -> LayerTensors:
    names, block = _NAMES[spec.names], f"model.layers.{layer}"
    attention, experts = f"{block}.self_attn", spec.experts if spec.has_experts(layer) else None
    hidden, (dim, kv_heads) = spec.hidden_size, spec.heads(layer)
    heads, kv = spec.num_heads * dim, kv_heads * dim
    qkv = (f"{attention}.{part}_proj" for part in "qkv")
    shares = experts if experts is not None and experts.shared_size else None
    found = LayerTensors(
        qkv=FusedLinear("qkv", tuple(qkv), (heads * (2 if spec.gated else 1), kv, kv), hidden, spec.qkv_bias),
        output=FusedLinear("output", (f"{attention}.{names['output']}",), (hidden,), heads, spec.o_bias),
        mlps=(_mlp(spec, layer),) if experts is None else _experts(experts, layer, hidden),
        router=None if experts is None else f"{_block(experts, layer)}.{_router(experts)}.weight",
        attention_norm=f"{block}.{names['attention_norm']}.weight",
        mlp_norm=f"{block}.{names['mlp_norm']}.weight",
        query_norm=f"{attention}.{names['query_norm']}.weight" if spec.qk_norm else None,
        key_norm=f"{attention}.{names['key_norm']}.weight" if spec.qk_norm else None,
        shared=None if shares is None else _shared(shares, layer, hidden),
        shared_gate=None if shares is None else f"{_block(shares, layer)}.shared_expert_gate.weight",
        expert_bias=f"{_block(experts, layer)}.expert_bias" if experts is not None and experts.biased else None,
    )
    if spec.gemma is not None:
        return _with_added_norms(found, spec, layer)
    if spec.kind(layer) == ATTENTION:
        return found
    found = replace(found, query_norm=None, key_norm=None)
    return _with_delta(found, spec, block) if spec.kind(layer) == DELTA else _with_conv(found, spec, block)


def _with_added_norms(found: LayerTensors, spec: LlamaSpec, layer: int) -> LayerTensors:
    """Return the tensors of a layer of Gemma 4."""
    assert spec.gemma is not None
    its, block = spec.gemma.layers[layer], f"model.layers.{layer}"
    hidden, size = spec.hidden_size, spec.gemma.input_size
    kept = 1 if its.borrows else 2 if its.same_values else 3
    attention, mlp = (f"{block}.post_{part}_layernorm.weight" for part in ("attention", "feedforward"))
    added = AddedNorms(attention, mlp, f"{block}.layer_scalar")
    if found.router is not None:
        norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        of_input, of_shared, of_experts = (f"{block}.{name}.weight" for name in norms)
        added = replace(added, router=f"{block}.router.scale", experts=(of_input, of_shared, of_experts))
    gate = TokenGate(
        FusedLinear("gate", (f"{block}.per_layer_input_gate",), (size,), hidden),
        FusedLinear("output", (f"{block}.per_layer_projection",), (hidden,), size),
        f"{block}.post_per_layer_input_norm.weight",
    )
    return replace(
        found,
        qkv=replace(found.qkv, parts=found.qkv.parts[:kept], sizes=found.qkv.sizes[:kept]),
        key_norm=None if its.borrows else found.key_norm,
        shared=None if found.shared is None else _mlp(spec, layer),
        shared_gate=None,
        expert_scales=None if found.router is None else f"{block}.router.per_expert_scale",
        added=added,
        token_gate=gate if size else None,
    )


def _with_conv(found: LayerTensors, spec: LlamaSpec, block: str) -> LayerTensors:
    """Return the tensors of a layer with a short convolution."""
    name, hidden, size = f"{block}.conv", spec.hidden_size, spec.conv_channels
    return replace(
        found,
        qkv=FusedLinear("qkv", (f"{name}.in_proj",), (3 * size,), hidden, spec.conv_bias),
        output=FusedLinear("output", (f"{name}.out_proj",), (hidden,), size, spec.conv_bias),
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
    name, hidden = f"model.layers.{layer}.{names['mlp']}", spec.hidden_size
    inner = spec.intermediate_size if spec.gemma is None else spec.gemma.layers[layer].inner
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
    return f"model.layers.{layer}.{_EXPERT_NAMES[experts.family][0]}".removesuffix(".")


def _router(experts: ExpertsSpec) -> str:
    return "router.proj" if experts.family == "gemma4" else "gate"


def head_tensors(spec: LlamaSpec) -> FusedLinear:
    """Return the last linear; in a tied model its weight is the embedding."""
    name = EMBEDDING if spec.tied else HEAD
    return FusedLinear("head", (name.removesuffix(".weight"),), (spec.vocab_size,), spec.hidden_size)


def token_table(spec: LlamaSpec) -> str | None:
    """Return the name of the table of what layers take of tokens besides; None where they take nothing."""
    return _TOKEN_TABLE if spec.gemma is not None and spec.gemma.input_size else None


def token_projection(spec: LlamaSpec) -> FusedLinear:
    """Return the linear that makes this, of embedded tokens and for all layers."""
    assert spec.gemma is not None
    outputs = spec.gemma.input_size * spec.gemma.input_layers
    return FusedLinear("projection", ("model.per_layer_model_projection",), (outputs,), spec.hidden_size)


def final_norm(spec: LlamaSpec) -> str:
    """Return the name of the norm before the last linear."""
    return f"model.{_NAMES[spec.names]['final_norm']}.weight"


def tensor_names(spec: LlamaSpec) -> Iterator[str]:
    """Yield the names of all tensors that a model consists of."""
    yield from {EMBEDDING, final_norm(spec), *head_tensors(spec).weights}
    if (table := token_table(spec)) is not None:
        yield from (table, *token_projection(spec).weights, TOKEN_NORM)
    for layer in range(spec.num_layers):
        tensors = layer_tensors(spec, layer)
        yield from (name for name in tensors.singles if name is not None)
        for linear in tensors.linears:
            yield from (*linear.weights, *linear.biases)
