"""Index keys of layers that attend by index, and the order in which a step's tokens choose their positions.

Such a layer keeps, beside K and V, one short key of each token. Its indexer scores these keys, and attention keeps the
best positions (DeepSeek-V3.2, "lightning indexer"). Index keys lie in a pool of their own, on the blocks and slots of
K and V, in the type that the model gives them.

An indexer writes the keys of its tokens and scores in one call. A row may read what another row of the step writes: at
positions before those that it computes itself. So calls go by the position of their first token, from the lowest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from gpuworker.attention.interface import AttentionMetadata, Int32Array
from gpuworker.memory.kv_cache import KvCache

MAX_INDEX_SCORES: Final = 16 << 20
"""Scores of a call, (token, head of the indexer, position), or numbers of the keys of its rows: 64 MB in float32."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Tokens that choose in one call: L of one row, or one of each of B rows; they see `context` positions at most."""

    tokens: torch.Tensor  # [B * L], index into the step's tokens
    rows: torch.Tensor  # [B]
    positions: torch.Tensor  # [B, L]
    context: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.shape[0], self.positions.shape[1]


class IndexStore(Protocol):
    """Keeps index keys. `layer` is a layer's number in the model."""

    def parts(self, heads: int, size: int) -> Sequence[IndexPart]:
        """Return the calls of a step in their order, for an indexer of so many heads and keys of this size."""
        ...

    def exchange(self, layer: int, part: IndexPart, new: torch.Tensor) -> torch.Tensor:
        """Write the keys [B, L, d] of a part's tokens; return those of the positions before its context's end.

        The result is [B, context, d]; what a row has behind its last token is any number.
        """
        ...


class PagedIndexKeys:
    """Those of a cache. Implements `IndexStore`; `begin` announces a step."""

    def __init__(self, cache: KvCache, layers: Sequence[Sequence[int]]) -> None:
        """`layers` has, for each part of the cache, the numbers of its layers in the model."""
        self._block_size = cache.block_size
        self._pools = {
            number: part.index_keys[place]
            for part, numbers in zip(cache.parts, layers, strict=True)
            if part.index_keys is not None
            for place, number in enumerate(numbers)
        }

    def begin(self, step: AttentionMetadata) -> None:
        self._step = step
        self._slots = step.device.slot_mapping.long()
        self._parts: dict[tuple[int, int], Sequence[IndexPart]] = {}

    def parts(self, heads: int, size: int) -> Sequence[IndexPart]:
        if (heads, size) not in self._parts:
            step, device = self._step, self._slots.device
            self._parts[heads, size] = _parts(step.query_start, step.context_len, heads, size, device)
        return self._parts[heads, size]

    def exchange(self, layer: int, part: IndexPart, new: torch.Tensor) -> torch.Tensor:
        pool = self._pools[layer]  # [blocks, block_size, d]
        pool.flatten(0, 1).index_copy_(0, self._slots[part.tokens], new.flatten(0, 1))
        blocks = -(-part.context // self._block_size)
        table = self._step.device.block_table[part.rows, :blocks]
        found = pool.index_select(0, table.flatten().long())
        return found.view(len(part.rows), -1, pool.shape[-1])[:, : part.context]


class PackedIndexKeys:
    """Those of one whole sequence that is in no cache. Implements `IndexStore`, for one layer."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._ends, self._device = np.array([tokens], dtype=np.int32), device
        self._kept: list[torch.Tensor] = []

    def parts(self, heads: int, size: int) -> Sequence[IndexPart]:
        start = np.concatenate((np.zeros(1, dtype=np.int32), self._ends))
        return _parts(start, self._ends, heads, size, self._device)

    def exchange(self, layer: int, part: IndexPart, new: torch.Tensor) -> torch.Tensor:
        self._kept.append(new)
        return torch.cat(self._kept, dim=1)


@dataclass(frozen=True, slots=True)
class _Piece:
    position: int  # of its first token
    row: int
    token: int
    count: int


def _parts(
    query_start: Int32Array, context_len: Int32Array, heads: int, size: int, device: torch.device
) -> list[IndexPart]:
    pieces: list[_Piece] = []
    for row, context in enumerate(context_len.tolist()):
        first, last = int(query_start[row]), int(query_start[row + 1])
        at_once = max(1, MAX_INDEX_SCORES // (heads * context))
        pieces += [
            _Piece(context - (last - token), row, token, min(at_once, last - token))
            for token in range(first, last, at_once)
        ]
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.position):
        if groups and _may_join(groups[-1], piece, max(heads, size)):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [_part(group, device) for group in groups]


def _may_join(group: Sequence[_Piece], piece: _Piece, width: int) -> bool:
    """Return whether a piece may be called with those of lower positions: tokens of other rows, of like contexts.

    `width` counts the scores, or the numbers of a key, of each position.
    """
    if piece.count > 1 or group[-1].count > 1 or any(each.row == piece.row for each in group):
        return False
    fits = (len(group) + 1) * width * (piece.position + 1) <= MAX_INDEX_SCORES
    return fits and piece.position < 2 * (group[0].position + 1)  # at most half of what it gathers is padding


def _part(group: Sequence[_Piece], device: torch.device) -> IndexPart:
    count = group[0].count
    tokens, positions = (
        np.array(first, dtype=np.int64)[:, None] + np.arange(count)
        for first in ([piece.token for piece in group], [piece.position for piece in group])
    )
    at, rows, seen = (
        torch.from_numpy(each).to(device)
        for each in (tokens.ravel(), np.array([piece.row for piece in group], dtype=np.int64), positions)
    )
    return IndexPart(at, rows, seen, group[-1].position + count)
