"""Forbids tokens that would complete a bad word, on any device and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuworker.memory.devices import sent

_ANY = -1  # fills short words from the left


class BadWords:
    """W bad words of a batch of rows. A word forbids its last token after output that ends with its other tokens."""

    def __init__(self, words: Sequence[tuple[int, tuple[int, ...]]], prompt_tokens: Sequence[int]) -> None:
        """`words` are pairs of a row and its word; `prompt_tokens` are those of each row."""
        rest = max(len(word) for _, word in words) - 1
        before = np.full((len(words), rest), _ANY, dtype=np.int64)
        for place, (_, word) in enumerate(words):
            before[place, rest + 1 - len(word) :] = word[:-1]
        rows = np.array([row for row, _ in words], dtype=np.int64)
        last = np.array([word[-1] for _, word in words], dtype=np.int64)
        first = np.array([prompt_tokens[row] for row, _ in words], dtype=np.int64)  # where the output begins
        self._arrays: list[torch.Tensor] = list(map(torch.from_numpy, (before, rows, last, first)))

    def move(self, device: torch.device) -> None:
        self._arrays = [sent(each, device) for each in self._arrays]

    def forbid(
        self, logits: torch.Tensor, table: torch.Tensor, batch_index: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Forbid tokens in place. logits [S, vocab]; the tokens so far are table[batch_index[s], : positions[s]]."""
        before, rows, last, first = self._arrays
        count = torch.arange(-before.shape[1], 0, device=logits.device)
        places = positions.long()[rows][:, None] + count  # [W, rest]
        tokens = table[batch_index.long()[rows][:, None], places.clamp_min(0)]
        same = (tokens == before) & (places >= first[:, None])
        completes = (same | (before == _ANY)).all(dim=1)
        change = torch.where(completes, float("-inf"), 0.0).to(logits.dtype)
        logits.index_put_((rows, last), change, accumulate=True)
