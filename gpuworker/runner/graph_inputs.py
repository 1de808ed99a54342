"""The inputs of captured steps: tensors at fixed addresses, filled by one transfer from pinned memory a step.

A step of R rows runs as a step of a captured size. The rows beyond R are padding. They have no context and no slot to
write, and their samples go to a spare place beside the token table. The memory has the same layout on the device and on
the host. First come the fields of every row, for the largest number of rows. Then come the block tables of this step's
rows, as wide as this step needs. So a transfer is a few kilobytes, whatever the longest context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.attention.interface import AttentionMetadata, DeviceTables, Int32Array
from gpuworker.attention.step_inputs import StagedStep
from gpuworker.memory.kv_cache import KvCache

_BUFFERS = 2  # at most two steps are unfinished, so the second last transfer is over when the next begins
_PER_ROW = 8  # words of 32 bits in RowFields


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture, rising: 1, 2, 4, then multiples of 8, from 64 on of 16, and the most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 16, 16)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def padded_size(rows: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest of the rising `sizes` that holds so many rows; None when none does."""
    return next((size for size in sizes if size >= rows), None)


@dataclass(frozen=True, slots=True)
class RowFields:
    """Views of one piece of memory, [rows] each."""

    uniform: torch.Tensor  # float64, the number in [0, 1) at which a row inverts its distribution
    temperature: torch.Tensor  # float32; 0: the most likely token
    positions: torch.Tensor  # int32, like the rest
    take: torch.Tensor  # the place of its token in the token table
    put: torch.Tensor  # the place for its sampled token
    context_len: torch.Tensor
    slot_mapping: torch.Tensor

    @staticmethod
    def of(words: torch.Tensor, rows: int) -> RowFields:
        """Return views of int32 words [8 * rows or more]."""
        uniform, temperature, *rest = torch.split(words[: _PER_ROW * rows], [2 * rows, *[rows] * (_PER_ROW - 2)])
        return RowFields(uniform.view(torch.float64), temperature.view(torch.float32), *rest)


class _HostBuffer:
    """Pinned words, the views that fill them, and the event after their last transfer."""

    def __init__(self, words: int, rows: int, on_cuda: bool) -> None:
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self.fields = {name: view.numpy() for name, view in _views(RowFields.of(self.words, rows))}
        self.tables: Int32Array = self.words[_PER_ROW * rows :].numpy()
        self.sent = torch.cuda.Event() if on_cuda else None


class GraphInputs:
    """The inputs of all captured sizes: `max_rows` rows of `max_model_len` positions, for the runner's thread.

    `spare_place` is a place of the token table that belongs to no sequence.
    """

    def __init__(self, max_rows: int, cache: KvCache, max_model_len: int, spare_place: int) -> None:
        device, max_blocks = cache.keys.device, -(-max_model_len // cache.block_size)
        words, on_cuda = (_PER_ROW + max_blocks) * max_rows, cache.keys.is_cuda
        self._rows, self._max_context, self._last_block = max_rows, max_model_len, cache.num_blocks - 1
        self._padding = {"put": spare_place, "slot_mapping": -1}
        self._landing = torch.zeros(words, dtype=torch.int32, device=device)
        self._fields = RowFields.of(self._landing, max_rows)
        self._block_table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._buffers = [_HostBuffer(words, max_rows, on_cuda) for _ in range(_BUFFERS)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs on the device."""
        return 4 * (self._landing.numel() + self._block_table.numel() + self._query_start.numel())

    def rows(self, size: int) -> RowFields:
        """Return the fields that the graph of this size reads of each row."""
        return RowFields(*(view[:size] for _, view in _views(self._fields)))

    def rehearsals(self, size: int) -> Iterator[AttentionMetadata]:
        """Fill the inputs with one step of each kind that attention may plan in its own way, and yield it.

        Rows without context; one row of the longest, whose work is cut; the longest all on the same blocks. No row
        writes into the cache, and their samples go to the spare place.
        """
        width = self._block_table.shape[1]
        none = np.zeros(size, dtype=np.int32)
        one, all_rows = (np.where(np.arange(size) < rows, self._max_context, 0).astype(np.int32) for rows in (1, size))
        same = np.tile(np.minimum(np.arange(width, dtype=np.int32), self._last_block), (size, 1))
        for context_len, table in ((none, same[:, :1]), (one, same), (all_rows, same)):
            yield self._fill(size, {"context_len": context_len}, table)

    def fill(
        self,
        size: int,
        staged: StagedStep,
        uniform: npt.NDArray[np.float64] | None = None,
        temperature: npt.NDArray[np.float32] | None = None,
    ) -> AttentionMetadata:
        """Fill the inputs with a step of decodes that all sample, padded to `size` rows, and return it for attention.

        uniform and temperature [R] are of rows that sample at random. The transfer is queued after the running work.
        """
        rows, first = staged.rows, staged.batch_index.astype(np.int64) * staged.table_width
        fields: dict[str, npt.NDArray[np.generic] | None] = {
            "uniform": uniform,
            "temperature": temperature,
            "positions": rows.positions,
            "take": first + rows.positions,
            "put": first + rows.context_len,
            "context_len": rows.context_len,
            "slot_mapping": rows.slot_mapping,
        }
        return self._fill(size, fields, rows.block_table)

    def _fill(
        self, size: int, fields: Mapping[str, npt.NDArray[np.generic] | None], block_table: Int32Array
    ) -> AttentionMetadata:
        """Fill the inputs, with padding for what is absent, and send them; block_table [R, width]."""
        buffer = self._buffers[0]
        self._buffers.reverse()
        if buffer.sent is not None:
            buffer.sent.synchronize()
        count, width = block_table.shape
        for name, field in buffer.fields.items():
            field[:size] = self._padding.get(name, 0)
            if (values := fields.get(name)) is not None:
                field[:count] = values
        table = buffer.tables[: size * width].reshape(size, width)
        table[:count], table[count:] = block_table, 0
        self._send(buffer, size, width)
        # Attention plans from the host arrays now; the buffer is written again only two steps later.
        on_device = self.rows(size)
        return AttentionMetadata(
            num_decodes=size,
            query_start=np.arange(size + 1, dtype=np.int32),
            context_len=buffer.fields["context_len"][:size],
            block_table=table,
            slot_mapping=buffer.fields["slot_mapping"][:size],
            device=DeviceTables(
                self._query_start[: size + 1],
                on_device.context_len,
                self._block_table[:size],
                on_device.slot_mapping,
            ),
        )

    def _send(self, buffer: _HostBuffer, size: int, width: int) -> None:
        """Transfer the filled inputs: fields of rows to where graphs read them, block tables to their wide table."""
        begin = _PER_ROW * self._rows
        end = begin + size * width
        self._landing[:end].copy_(buffer.words[:end], non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record()
        self._block_table[:size, :width].copy_(self._landing[begin:end].view(size, width))


def _views(fields: RowFields) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(fields, name)) for name in RowFields.__slots__]
