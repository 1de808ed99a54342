"""The start-up test of checkpoints: does a sequence that begins behind another one's states compute what it should?

Two sequences of the same tokens run through a small paged cache. The states of the first are saved behind two blocks,
and loaded at the place of the second, which shares these blocks of K and V. Both then go on with the other tokens, each
cut into other steps. The model is refused unless the logits of both are those of its own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend, Int32Array
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_pages, to_device
from gpuworker.memory.devices import dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import checkpoint_pages, page_layout, state_group, with_states
from gpuworker.memory.state_store import StateStore
from gpuworker.models.self_test import ReferenceModel, compare_logits, limit_of, rounded_logits
from gpuworker.models.step_model import RecurrentStates, StepModel

_BLOCK_SIZE, _SHARED, _BLOCKS = 4, 2, 4
_LENGTH = _BLOCK_SIZE * _BLOCKS
_FIRST, _SECOND, _PLACES = 2, 0, 3


def with_checkpoints(
    model: ReferenceModel,
    backend: Callable[[KvCache], AttentionBackend],
    geometry: KvGeometry,
    block_size: int,
    other: StepModel | None = None,
) -> KvGeometry:
    """Return the geometry with a group for checkpoints of the model's states, tested; unchanged where it has none.

    `other` is a model of the same weights that runs instead and is compared with `model`, as in the self-test, behind
    which this is called. Raises Unsupported, with the reason, when sequences do not go on from checkpoints.
    """
    on_cache = other or model
    if on_cache.states is None:
        return geometry
    found = with_states(geometry, on_cache.states.layers, on_cache.states.bytes_a_sequence, block_size)
    if state_group(found.groups) is None:
        return geometry
    try:
        _run(model, on_cache, on_cache.states, backend, found)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"{model.config.model_type} fails the test of its checkpoints: {error!r}") from error
    return found


def follow_checkpoints(
    model: StepModel, backend: Callable[[KvCache], AttentionBackend], geometry: KvGeometry, block_size: int
) -> None:
    """Run the steps that `with_checkpoints` runs, at another rank than the one that compares."""
    if model.states is None:
        return
    found = with_states(geometry, model.states.layers, model.states.bytes_a_sequence, block_size)
    if state_group(found.groups) is not None:
        _logits(model, model.states, backend, found, _tokens(model))


def _tokens(model: StepModel) -> torch.Tensor:
    return torch.randint(model.vocab_size, (_LENGTH,), generator=torch.Generator().manual_seed(1)).to(model.device)


def _run(
    model: ReferenceModel,
    on_cache: StepModel,
    states: RecurrentStates,
    backend: Callable[[KvCache], AttentionBackend],
    geometry: KvGeometry,
) -> None:
    tokens = _tokens(model)
    reference = model.reference_logits(tokens[None])
    if model.kv_dtype != dtype_name(model.dtype):
        reference = rounded_logits(model, tokens[None], reference)
    found, at = _logits(on_cache, states, backend, geometry, tokens)
    wanted = torch.cat([reference[0, each.start : each.stop] for each in at])
    what = f"{model.config.model_type} cannot be served: run from a checkpoint of its states"
    compare_logits(found, wanted, limit_of(model, model.kv_dtype), what)


def _logits(
    model: StepModel,
    states: RecurrentStates,
    backend: Callable[[KvCache], AttentionBackend],
    geometry: KvGeometry,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, Sequence[range]]:
    """Return the logits [N, vocab] of what goes on from a checkpoint, and of which positions they are."""
    trial = _Trial(model, states, backend, geometry, tokens)
    shared, found = _BLOCK_SIZE * _SHARED, list[torch.Tensor]()
    trial.step({_FIRST: (0, 3)})
    trial.step({_FIRST: (3, shared)})
    trial.save(_FIRST)
    found.append(trial.step({_FIRST: (shared, shared + 1)}))  # its states are no longer those that were saved
    trial.load(_SECOND)
    found.append(trial.step({_SECOND: (shared, _LENGTH - 2)}))
    at = [range(shared, shared + 1), range(shared, _LENGTH - 2)]
    for position in range(_LENGTH - 2, _LENGTH):
        first = position - _LENGTH + 2 + shared + 1
        at += [range(first, first + 1), range(position, position + 1)]
        found.append(trial.step({_FIRST: (first, first + 1), _SECOND: (position, position + 1)}))
    return torch.cat(found), at


class _Trial:
    """Sequences of the same tokens, which share their first blocks, on scattered pages."""

    def __init__(
        self,
        model: StepModel,
        states: RecurrentStates,
        backend: Callable[[KvCache], AttentionBackend],
        geometry: KvGeometry,
        tokens: torch.Tensor,
    ) -> None:
        *groups, last = geometry.groups
        pages = checkpoint_pages(geometry, states.bytes_a_sequence, _BLOCK_SIZE)
        geometry = replace(geometry, groups=(*groups, replace(last, pages=pages)))
        self._model, self._states, self._tokens = model, states, tokens
        states.reserve(_PLACES)
        count = sum(group.pages for group in groups) * _PLACES * _BLOCKS + pages
        cache = KvCache(geometry, count, _BLOCK_SIZE, model.device)
        self._attention, self._store, self._parts = backend(cache), StateStore(cache), page_layout(geometry).parts
        order = np.random.default_rng(0).permutation(count).astype(np.int32)
        self._pages, rest = order[:pages].tolist(), order[pages:]
        cuts = np.cumsum([group.pages * _PLACES * _BLOCKS for group in groups[:-1]])
        self._tables = [each.reshape(_PLACES, -1) for each in np.split(rest, cuts)]
        for group, table in zip(groups, self._tables, strict=True):
            table[_SECOND, : group.pages * _SHARED] = table[_FIRST, : group.pages * _SHARED]

    def save(self, place: int) -> None:
        self._store.save(self._states.kept[place], self._pages)

    def load(self, place: int) -> None:
        self._store.load(self._pages, self._states.kept[place])

    def step(self, rows: dict[int, tuple[int, int]]) -> torch.Tensor:
        """Compute positions from one to another of some places; return their logits, [N, vocab], one row behind the
        other."""
        places = np.array(list(rows), dtype=np.int32)
        start, end = np.array(list(rows.values()), dtype=np.int32).T
        packed = pack_pages(start, end - start, self._of(places), self._parts, _BLOCK_SIZE)
        *arrays, position = to_device([*attention_arrays(packed), packed.positions], self._model.device)
        metadata = attention_metadata(packed, arrays)
        self._attention.begin(metadata)
        self._states.begin(metadata, places)
        keep = torch.arange(len(position), device=self._model.device)
        at = position.long()
        return self._model.forward(self._tokens[at], at, keep, self._attention).clone()

    def _of(self, places: Int32Array) -> list[Int32Array]:
        return [table[places] for table in self._tables]
