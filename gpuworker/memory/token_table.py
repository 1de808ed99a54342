"""The tokens of every sequence in the batch, on the device. A step reads here what the previous step sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.memory.devices import sent


class TokenTable:
    """One row of `width` tokens for each batch index; a place is batch_index * width + position.

    On a CPU numpy does the work: on so few numbers its calls are shorter than torch's. They also keep the GIL, which
    another thread would hold until its own work is done.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        self.width = width
        self.spare = max_num_seqs * width  # a place of no sequence, for the samples of padding rows
        self.flat = torch.zeros(max_num_seqs * width + 1, dtype=torch.int32, device=device)
        self.tensor = self.flat[:-1].view(max_num_seqs, width)  # for readers of whole rows
        self._array: npt.NDArray[np.int32] | None = self.flat.numpy() if device.type == "cpu" else None

    def write(self, batch_index: int, tokens: Sequence[int] | npt.NDArray[np.int32], first: int = 0) -> None:
        """Set the tokens of a row from position `first` on."""
        known = torch.from_numpy(np.asarray(tokens, dtype=np.int32))
        self.tensor[batch_index, first : first + len(known)].copy_(sent(known, self.flat.device))

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens at places [T] int64 as [T] int64."""
        if self._array is None:
            return self.flat[places].long()
        return torch.from_numpy(self._array[places.numpy()].astype(np.int64))

    def put(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Set places [S] int64 to tokens [S] int64."""
        if self._array is None:
            self.flat[places] = tokens.int()
        else:
            self._array[places.numpy()] = tokens.numpy()
