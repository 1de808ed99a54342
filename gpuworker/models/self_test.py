"""The start-up self-test: does the model on a paged cache compute what it computes by itself?

A model whose attention bypasses the backend, or reaches it without an input that it depends on, runs without an
exception and writes nonsense. So before serving, two sequences of random tokens are run three ways: by the model's own
eager attention; one of them packed, through a recorder of all calls; and both side by side, in chunks and single
tokens, through a small paged cache. Layers that keep a state show it in the second run and go on with it in the third.
The model is refused unless every layer called once and all logits agree. A cache of a narrower type is compared with
the model on K and V rounded to that type. `threshold_test` runs longer sequences.

Where layers keep K/V for different times, the cache has groups of layers. What the layers of a group have read for the
last time is overwritten before the next step, so a read beyond a window or a chunk shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from common.contracts.errors import Unsupported
from common.contracts.lease import unread_blocks
from common.contracts.types import KvGeometry, KvGroup
from gpuworker.attention.interface import AttentionBackend, Int32Array, LayerAttention, LayerSink
from gpuworker.attention.step_inputs import (
    PackedRows,
    attention_arrays,
    attention_metadata,
    pack_pages,
    pack_rows,
    to_device,
)
from gpuworker.attention.torch_backend import attend_packed
from gpuworker.memory.devices import CACHE_DTYPES, QUANTISED_DTYPES, dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import LayerShape, Reach, geometry_of, page_layout, reach_of, with_groups
from gpuworker.models.hf.loader import context_limit
from gpuworker.models.step_model import RecurrentStates, StepModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHORTEST = 16
_BLOCK_SIZE = 4
# What a configuration says of a layer that neither attends nor keeps a state.
_NEITHER = (["mlp"], ["moe"])


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest error of the logits of a position: norm of the error over that of the logits, mean removed."""

    tolerance: float
    share: float = 1.0  # of the positions that must be within it


_EXACT = Limit(2e-3)
# In 16 bits a token may go to another expert, which changes a few positions; wrong attention changes about half.
_ROUGH = Limit(2e-1, share=0.8)
# The largest change by rounding K and V alone: 0.26 was measured, with fp8 and random weights of large deviation.
_ROUNDED = Limit(5e-1, share=0.5)


class LearntStates(RecurrentStates, Protocol):
    """States that a model shows in a run."""

    def learn(self) -> AbstractContextManager[None]:
        """Within this context one packed sequence runs, from its start; each layer shows which states it has."""
        ...


class ReferenceModel(StepModel, Protocol):
    """A model that also runs by itself, and says of which types it is; `config` is that of its text model."""

    config: PretrainedConfig
    dtype: torch.dtype
    kv_dtype: str

    @property
    def states(self) -> LearntStates | None: ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink, /
    ) -> torch.Tensor: ...

    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, T, vocab] of N sequences, [N, T], by the model's own eager attention."""
        ...


class CallRecorder:
    """Attends over one packed sequence without a cache, and records the call of each layer."""

    def __init__(self) -> None:
        self.layers: list[LayerAttention] = []
        self.shapes: list[LayerShape] = []  # of what each was called with

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2], layer.values_in_keys, layer.index))
        return attend_packed(layer, query, key, value)


class RoundedAttention:
    """Attends over one packed sequence without a cache, with K and V rounded as a cache of a type would."""

    def __init__(self, kv_dtype: str) -> None:
        self._kv_dtype = kv_dtype

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys = as_kept(key, self._kv_dtype)
        values = keys[..., : value.shape[-1]] if layer.values_in_keys else as_kept(value, self._kv_dtype)
        return attend_packed(layer, query, keys, values)


def as_kept(numbers: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Return [T, heads, d] in float32 as a cache of this type gives it back.

    int8 and fp8: stored = number / scale, where the scale of a (token, head) brings its largest to the type's.
    """
    dtype, exact = CACHE_DTYPES[kv_dtype], numbers.float()
    if kv_dtype not in QUANTISED_DTYPES:
        return exact.to(dtype).float()
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = (exact.abs().amax(dim=-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    steps = exact / scale
    return (steps if dtype.is_floating_point else steps.round()).to(dtype).float() * scale


def self_test(
    model: ReferenceModel,
    backend: Callable[[KvCache], AttentionBackend],
    other: StepModel | None = None,
    *,
    rough: bool = False,
    length: int = SHORTEST,
    block_size: int = 0,
    own: KvGeometry | None = None,
) -> KvGeometry:
    """Run the test and return the shape of a token's K/V as the layers really make it.

    `other` is a model of the same weights that runs on the cache instead and is compared with `model`; `rough` means
    that it rounds more than its type does. Sequences have `length` tokens, at least 16 and a multiple of 4.
    With the `block_size` of a service layers may be groups, with 0 they are one. `own` is the shape of what of K/V is
    this rank's, where `other` runs on several; it is returned then. Raises Unsupported, with the reason,
    when the model cannot be served.
    """
    try:
        return _run(model, backend, other or model, rough, length, block_size, own)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"{model.config.model_type} fails its self-test: {error!r}") from error


def follow_self_test(model: StepModel, backend: Callable[[KvCache], AttentionBackend], own: KvGeometry) -> None:
    """Run the steps that `self_test` runs on the cache, at another rank than the one that compares.

    `own` is the shape of what of K/V is this rank's.
    """
    tokens = _tokens(model, SHORTEST)
    nothing = torch.empty(*tokens.shape, 0)
    cache = KvCache(own, _pages(own, tokens), _BLOCK_SIZE, model.device)
    _run_chunked(model, _Tables(cache, len(tokens)), backend(cache), tokens, nothing)


def _tokens(model: StepModel, length: int) -> torch.Tensor:
    """Return two sequences of random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (2, length), generator=generator).to(model.device)


def _pages(geometry: KvGeometry, tokens: torch.Tensor) -> int:
    blocks = tokens.numel() // _BLOCK_SIZE
    return blocks * sum(group.pages for group in geometry.groups) if geometry.groups else blocks


def _run(
    model: ReferenceModel,
    backend: Callable[[KvCache], AttentionBackend],
    on_cache: StepModel,
    rough: bool,
    length: int,
    block_size: int,
    own: KvGeometry | None,
) -> KvGeometry:
    kind, tokens = model.config.model_type, _tokens(model, length)
    reference = model.reference_logits(tokens)
    recorder = CallRecorder()
    everything = torch.arange(length, device=model.device)
    with nullcontext() if model.states is None else model.states.learn():
        packed = model.forward(tokens[0], everything, everything, recorder)
    geometry = _geometry(model, recorder)
    if block_size:
        geometry = with_groups(geometry, *_reaches(model, recorder), block_size)
    geometry = own or geometry
    compare_logits(packed, reference[0], limit_of(model), f"{kind} cannot be served: run packed")
    if model.kv_dtype != dtype_name(model.dtype):
        reference = rounded_logits(model, tokens, reference)
    cache = KvCache(geometry, _pages(geometry, tokens), _BLOCK_SIZE, model.device)
    chunked, of_eager = _run_chunked(on_cache, _Tables(cache, len(tokens)), backend(cache), tokens, reference)
    limit = _ROUGH if rough else limit_of(model, model.kv_dtype)
    compare_logits(chunked, of_eager, limit, f"{kind} cannot be served: run through the paged cache")
    return geometry


def rounded_logits(model: ReferenceModel, tokens: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return logits [N, T, vocab] on K and V rounded to the cache's type; refuse a type with too large an error."""
    everything, attention = torch.arange(tokens.shape[1], device=model.device), RoundedAttention(model.kv_dtype)
    rounded = torch.stack([model.forward(row, everything, everything, attention) for row in tokens])
    what = f"{model.config.model_type} cannot be served with K and V in {model.kv_dtype}: rounded to it"
    compare_logits(rounded.flatten(0, 1), reference.flatten(0, 1), _ROUNDED, what)
    return rounded


def _geometry(model: ReferenceModel, recorder: CallRecorder) -> KvGeometry:
    kind, layers = model.config.model_type, int(model.config.num_hidden_layers)
    called = [layer.layer for layer in recorder.layers]
    kinds = getattr(model.config, "layer_types", None) or ()
    others = frozenset() if model.states is None else model.states.layers
    attending = [layer for layer in range(layers) if layer not in others and kinds[layer : layer + 1] not in _NEITHER]
    if sorted(called) != sorted({*attending, *(layer for layer in called if layer in others)}):
        raise Unsupported(
            f"{kind} cannot be served: {len(set(called))} of its {layers} layers gave their attention to the cache"
            f" ({len(called)} calls); its attention is computed inside the model (ALiBi, or an older style of code)"
        )
    _check_windows(model, recorder)
    windows = [layer.window for layer in recorder.layers]
    widest = 0 if None in windows else max((window or 0 for window in windows), default=0)
    if widest >= context_limit(model.config):
        widest = 0  # such a window leaves nothing out
    called_with = zip(recorder.layers, recorder.shapes, strict=True)
    own = {layer.layer: shape for layer, shape in called_with if layer.source is None}
    return geometry_of(own, model.kv_dtype, widest)


def _reaches(model: ReferenceModel, recorder: CallRecorder) -> tuple[dict[int, Reach], dict[int, int]]:
    """Return how far back each layer sees, and whose K and V it reads where these are another layer's."""
    limit = context_limit(model.config)
    reaches = {layer.layer: reach_of(layer.window, layer.chunk, limit) for layer in recorder.layers}
    return reaches, {layer.layer: layer.source for layer in recorder.layers if layer.source is not None}


def _check_windows(model: ReferenceModel, recorder: CallRecorder) -> None:
    """Refuse a model whose masks have a window or chunks that its layers do not report: they would attend beyond."""
    config, kinds = model.config, getattr(model.config, "layer_types", None) or ()
    for layer in recorder.layers:
        kind, what = (
            kinds[layer.layer] if layer.layer < len(kinds) else None,
            f"{config.model_type}: layer {layer.layer}",
        )
        if kind in ("sliding_attention", "hybrid_sliding") and layer.window is None:
            raise Unsupported(f"{what} slides, but does not say its window")
        if kind == "chunked_attention" and layer.chunk is None:
            raise Unsupported(f"{what} attends in chunks, but does not say their size")
    window = getattr(config, "sliding_window", None) or 0
    slides = not kinds and 0 < window < context_limit(config)
    if slides and all(layer.window is None for layer in recorder.layers):
        raise Unsupported(
            f"{config.model_type} cannot be served: its configuration has a sliding_window of {window}, and no layer"
            " says that it slides; without sliding_window (null) it would attend to everything"
        )


class _Tables:
    """The blocks of the sequences, scattered over a cache: one table, or one of each group of layers."""

    def __init__(self, cache: KvCache, sequences: int) -> None:
        self._groups: Sequence[KvGroup] = cache.geometry.groups
        self._parts = page_layout(cache.geometry).parts if self._groups else ()
        self._pools = cache.pools
        order = np.random.default_rng(0).permutation(cache.num_blocks).astype(np.int32)
        shares = np.cumsum([group.pages for group in self._groups] or [1])
        blocks = cache.num_blocks // shares[-1]
        self._tables = [each.reshape(sequences, -1) for each in np.split(order, shares[:-1] * blocks)]

    def pack(self, start: Int32Array, length: Int32Array) -> PackedRows:
        """Lay out a row of each sequence, after overwriting what nobody reads any more."""
        if not self._groups:
            return pack_rows(start, length, self._tables[0], _BLOCK_SIZE)
        for group, table in zip(self._groups, self._tables, strict=True):
            for pages, position in zip(table, start.tolist(), strict=True):
                self._overwrite(pages[: group.pages * unread_blocks(group, position, _BLOCK_SIZE)])
        return pack_pages(start, length, self._tables, self._parts, _BLOCK_SIZE)

    def _overwrite(self, pages: Int32Array) -> None:
        for pool in self._pools if len(pages) else ():
            noise = 8 * torch.randn(pool.shape[0], len(pages), *pool.shape[2:])
            at = torch.from_numpy(pages).long().to(pool.device)
            pool.view(torch.uint8)[:, at] = noise.to(pool.device, pool.dtype).view(torch.uint8)


def _run_chunked(
    model: StepModel, tables: _Tables, attention: AttentionBackend, tokens: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all positions that the steps compute, [N, vocab], and those of `reference`."""
    ours, theirs = [], []
    places = np.array([2, 0], dtype=np.int32)
    if model.states is not None:
        model.states.reserve(3)
    for step in _steps(tokens.shape[1]):
        start, length = np.array(step, dtype=np.int32).T
        rows = tables.pack(start, length)
        *arrays, row, position = to_device([*attention_arrays(rows), rows.row_of_token, rows.positions], model.device)
        metadata = attention_metadata(rows, arrays)
        attention.begin(metadata)
        if model.states is not None:
            model.states.begin(metadata, places)
        keep = torch.arange(len(position), device=model.device)
        logits = model.forward(tokens[row, position], position.long(), keep, attention)
        ours.append(logits.clone())  # the next step may overwrite them
        theirs.append(reference[row, position])
    return torch.cat(ours), torch.cat(theirs)


def _steps(length: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Return, for each step, start and length of the two sequences.

    Two prefills, a long and a short one; a decode beside a long chunk; two decodes, one of them at the end.
    """
    long = length - 7
    return ((0, long), (0, 6)), ((long, 1), (6, long)), ((long + 1, 1), (length - 1, 1))


def limit_of(model: ReferenceModel, kv_dtype: str = "float32") -> Limit:
    """Return the limit on a cache of this type; kernels may round queries to it too."""
    return _EXACT if model.dtype == torch.float32 and kv_dtype == "float32" else _ROUGH


def compare_logits(ours: torch.Tensor, expected: torch.Tensor, limit: Limit, how: str) -> None:
    """Refuse logits [N, vocab] that differ from the expected ones by more than the limit."""
    centred = expected - expected.mean(dim=-1, keepdim=True)
    errors = (ours - expected).norm(dim=-1) / centred.norm(dim=-1).clamp_min(1e-6)
    error = float(errors.quantile(limit.share))
    if not error <= limit.tolerance:
        raise Unsupported(
            f"{how}, its logits differ from its own eager attention by {error:.2g}"
            f" (relative; at most {limit.tolerance:g} is allowed)"
        )
