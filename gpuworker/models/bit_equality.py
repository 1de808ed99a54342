"""The start-up test of `--deterministic`: are the logits of a position the same bits however steps are composed?

A sequence of random tokens is run whole and alone; then beside other rows, in chunks, and token by token, each on other
blocks. The test guards against surprises of a library or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.step_model import StepModel

_TOKENS, _BLOCK_SIZE = 96, 16
_BLOCKS = _TOKENS // _BLOCK_SIZE
_ROWS = 5
# How the first sequence is cut into chunks; the neighbours have as many, of other lengths.
_CUTS: Sequence[tuple[int, ...]] = ((33, 1, 30, 32), (7, 64, 1, 24), (1,) * _TOKENS)


def refuse_unequal_bits(model: StepModel, geometry: KvGeometry, backend: Callable[[KvCache], AttentionBackend]) -> None:
    """Raise Unsupported, with the place, when the bits of some logits depend on how steps are composed."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (_ROWS, _TOKENS), generator=generator).to(model.device)
    alone = _run(model, geometry, backend, tokens[:1], (_TOKENS,))
    for rows in (1, _ROWS):
        for cut in _CUTS:
            found = _run(model, geometry, backend, tokens[:rows], cut)
            different = (found != alone).any(dim=-1).nonzero()[:, 0]
            if len(different):
                raise Unsupported(
                    f"--deterministic cannot be kept: in chunks of {cut[:4]} beside {rows - 1} other rows the logits of"
                    f" {len(different)} of {_TOKENS} positions have other bits than alone, the first at {different[0]}"
                )


@torch.inference_mode()
def _run(
    model: StepModel,
    geometry: KvGeometry,
    backend: Callable[[KvCache], AttentionBackend],
    tokens: torch.Tensor,
    cut: tuple[int, ...],
) -> torch.Tensor:
    """Return the logits [T, vocab] of the first of sequences [rows, T]; the others go by the cut reversed."""
    rows, device = len(tokens), model.device
    attention = backend(KvCache(geometry, rows * _BLOCKS, _BLOCK_SIZE, device))
    table = np.random.default_rng(len(cut)).permutation(rows * _BLOCKS).astype(np.int32).reshape(rows, _BLOCKS)
    lengths = np.array([cut, *[cut[::-1]] * (rows - 1)], dtype=np.int32)  # [rows, steps]
    starts = np.cumsum(lengths, axis=1, dtype=np.int32) - lengths
    logits = []
    if model.states is not None:
        model.states.reserve(rows)
    for start, length in zip(starts.T, lengths.T, strict=True):
        # Decodes stand first, as attention requires. Among its kind the first sequence comes last, unlike when alone.
        order = np.array(sorted(range(rows), key=lambda row: (length[row] > 1, row == 0)))
        packed = pack_rows(start[order], length[order], table[order], _BLOCK_SIZE)
        positions, *tables = to_device([packed.positions, *attention_arrays(packed)], device)
        metadata = attention_metadata(packed, tables)
        attention.begin(metadata)
        if model.states is not None:
            model.states.begin(metadata, order)
        sequence = torch.from_numpy(order[packed.row_of_token]).to(device)
        keep = (sequence == 0).nonzero()[:, 0]
        token_ids = tokens[sequence, positions.long()]
        logits.append(model.forward(token_ids, positions.long(), keep, attention).clone())
    return torch.cat(logits)
