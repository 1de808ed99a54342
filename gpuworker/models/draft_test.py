"""The start-up test of drafts: do states follow the drafts that were right, and no other ones?

Two sequences of random tokens run through a small paged cache, with drafts of which all, some or none are right. Steps
with drafts come before steps without, and before steps in which a sequence has no row. The model is refused unless the
logits behind right tokens are those of its own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_pages, pack_rows, to_device
from gpuworker.memory.devices import dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import page_layout
from gpuworker.models.self_test import ReferenceModel, compare_logits, limit_of, rounded_logits
from gpuworker.models.step_model import RecurrentStates

_BLOCK_SIZE, _LENGTH, _DRAFTS = 4, 16, 5
_PLACES = (2, 0)  # of the two sequences


class _Turn(NamedTuple):
    """The rows of a sequence in a step: each but the first is of a draft, and so many of all are right."""

    sequence: int
    start: int
    lengths: tuple[int, ...]
    right: int = 1


_STEPS = (
    (_Turn(0, 0, (6,)), _Turn(1, 0, (4,))),
    (_Turn(0, 6, (1, 1, 1, 1), 3), _Turn(1, 4, (1, 1, 1), 1)),
    (_Turn(1, 5, (1, 1, 1), 3),),
    (_Turn(0, 9, (1,)), _Turn(1, 8, (1, 1), 1)),
    (_Turn(1, 9, (1,)), _Turn(0, 10, (6,))),
    (_Turn(1, 10, (6,)),),
)


def refuse_wrong_states(
    model: ReferenceModel, backend: Callable[[KvCache], AttentionBackend], geometry: KvGeometry
) -> None:
    """Raise Unsupported, with the reason, when drafts change the logits of a model; one without states passes.

    Call behind the self-test, which gives the geometry.
    """
    if model.states is None:
        return
    try:
        _run(model, model.states, backend, geometry)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"{model.config.model_type} fails the test of its states behind drafts: {error!r}") from error


def _run(
    model: ReferenceModel,
    states: RecurrentStates,
    backend: Callable[[KvCache], AttentionBackend],
    geometry: KvGeometry,
) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(model.vocab_size, (2, _LENGTH), generator=generator).to(model.device)
    reference = model.reference_logits(tokens)
    if model.kv_dtype != dtype_name(model.dtype):
        reference = rounded_logits(model, tokens, reference)
    trial, found, wanted = _Trial(model, states, backend, geometry, tokens), [], []
    accepted: list[tuple[int, int]] = []
    for turns in _STEPS:
        for place, drafts in accepted:
            states.accept(place, drafts)
        for turn, logits in zip(turns, trial.step(turns), strict=True):
            end = turn.start + sum(turn.lengths[: turn.right])
            found.append(logits[: end - turn.start])
            wanted.append(reference[turn.sequence, turn.start : end])
        accepted = [(_PLACES[turn.sequence], turn.right - 1) for turn in turns if turn.right > 1]
    what = f"{model.config.model_type} cannot be served with drafts: behind right and wrong ones"
    compare_logits(torch.cat(found), torch.cat(wanted), limit_of(model, model.kv_dtype), what)


class _Trial:
    """The two sequences on scattered blocks, or pages of groups of layers."""

    def __init__(
        self,
        model: ReferenceModel,
        states: RecurrentStates,
        backend: Callable[[KvCache], AttentionBackend],
        geometry: KvGeometry,
        tokens: torch.Tensor,
    ) -> None:
        self._model, self._states, self._tokens = model, states, tokens
        states.reserve(max(_PLACES) + 1, _DRAFTS)
        pages = [group.pages for group in geometry.groups] or [1]
        each = len(tokens) * _LENGTH // _BLOCK_SIZE
        cache = KvCache(geometry, each * sum(pages), _BLOCK_SIZE, model.device)
        self._attention, self._parts = backend(cache), page_layout(geometry).parts if geometry.groups else ()
        order = np.random.default_rng(0).permutation(cache.num_blocks).astype(np.int32)
        self._tables = [of.reshape(len(tokens), -1) for of in np.split(order, each * np.cumsum(pages)[:-1])]

    def step(self, turns: tuple[_Turn, ...]) -> list[torch.Tensor]:
        """Compute the rows of some sequences; return the logits of each, [N, vocab]. Wrong drafts are other tokens."""
        rows = [(turn, at) for turn in turns for at in range(len(turn.lengths))]
        of = np.array([turn.sequence for turn, _ in rows])
        start = np.array([turn.start + sum(turn.lengths[:at]) for turn, at in rows], dtype=np.int32)
        length = np.array([turn.lengths[at] for turn, at in rows], dtype=np.int32)
        wrong = torch.tensor([at >= turn.right for turn, at in rows], device=self._model.device)
        tables = [table[of] for table in self._tables]
        if self._parts:
            packed = pack_pages(start, length, tables, self._parts, _BLOCK_SIZE)
        else:
            packed = pack_rows(start, length, tables[0], _BLOCK_SIZE)
        arrays = [*attention_arrays(packed), packed.row_of_token, packed.positions]
        *arrays_of_attention, row, position = to_device(arrays, self._model.device)
        metadata = attention_metadata(packed, arrays_of_attention)
        self._attention.begin(metadata)
        self._states.begin(metadata, np.array(_PLACES, dtype=np.int32)[of])
        known = self._tokens[torch.from_numpy(of).to(position.device)[row.long()], position.long()]
        token_ids = (known + wrong[row.long()].long()) % self._model.vocab_size
        keep = torch.arange(len(position), device=self._model.device)
        logits = self._model.forward(token_ids, position.long(), keep, self._attention).clone()
        return list(logits.split([sum(turn.lengths) for turn in turns]))
