"""The ports through which the runner computes logits or hidden states, whichever code runs the model."""

from __future__ import annotations

from typing import Protocol

import torch

from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, Int32Array


class RecurrentStates(Protocol):
    """The states that some layers of a model keep in place of K and V: each running sequence has a place for them."""

    @property
    def bytes_a_sequence(self) -> int: ...

    @property
    def layers(self) -> frozenset[int]:
        """The layers that keep a state, and may attend beside it."""
        ...

    @property
    def layout(self) -> str:
        """What the bytes of a sequence's states are, in words: equal words, equal meaning."""
        ...

    @property
    def kept(self) -> torch.Tensor:
        """The states as bytes, a row a place and a draft, [places + drafts, bytes_a_sequence]; `reserve` makes it."""
        ...

    def reserve(self, places: int, drafts: int = 0) -> None:
        """Allocate the states of so many sequences, and of drafts in one step, in place of those before."""
        ...

    def begin(self, step: AttentionMetadata, places: Int32Array) -> None:
        """Announce the step of the next forward, whose row r is of the sequence at places[r].

        A row from position 0 on begins without a state, any other goes on with what its last step left. A row behind
        one of the same place is of a draft: it goes on from that one, and the place stays as it is.
        """
        ...

    def accept(self, place: int, drafts: int) -> None:
        """Make the states behind so many drafts, one at least, of the last step those of their place."""
        ...


class StepModel(Protocol):
    """A causal language model over a paged cache. Used by one thread."""

    @property
    def states(self) -> RecurrentStates | None:
        """What its layers keep beside K and V; None where they keep nothing else. `begin` comes before each step."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: AttentionBackend, /
    ) -> torch.Tensor:
        """Return float32 logits [S, vocab] of the tokens that `keep` [S] indexes; the caller may overwrite them.

        token_ids and positions are [T] int64, the rows of a step one after the other; `sink` attends; its `begin`
        was called for the step.
        """
        ...


class EmbeddingModel(StepModel, Protocol):
    """A step model whose last hidden states can be pooled."""

    @property
    def hidden_size(self) -> int: ...

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: AttentionBackend, /
    ) -> torch.Tensor:
        """Return float32 [S, hidden_size] after the last norm, where `forward` returns the logits of it."""
        ...
