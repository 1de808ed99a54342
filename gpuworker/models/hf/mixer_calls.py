"""A call of a mixer: what its code sees as its cache, and the states behind that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from common.contracts.errors import EngineFailure

# The states of a mixer begin at multiples of so many bytes, so that they can be seen as numbers of any type.
_ALIGNED: Final = 16

Piece = tuple[str, int]
"""A state of a mixer: its kind, and its number among those of this kind."""

Sizes = dict[Piece, tuple[torch.Size, torch.dtype]]


class Refusal(EngineFailure):
    """A kernel does not take what a mixer hands to it. The test at load meets this, and the mixer runs in torch."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """States where they are kept, [places, ...], and the places where each row of a call finds and leaves its own."""

    kept: torch.Tensor
    before: torch.Tensor  # [B]
    after: torch.Tensor  # [B]


class MixerCall:
    """The cache that a mixer sees in one call, by the interface of transformers' `Cache`; it ignores layers' numbers.

    `places` are those whose states it gathers; None: the sequences begin. Of `stepped` kinds of states it hands
    out stand-ins: tensors of their shapes and types that take no memory. A kernel that gets one steps the states from
    `places` to `after`.
    """

    def __init__(
        self,
        kept: dict[Piece, torch.Tensor] | None,
        places: torch.Tensor | None,
        after: torch.Tensor | None = None,
        stepped: frozenset[str] = frozenset(),
    ) -> None:
        self._kept, self._places, self._after, self._stepped = kept, places, after, stepped
        self._lent: dict[Piece, torch.Tensor] = {}
        self._taken: set[Piece] = set()
        self.made: dict[Piece, torch.Tensor] = {}

    @property
    def layers(self) -> _Layers:
        """The call as the layers of a cache, where older transformers (5.17) reads states."""
        return _Layers(self)

    def put_back(self, kept: dict[Piece, torch.Tensor], places: torch.Tensor) -> None:
        """Write the states that the mixer made, or changed where they were, to the places.

        Raises Refusal if it read a stand-in and no kernel stepped the state.
        """
        if missing := self._lent.keys() - self._taken:
            raise Refusal(f"its code reads {' and '.join(sorted({kind for kind, _ in missing}))} states itself")
        for piece, state in self.made.items():
            kept[piece].index_copy_(0, places, state.to(kept[piece].dtype))

    def take_rows(self, stand_in: torch.Tensor) -> StateRows:
        """Return the states that a stand-in stands for; they count as stepped. Raises Refusal for another tensor."""
        piece = next((piece for piece, lent in self._lent.items() if lent is stand_in), None)
        if piece is None or self._kept is None or self._places is None or self._after is None:
            raise Refusal("its code changes a state before it is stepped")
        self._taken.add(piece)
        return StateRows(self._kept[piece], self._places, self._after)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._places is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Append columns [B, channels, n]; return all that there are, and keep the last ones, as wide as the kernel."""
        piece = ("conv", state_idx)
        before, width = self._get(piece), conv_kernel_size or conv_states.shape[-1]
        columns = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        if (missing := width - columns.shape[-1]) > 0:
            columns = nn.functional.pad(columns, (missing, 0))
        self.made[piece] = columns[..., -width:]
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        if ("recurrent", state_idx) not in self._taken:
            self.made["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.made["linear", 0] = linear_cache

    def _get(self, piece: Piece) -> torch.Tensor | None:
        """Return the rows' states of a piece; a mixer may change them in place."""
        if self._places is None or self._kept is None:
            return None
        if piece[0] in self._stepped:
            if piece not in self._lent:
                self._lent[piece] = self._kept[piece][:1].expand(len(self._places), *self._kept[piece].shape[1:])
            return self._lent[piece]
        if piece not in self.made:
            self.made[piece] = self._kept[piece].index_select(0, self._places)
        return self.made[piece]


class _Layers:
    """Whatever the number of a layer, the states are those of one call."""

    record_past = False

    def __init__(self, call: MixerCall) -> None:
        self.conv_states = _Numbered(partial(call.get_conv_state, 0))
        self.recurrent_states = _Numbered(partial(call.get_recurrent_state, 0))

    def __getitem__(self, layer_idx: int) -> _Layers:
        return self


class _Numbered:
    """States by their number."""

    def __init__(self, get: Callable[[int], torch.Tensor | None]) -> None:
        self._get = get

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._get(state_idx)


def sizes_of(states: Mapping[Piece, torch.Tensor]) -> Sizes:
    return {piece: (state.shape[1:], state.dtype) for piece, state in states.items()}


def pieces_in(memory: torch.Tensor, states: Mapping[Piece, torch.Tensor]) -> dict[Piece, torch.Tensor]:
    """Return bytes [places, bytes] as states like these, [places, ...], one piece after the other."""
    found, first = dict[Piece, torch.Tensor](), 0
    for piece, each in states.items():
        own = memory[:, first : first + each.nbytes].view(each.dtype)
        found[piece] = own.view(len(memory), *each.shape[1:])
        first += aligned_bytes(each)
    return found


def aligned_bytes(state: torch.Tensor) -> int:
    return -(-state.nbytes // _ALIGNED) * _ALIGNED


def cut(value: Any, at: torch.Tensor | None, shape: tuple[int, int], tokens: int) -> Any:
    """Return the tokens `at`, as [*shape, ...], of what has an entry for each token, [1, T, ...]; the rest as it is.

    None stands for all tokens.
    """
    if isinstance(value, tuple):
        return tuple(cut(each, at, shape, tokens) for each in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, tokens):
        return value
    found = value[0] if at is None else value[0].index_select(0, at)
    return found.reshape(*shape, *value.shape[2:])
