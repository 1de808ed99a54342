"""Runs any Hugging Face decoder on a paged KV cache by replacing its attention function.

The model sees all rows of a step as one packed row of tokens, [1, T], without a mask and a cache. Each of its attention
layers calls `_paged_attention` with queries, keys and values after rope; the step's backend then attends. Layers of
multi-head latent attention attend on latents (`latents.py`), layers that share K and V on those of another one
(`shared_kv.py`). Layers with a state in place of K and V are mixers (`mixers.py`). Layers that count positions count
those of the step (`positions.py`). Layers with an indexer attend on the positions that it chooses (`indexers.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.contracts.errors import EngineFailure, Unsupported
from gpuworker.attention.interface import LayerAttention, LayerSink
from gpuworker.attention.torch_backend import attend_packed
from gpuworker.attention.whole_prompts import AttendsWholePrompts
from gpuworker.checkpoints.lora import LoraAdapter, Targets
from gpuworker.memory.devices import dtype_name
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.hf.adapters import LinearHooks, TorchAdapter, find_linears
from gpuworker.models.hf.indexers import CAUSAL, Causal, index_key_of, replace_indexers
from gpuworker.models.hf.latents import Absorbed, Latents, absorb_latents, latents_of
from gpuworker.models.hf.mixers import MixerStates, correct_mixers
from gpuworker.models.hf.positions import correct_positions
from gpuworker.models.hf.shared_kv import find_sources, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "quire"
_COMPARED = 24  # tokens of the sequence on which forms of mixers are compared
_UNNUMBERED = (None, -1)  # the numbers of modules whose weights layers share (zamba, zamba2)
# Inputs of attention functions that change what is attended and that no backend supports.
_UNKNOWN_OPTIONS = ("position_bias", "block_indices")


@dataclass(frozen=True, slots=True)
class _Step:
    """What the modules need to know of the step that runs."""

    sink: LayerSink
    positions: torch.Tensor  # [T]


_step: ContextVar[_Step | None] = ContextVar("quire_step", default=None)


class TransformersModel:
    """A Hugging Face causal language model with Quire's attention. Used by one thread at a time.

    `kv_dtype` is the type of K and V in its caches, a key of `gpuworker.memory.devices.CACHE_DTYPES`.
    """

    def __init__(self, module: PreTrainedModel, kv_dtype: str | None = None) -> None:
        from transformers import AttentionInterface  # a worker without such a model needs no transformers

        AttentionInterface.register(IMPLEMENTATION, _paged_attention)
        self.module = module
        module.train(False)
        self.config = module.config.get_text_config()
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.kv_dtype = kv_dtype or dtype_name(self.dtype)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        module.set_attn_implementation(IMPLEMENTATION)
        _number_calls(module)
        self.corrections = correct_mixers(module)
        mixers = MixerStates(module)
        self.states: MixerStates | None = mixers if len(mixers) else None
        self.adapters: StepAdapters | None = None
        self._hooks: LinearHooks | None = None
        self._targets: Targets | None = None
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.absorbed: Absorbed = absorb_latents(module, lambda: _step.get() is not None)
        correct_positions(module, lambda: None if (step := _step.get()) is None else step.positions)
        replace_indexers(module, lambda: None if (step := _step.get()) is None else step.sink)
        find_sources(module, lambda sink: self.forward(first, first, first, sink))
        if self.states is not None:
            self._compare_mixers(self.states)

    def _compare_mixers(self, states: MixerStates) -> None:
        """Let mixers show whether their forms agree, before their weights are packed. Raises Unsupported where not."""
        tokens = torch.arange(_COMPARED, device=self.device)
        try:
            states.compare(lambda: self.forward(tokens % self.vocab_size, tokens, tokens[:1], _Packed()))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return  # the self-test reports the error

    @property
    def adapter_targets(self) -> Targets:
        """Implement `AdaptedModel`: the linears that one forward calls once, with all its tokens."""
        if self._targets is None:
            tokens = torch.arange(_COMPARED, device=self.device) % self.vocab_size
            positions = torch.arange(_COMPARED, device=self.device)
            absorbed = {id(each.linear) for each in self.absorbed.layers}
            run = partial(self.forward, tokens, positions, positions[:1], _Packed())
            self._targets = find_linears(self.module, run, _COMPARED, absorbed)
        return self._targets

    def allow_adapters(self, max_rank: int) -> None:
        """Implement `AdaptedModel`."""
        self._hooks = LinearHooks(self.module, self.adapter_targets, lambda: self.adapters)

    def prepare_adapter(self, adapter: LoraAdapter) -> TorchAdapter:
        """Implement `AdaptedModel`."""
        return TorchAdapter(adapter, self.device)

    @property
    def arithmetic(self) -> str | None:
        """What decides the bits of its logits; None where the rest of the step does too (torch's products)."""
        return None

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink
    ) -> torch.Tensor:
        """Return float32 logits [S, vocab] of the tokens that `keep` [S] indexes.

        token_ids and positions are [T] int64, the rows of a step one after the other; `sink` attends.
        """
        options = {"logits_to_keep": keep} if self._keeps_logits else {}
        with self._step(_Step(sink, positions)):
            output = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[keep]).float()

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's hidden state."""
        return int(self.config.hidden_size)

    @torch.inference_mode()
    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink
    ) -> torch.Tensor:
        """Return float32 [S, hidden_size]: what the model without its head gives for the tokens that `keep` indexes."""
        with self._step(_Step(sink, positions)):
            output = self._decoder(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden[keep].float()

    @property
    def _decoder(self) -> nn.Module:
        """The model without its head. `base_model` is the whole where a class names another place for it (llama4)."""
        found: nn.Module = self.module.base_model
        inner = (each for each in found.children() if hasattr(each, "get_input_embeddings"))
        return next(inner, found) if found is self.module else found

    @contextmanager
    def _step(self, step: _Step) -> Iterator[None]:
        token = _step.set(step)
        try:
            yield
            if self._hooks is not None:
                self._hooks.check()
        finally:
            _step.reset(token)
            if self.states is not None:
                self.states.end()
            if self._hooks is not None:
                self._hooks.forget()

    @torch.inference_mode()
    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, T, vocab] of N sequences, [N, T], by the model's own eager attention."""
        self.module.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.module(input_ids=token_ids, use_cache=False, return_dict=True).logits
        finally:
            self.module.set_attn_implementation(IMPLEMENTATION)
        return logits.float()


class _Packed:
    """Attends over one packed sequence without a cache."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return attend_packed(layer, query, key, value)


def _number_calls(model: nn.Module) -> None:
    """Let modules whose weights layers share, which have no number of their own, have that of the layer that calls."""
    for module in model.modules():
        if (
            getattr(module, "layer_idx", 0) in _UNNUMBERED
            and "layer_idx" in inspect.signature(module.forward).parameters
        ):
            module.forward = partial(_numbered, module, module.forward)


def _numbered(module: Any, forward: Callable[..., Any], *given: Any, layer_idx: int, **named: Any) -> Any:
    module.layer_idx = layer_idx
    return forward(*given, layer_idx=layer_idx, **named)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Causal | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hand one layer's call to the step's sink. query [1, heads, T, d] and so on; returns [1, T, heads, d_v]."""
    step = _step.get()
    if step is None:
        raise EngineFailure("the model's attention was called outside of a step")
    index = getattr(module, "layer_idx", None)
    _refuse_unknown(module, index, attention_mask, options)
    layer, latents = _layer_attention(module, int(index or 0), query.shape[-1], options), latents_of(module)
    if (source := source_of(module)) is not None:
        layer = replace(layer, source=source)
    if (indices := options.get("indices")) is not None:
        layer = replace(layer, indices=indices[0], index=index_key_of(module))
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if latents is not None:
        layer = replace(layer, values_in_keys=True)
        return _attend_on_latents(latents, step.sink, layer, query, keys, values)[None], None
    return step.sink.write_and_attend(layer, query[0].transpose(0, 1), keys, values)[None], None


def _attend_on_latents(
    latents: Latents,
    sink: LayerSink,
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return [T, H, v]. query [1, H, T, d]; keys and values are latents, [T, 1, d]."""
    whole = sink if isinstance(sink, AttendsWholePrompts) and layer.indices is None else None
    cut = len(keys) if whole is None else whole.first_whole(layer, keys.dtype)
    absorbed = latents.absorb(query[:, :, :cut])[0].transpose(0, 1)
    out = latents.expand(sink.write_and_attend(layer, absorbed, keys, values))
    if whole is None or cut == len(keys):
        return out
    of_whole = whole.attend_whole(layer, query[0, :, cut:].transpose(0, 1), *latents.every_head(keys[cut:]))
    return torch.cat((out, of_whole))


def _refuse_unknown(
    module: nn.Module, index: int | None, attention_mask: torch.Tensor | Causal | None, options: dict[str, Any]
) -> None:
    found = [name for name in _UNKNOWN_OPTIONS if options.get(name) is not None]
    if attention_mask is not None and attention_mask is not CAUSAL:
        found.append("a mask of its own")
    if options.get("indices") is not None and options.get("sliding_window") is not None:
        found.append("indices inside a window")
    if options.get("is_causal") is False or index is None:
        found.append("attention that is not causal self-attention of a numbered layer")
    if found:
        raise Unsupported(f"{type(module).__name__} attends with {', '.join(found)}")


def _layer_attention(module: nn.Module, layer: int, head_dim: int, options: dict[str, Any]) -> LayerAttention:
    scale, sinks = options.get("scaling"), options.get("s_aux")
    window, chunk = _reach(module, layer, options)
    return LayerAttention(
        layer=layer,
        scale=float(head_dim**-0.5 if scale is None else scale),
        window=window,
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.float(),
        chunk=chunk,
    )


def _reach(module: nn.Module, layer: int, options: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return window and chunk of a layer. What its module does not hand over, its configuration says of its masks."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[layer] if layer < len(kinds) else None
    if kind == "chunked_attention":
        return None, getattr(config, "attention_chunk_size", None)
    if "sliding_window" not in options and (kind == "sliding_attention" or not kinds):
        return getattr(config, "sliding_window", None) or None, None
    return options.get("sliding_window"), None
