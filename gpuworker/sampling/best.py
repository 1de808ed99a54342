"""The largest values of a row, in an order that depends on the row alone."""

from __future__ import annotations

import torch


def best_tokens(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest `count` of float32 values [n, vocab] and their ids, of equal ones the lowest ids first.

    By itself topk orders equal values in a way that depends on `count`, which is that of the batch. Keys of 64 bits are
    all different: above, the value as an integer of the same order; below, the id, counted down.
    """
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = values.shape[1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=values.device)
    ids = last - (keys.topk(count, dim=-1)[0] & 0xFFFFFFFF)
    return values.gather(1, ids), ids
