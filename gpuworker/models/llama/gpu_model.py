"""The native path on a GPU: the Llama family in torch's matrix products and fused Triton kernels.

A layer is four products and five kernels. They are: norm with the residual added; qkv to queries, and keys and values
in the cache; attention; norm again; gated SiLU. A layer with experts has `triton_experts` in place of its last two
products. After the attention of the last layer, only sampled tokens go on. LoRA adapters add their low-rank products to
the outputs of a layer's linears (`triton_adapters`); a step that has some is launched kernel by kernel. On a device
without Triton, and over an attention that does not fuse, the same operations run in plain torch. The tests compare both
with transformers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.functional import embedding, linear

from gpuworker.attention.interface import LayerAttention, LayerSink
from gpuworker.checkpoints.lora import LoraAdapter, LowRank, Targets
from gpuworker.kernels import torch_adapters, torch_elementwise, torch_experts
from gpuworker.kernels.rope import Rope
from gpuworker.kernels.torch_adapters import AdapterRows, DeviceAdapter
from gpuworker.kernels.torch_experts import Experts
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.adapters import PRODUCTS, adapter_rows, device_adapter, native_places
from gpuworker.models.llama.gpu_weights import GpuLayer, GpuWeights
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, rope_table
from gpuworker.models.llama.weights import FusedLinear, layer_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_log = logging.getLogger(__name__)
_TRIED_ROWS: Final = 40
# By how much the kernels for adapters may differ from torch, as a part of what adapters add.
_MOST_ERROR: Final = 3e-2
_MOST_ERROR_OF_FLOATS: Final = 1e-4
Adapt = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns a product with what adapters add to it, by its name of PRODUCTS, its inputs and its outputs."""


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


class AdapterProducts(Protocol):
    """The module `torch_adapters`, which documents the function, or `triton_adapters` with the same name."""

    def add_low_rank(
        self, out: torch.Tensor, x: torch.Tensor, product: int, sizes: Sequence[int], rows: AdapterRows
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs between the matrix products of a layer, and the products by expert and by adapter."""

    elementwise: Elementwise = torch_elementwise
    experts: ExpertProducts = torch_experts
    adapters: AdapterProducts = torch_adapters


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
        self._fused, self._experts, self._low_rank = kernels.elementwise, kernels.experts, kernels.adapters
        self._sizes = [[each.sizes for each in _adapted(spec, layer)] for layer in range(spec.num_layers)]
        self.adapters: StepAdapters | None = None
        """Those of the next forward."""
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
        part._sizes = [self._sizes[layer] for layer in layers]
        return part

    @property
    def adapter_targets(self) -> Targets:
        """Return the linears that adapters may change, by their names in a checkpoint."""
        return {name: (place.outputs, place.inputs) for name, place in native_places(self.spec).items()}

    def allow_adapters(self, max_rank: int) -> None:
        """Keep the kernels for adapters of up to this rank where they compute what torch does, else torch itself."""
        if self._low_rank is torch_adapters:
            return
        try:
            error = self._adapters_error(max_rank)
        except (RuntimeError, TypeError, ValueError) as failed:  # what a compiler and a driver raise
            self._low_rank, why = torch_adapters, repr(failed)
        else:
            most = _MOST_ERROR if self.dtype.itemsize == 2 else _MOST_ERROR_OF_FLOATS
            if error < most:
                return
            self._low_rank, why = torch_adapters, f"they are off by {error:.2g} of what adapters add; at most {most:g}"
        _log.warning("adapters run in plain torch, because their kernels fail their test: %s", why)

    def _adapters_error(self, max_rank: int) -> float:
        """Return by how much the kernels differ from torch, for two adapters on the products of the first layer."""
        draw, worst = torch.Generator().manual_seed(0), 0.0

        def drawn(*shape: int) -> torch.Tensor:
            made: torch.Tensor = torch.randn(shape, generator=draw) * float(shape[-1]) ** -0.5
            return made

        def adapter(rank: int) -> DeviceAdapter:
            targets = ((name, self.adapter_targets[name]) for each in linears for name in each.parts)
            parts = {name: LowRank(drawn(rank, inputs), drawn(outputs, rank)) for name, (outputs, inputs) in targets}
            return self.prepare_adapter(LoraAdapter("", rank, parts))

        linears = _adapted(self.spec, 0)
        of_row = np.arange(_TRIED_ROWS, dtype=np.int32) % 3 - 1
        rows = adapter_rows(StepAdapters((adapter(max_rank), adapter(1)), of_row), self.device)
        for number, each in enumerate(linears):
            x = drawn(_TRIED_ROWS, each.inputs).to(self.device, self.dtype)
            outs = [x.new_zeros((_TRIED_ROWS, sum(each.sizes))) for _ in "ab"]
            for out, products in zip(outs, (self._low_rank, torch_adapters), strict=True):
                products.add_low_rank(out, x, number, each.sizes, rows)
            ours, theirs = (out.double() for out in outs)
            worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        return worst

    def prepare_adapter(self, adapter: LoraAdapter) -> DeviceAdapter:
        """Return an adapter on the device; any thread may call it beside a step."""
        return device_adapter(self.spec, adapter, self.dtype, self.device)

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
        rows = None if self.adapters is None else adapter_rows(self.adapters, self.device)
        hidden = self._fused.rms_norm(residual, weights.layers[0].attention_norm, eps)
        after = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        for number, (layer, attention, next_norm) in enumerate(
            zip(weights.layers, self._attention, after, strict=True)
        ):
            adapt = partial(self._adapt, rows, number)
            attended = self._attend(layer, attention, hidden, positions, sink, adapt).flatten(1)
            if next_norm is weights.norm and keep is not None and rows is None:
                attended, residual = attended.index_select(0, keep), residual.index_select(0, keep)
            hidden = adapt("output", attended, linear(attended, layer.out, layer.out_bias))
            hidden = self._fused.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._fused.add_rms_norm(self._mlp(layer, hidden, adapt), residual, next_norm, eps)
        # Which rows have which adapter is known for all of them: they are left out behind the last layer.
        return hidden if rows is None or keep is None else hidden.index_select(0, keep)

    def _adapt(
        self, rows: AdapterRows | None, layer: int, role: str, x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Return the product of a layer with what the step's adapters add to it."""
        if rows is not None:
            place = PRODUCTS.index(role)
            sizes = self._sizes[layer][place]
            self._low_rank.add_low_rank(out, x, layer * len(PRODUCTS) + place, sizes, rows)
        return out

    def _mlp(self, layer: GpuLayer, hidden: torch.Tensor, adapt: Adapt) -> torch.Tensor:
        """Return the output of a layer's MLP, or of its experts, [T, hidden]."""
        if layer.router is not None:
            options = self.spec.experts
            assert options is not None
            held = Experts(layer.router, layer.gate_up, layer.down, options.top_k, options.normalised)
            return self._experts.mix_experts(hidden, held)
        gate_up = adapt("gate_up", hidden, linear(hidden, layer.gate_up, layer.gate_up_bias))
        inner = self._fused.silu_and_mul(gate_up)
        return adapt("down", inner, linear(inner, layer.down, layer.down_bias))

    def _attend(
        self,
        layer: GpuLayer,
        attention: LayerAttention,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        sink: LayerSink,
        adapt: Adapt,
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for hidden [T, hidden]."""
        qkv = adapt("qkv", hidden, linear(hidden, layer.qkv, layer.qkv_bias))
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


def _adapted(spec: LlamaSpec, layer: int) -> list[FusedLinear]:
    """Return the products of a layer that adapters may change, in the order of PRODUCTS; experts are not among them."""
    tensors = layer_tensors(spec, layer)
    return [tensors.qkv, tensors.output, *(() if tensors.router else (tensors.gate_up, tensors.down))]


def _attention_of(spec: LlamaSpec) -> list[LayerAttention]:
    return [LayerAttention(n, spec.scale, window) for n, window in enumerate(spec.windows)]


def kernels_on(device: torch.device) -> Kernels:
    """Return the fused kernels of a device, plain torch where Triton has none."""
    if device.type != "cuda":
        return Kernels()
    from gpuworker.kernels import triton_adapters, triton_elementwise, triton_experts

    return Kernels(triton_elementwise, triton_experts, triton_adapters)
