"""The test at load that chooses kernels: do they compute, in one mixer, what transformers' functions compute?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch

from gpuworker.models.hf.mixer_calls import MixerCall, Piece, Sizes, aligned_bytes, cut, pieces_in, sizes_of
from gpuworker.models.hf.mixer_kernels import fla_chunks, kernel_errors, with_functions

# Where the sequence is cut on which fla-core is tried: its chunks have 64 tokens, and all but the first part go on.
_CHUNKED: Final = (0, 70, 200, 203)

Called = Callable[[Callable[..., Any], torch.Tensor, dict[str, Any], MixerCall], Any]


class KernelTrial:
    """Compares kernels with transformers' functions in one mixer, on one sequence [1, T, hidden].

    Where more tokens are wanted, it begins again.
    """

    def __init__(
        self,
        called: Called,
        functions: Mapping[str, Callable[..., Any]],
        module: Any,
        hidden: torch.Tensor,
        options: dict[str, Any],
        limit: float,
    ) -> None:
        """`called` calls a forward with a cache, `functions` step states of that call; `limit` is that of errors."""
        self._called, self._functions, self._module, self._limit = called, functions, module, limit
        self._hidden, self._options, self._plain = hidden, options, with_functions(module, {})
        self.sizes: Sizes = {}
        """Those of the states with which kernels were tried."""

    def why_not_stepped(self, kinds: frozenset[str]) -> str:
        """Return why kernels do not step these kinds of states; "" where they do."""
        try:
            return self._why_not_stepped(kinds)
        except kernel_errors() as error:
            return _in_words(error)

    def why_not_chunked(self) -> str:
        """Return why fla-core does not compute rows of several tokens; "" where it does."""
        try:
            found, left = self.in_parts(with_functions(self._module, fla_chunks()), _CHUNKED)
        except ModuleNotFoundError:
            return "fla-core is not installed, which pip install 'quire-llm[linear]' adds"
        except kernel_errors() as error:
            return _in_words(error)
        wanted, states = self.in_parts(self._plain, _CHUNKED)
        if not self._is_equal(found, wanted):
            return "results of fla-core differ"
        same = all(self._is_equal(left[piece], states[piece]) for piece in states)
        return "" if same else "states that fla-core leaves differ"

    def in_parts(
        self, forward: Callable[..., Any], cuts: Sequence[int]
    ) -> tuple[torch.Tensor, dict[Piece, torch.Tensor]]:
        """Return what a forward gives for the sequence, [T, ...], in parts from one cut to the next, and its states."""
        kept: dict[Piece, torch.Tensor] = {}
        place, found = self._index([0]), list[torch.Tensor]()
        for begin, end in pairwise(cuts):
            call = MixerCall(kept, place if begin else None)
            found.append(self._run(forward, range(begin, end), 1, call)[0])
            kept = kept | call.made
        return torch.cat(found), kept

    def _why_not_stepped(self, kinds: frozenset[str]) -> str:
        """Two rows take two steps: from one place to another, and in place."""
        half, begun, device = self._hidden.shape[1] // 2, MixerCall(None, None), self._hidden.device
        self._run(self._plain, range(half), 1, begun)
        self.sizes = sizes_of(begun.made)
        # As numbers of any type these bytes are none: what is read of another place shows.
        memory = torch.full((5, sum(map(aligned_bytes, begun.made.values()))), 0xFF, dtype=torch.uint8, device=device)
        wanted, found = (pieces_in(memory.clone(), begun.made) for _ in range(2))
        for kept in (wanted, found):
            for piece, state in begun.made.items():
                kept[piece][1], kept[piece][3] = state[0], state[0]
        stepping = with_functions(self._module, self._functions)
        for first, places in ((half, ([1, 3], [0, 3])), (half + 2, ([0, 3], [0, 2]))):
            before, after = (self._index(each) for each in places)
            results = []
            for forward, kept, stepped in ((self._plain, wanted, frozenset[str]()), (stepping, found, kinds)):
                call = MixerCall(kept, before, after, stepped)
                results.append(self._run(forward, range(first, first + 2), 2, call))
                call.put_back(kept, after)
            if not self._is_equal(results[1], results[0]):
                return "results of kernels differ"
        if not all(self._is_equal(found[piece][:4], wanted[piece][:4]) for piece in wanted):
            return "states that kernels leave differ"
        untouched = all(bool((found[piece][4:].contiguous().view(torch.uint8) == 0xFF).all()) for piece in found)
        return "" if untouched else "kernels write to other places"

    def _run(self, forward: Callable[..., Any], tokens: range, rows: int, call: MixerCall) -> torch.Tensor:
        """Return what a forward gives, [rows, L, ...], for tokens of the sequence as so many rows."""
        given, length = (self._hidden, *self._options.values()), self._hidden.shape[1]
        at = torch.arange(tokens.start, tokens.stop, device=self._hidden.device) % length
        shape = rows, len(tokens) // rows
        own, *others = (cut(value, at, shape, length) for value in given)
        result = self._called(forward, own, dict(zip(self._options, others, strict=True)), call)
        made: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return made

    def _is_equal(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return alike(found.float(), wanted.float(), self._limit)

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._hidden.device)


def _in_words(error: Exception) -> str:
    return (str(error).strip() or repr(error)).partition("\n")[0]


def alike(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    """Return whether the norm of the error is within a limit, over that of what is wanted."""
    return bool((found - wanted).norm() <= limit * wanted.norm().clamp_min(1e-12))
