"""The native path on a GPU: the Llama family in torch's matrix products and fused Triton kernels.

A layer is four products and five kernels. They are: norm with the residual added; qkv to queries, and keys and values
in the cache; attention; norm again; gated SiLU. A layer with experts has `triton_experts` in place of its last two
products. After the attention of the last layer, only sampled tokens go on. On a device without Triton, and over an
attention that does not fuse, the same operations run in plain torch. The tests compare both with transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.nn.functional import embedding, linear

from gpuworker.attention.interface import LayerAttention, LayerSink
from gpuworker.kernels import torch_elementwise, torch_experts
from gpuworker.kernels.rope import Rope
from gpuworker.kernels.torch_experts import Experts
from gpuworker.models.llama.gpu_weights import GpuLayer, GpuWeights
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, rope_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Elementwise(Protocol):
    """The module `torch_elementwise`, which documents the functions, or `triton_elementwise` with the same names."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class ExpertProducts(Protocol):
    """The module `torch_experts`, which documents the function, or `triton_experts` with the same name."""

    def mix_experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs between the matrix products of a layer, and the products by expert."""

    elementwise: Elementwise = torch_elementwise
    experts: ExpertProducts = torch_experts


@runtime_checkable
class RopeAttention(Protocol):
    """An attention backend that also takes the product of the qkv matrix as it is."""

    def rope_write_and_attend(self, layer: LayerAttention, qkv: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Norm queries and keys, apply rope, write K and V, attend: `write_and_attend` on the parts of qkv [T, -1].

        qkv has, for each token, its query heads, its key heads, its value heads. Returns [T, num_heads, head_dim].
        """
        ...


class LlamaGpuModel:
    """Implements `gpuworker.models.step_model.StepModel`. `kv_dtype` is the type of K and V in its caches.

    Positions end at `max_positions`. Raises ValueError for a model that is not of the family.
    """

    states = None  # all of its layers attend

    arithmetic: str | None = None  # cuBLAS chooses a kernel, and so the bits, by the number of rows

    def __init__(
        self,
        config: PretrainedConfig,
        weights: GpuWeights,
        kv_dtype: str,
        max_positions: int,
        kernels: Kernels | None = None,
    ) -> None:
        spec = llama_spec(config)
        if spec is None:
            raise ValueError(f"a {config.model_type} that is not of the native path")
        self.config, self.spec, self.weights, self.kv_dtype = config, spec, weights, kv_dtype
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        table = rope_table(config, max_positions)  # [max_positions, 2, head_dim / 2]
        self._table = table.to(self.device).flatten(1)
        kernels = kernels or kernels_on(self.device)
        self._fused, self._experts = kernels.elementwise, kernels.experts
        self._attention = _attention_of(spec)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, and of the angles of all positions."""
        return self.weights.num_bytes + self._table.numel() * self._table.itemsize

    def only(self, layers: Sequence[int]) -> LlamaGpuModel:
        """Return a model of some of the layers on the same weights."""
        part = copy.copy(self)
        part.spec = self.spec.only(layers)
        part.weights = replace(self.weights, layers=tuple(self.weights.layers[layer] for layer in layers))
        part._attention = _attention_of(part.spec)
        return part

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink
    ) -> torch.Tensor:
        return self.logits(token_ids, positions, keep, sink).float()

    @torch.inference_mode()
    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        sink: LayerSink,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [S, vocab] in the type of the weights, of the tokens that `keep` [S] indexes; None means all.

        They are written to `out` where it is given. Otherwise as `forward`; token_ids and positions may be int32. No
        shape depends on what a tensor holds, and nothing waits for the device.
        """
        return torch.mm(self._normed(token_ids, positions, keep, sink), self.weights.head.t(), out=out)

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @torch.inference_mode()
    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink
    ) -> torch.Tensor:
        """Implement `EmbeddingModel`."""
        return self._normed(token_ids, positions, keep, sink).float()

    def _normed(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None, sink: LayerSink
    ) -> torch.Tensor:
        """Return what the head takes, [S, hidden_size]."""
        weights, eps = self.weights, self.spec.norm_eps
        residual = embedding(token_ids, weights.embedding)
        hidden = self._fused.rms_norm(residual, weights.layers[0].attention_norm, eps)
        after = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        for layer, attention, next_norm in zip(weights.layers, self._attention, after, strict=True):
            attended = self._attend(layer, attention, hidden, positions, sink).flatten(1)
            if next_norm is weights.norm and keep is not None:
                attended, residual = attended.index_select(0, keep), residual.index_select(0, keep)
            hidden = linear(attended, layer.out, layer.out_bias)
            hidden = self._fused.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._fused.add_rms_norm(self._mlp(layer, hidden), residual, next_norm, eps)
        return hidden

    def _mlp(self, layer: GpuLayer, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer's MLP, or of its experts, [T, hidden]."""
        if layer.router is not None:
            options = self.spec.experts
            assert options is not None
            held = Experts(layer.router, layer.gate_up, layer.down, options.top_k, options.normalised)
            return self._experts.mix_experts(hidden, held)
        inner = self._fused.silu_and_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))
        return linear(inner, layer.down, layer.down_bias)

    def _attend(
        self,
        layer: GpuLayer,
        attention: LayerAttention,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        sink: LayerSink,
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for hidden [T, hidden]."""
        qkv = linear(hidden, layer.qkv, layer.qkv_bias)
        norms = (layer.query_norm, layer.key_norm)
        if self.spec.joint_norm:
            self._norm_jointly(layer, qkv)
            norms = (None, None)
        if self.spec.clip is not None:
            qkv.clamp_(-self.spec.clip, self.spec.clip)
        rope = Rope(self._table, positions, *norms, self.spec.norm_eps)
        if isinstance(sink, RopeAttention):
            return sink.rope_write_and_attend(attention, qkv, rope)
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        query, key, value = qkv.unflatten(1, (-1, self.spec.head_dim)).split(heads, dim=1)
        return sink.write_and_attend(
            attention, rope.apply_rope(query, rope.query_norm), rope.apply_rope(key, rope.key_norm), value
        )

    def _norm_jointly(self, layer: GpuLayer, qkv: torch.Tensor) -> None:
        """Norm all queries of a token as one row, and all its keys, in place."""
        assert layer.query_norm is not None
        assert layer.key_norm is not None
        sizes = (self.spec.query_norm_size, self.spec.key_norm_size)
        query, key, _ = qkv.tensor_split((sizes[0], sum(sizes)), dim=1)
        for heads, weight in ((query, layer.query_norm), (key, layer.key_norm)):
            heads.copy_(self._fused.rms_norm(heads, weight, self.spec.norm_eps))


def _attention_of(spec: LlamaSpec) -> list[LayerAttention]:
    return [LayerAttention(n, spec.scale, window) for n, window in enumerate(spec.windows)]


def kernels_on(device: torch.device) -> Kernels:
    """Return the fused kernels of a device, plain torch where Triton has none."""
    if device.type != "cuda":
        return Kernels()
    from gpuworker.kernels import triton_elementwise, triton_experts

    return Kernels(triton_elementwise, triton_experts)
