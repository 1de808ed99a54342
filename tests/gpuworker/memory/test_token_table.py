"""The token table: what is written, drawn into it, and taken from it."""

from __future__ import annotations

import torch

from gpuworker.memory.token_table import TokenTable


def table() -> TokenTable:
    made = TokenTable(2, 4, torch.device("cpu"))
    made.write(1, [7, 8, 9])
    return made


def test_an_entry_is_at_batch_index_times_width_plus_position() -> None:
    assert table().take(torch.tensor([4, 6, 0])).tolist() == [7, 9, 0]


def test_what_is_put_is_taken_by_the_next_step() -> None:
    made = table()
    made.put(torch.tensor([7, 2]), torch.tensor([5, 6]))
    assert made.take(torch.tensor([2, 7])).tolist() == [6, 5]
    assert made.tensor.tolist() == [[0, 0, 6, 0], [7, 8, 9, 5]]


def test_the_spare_entry_belongs_to_no_sequence() -> None:
    made = table()
    before = made.tensor.clone()
    made.put(torch.tensor([made.spare]), torch.tensor([3]))
    assert torch.equal(made.tensor, before)
