"""Samples tokens with the native library, by the rules of `gpuworker.sampling.sampler`, on several threads.

Both samplers take the same token from the same logits, except for numbers on the border of two tokens: the two round
their sums differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.native.library import best
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.stopping import FinishCause

ROW = np.dtype(  # quire_sample_row
    [
        ("seed", np.uint64),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")),
        *((name, np.int32) for name in ("top_k", "logprobs", "prompt_tokens", "bias_begin", "bias_end")),
        *((name, np.int32) for name in ("ends_begin", "ends_end", "ends_from", "words_begin", "words_end", "closing")),
        ("listed", np.int32),
    ],
    align=True,
)
MAX_FORCED = 32
"""Tokens that a step foresees: a step verifies half as many, and the next one may sample one of them."""
_MOST = 2**31 - 1


class MaskCall(ctypes.Structure):
    """quire_masks."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("bits", "of", "ready", "waited")), ("words", ctypes.c_int64))


class SampleCall(ctypes.Structure):
    """quire_sample."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "bias_ids", "bias_values", "end_ids")),
        *((name, ctypes.c_void_p) for name in ("word_ids", "word_begins", "logits")),
        ("logits_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("table", "first", "positions", "tokens", "logprobs", "top_ids", "top")),
        ("masks", ctypes.POINTER(MaskCall)),
        ("followers", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("ended", "forced", "num_forced")),
        *((name, ctypes.c_int32) for name in ("count", "vocab", "top_count", "threads", "forced_count", "reserved")),
    )


class RowFollower(Protocol):
    """Fills the masks of a row within native steps."""

    @property
    def struct(self) -> ctypes.Structure:
        """quire_follower; it stays as long as this object."""
        ...

    @property
    def foresees(self) -> bool:
        """Whether steps tell which tokens must follow those that they sample."""
        ...

    @property
    def ending(self) -> FinishCause:
        """Why the sequence has no further token, once a step says that it has none."""
        ...


class NativeRows:
    """The parameters of S rows in the form that the library takes, and what follows the constraints of some of them.

    A follower that stands in several rows, one behind the other, has drafts.
    """

    def __init__(
        self,
        rows: Sequence[SampledRow],
        vocab_size: int,
        library: ctypes.CDLL,
        followers: Sequence[RowFollower | None] = (),
    ) -> None:
        self.count, self.vocab_size, self.library = len(rows), vocab_size, library
        self.top_count = min(vocab_size, max([0, *(row.params.top_count for row in rows)]))
        biases = [[(i, v) for i, v in row.params.logit_bias if 0 <= i < vocab_size] for row in rows]
        closed = [row.closed_ends(vocab_size) for row in rows]
        ends = [
            [i for i in row.early_ends if 0 <= i < vocab_size] or [end for end, _ in each]
            for row, each in zip(rows, closed, strict=True)
        ]
        self.bias_ids = np.array([i for each in biases for i, _ in each], dtype=np.int32)
        self.bias_values = np.array([v for each in biases for _, v in each], dtype=np.float32)
        self.end_ids = np.array([i for each in ends for i in each], dtype=np.int32)
        words = [row.bad_words(vocab_size) for row in rows]
        flat = [word for each in words for word in each]
        self.word_ids = np.array([i for word in flat for i in word], dtype=np.int32)
        self.word_begins = np.cumsum([0, *map(len, flat)], dtype=np.int32)
        self.rows = np.zeros(self.count, dtype=ROW)
        for row, into in zip(rows, self.rows, strict=True):
            _describe(row, into)
        # The tokens whose log-probabilities a row names, by row.
        self.listed = {at: row.params.logprob_token_ids for at, row in enumerate(rows) if row.params.logprob_token_ids}
        self.rows["closing"] = [each[0][1] if each else -1 for each in closed]
        for name, lists in (("bias", biases), ("ends", ends), ("words", words)):
            ranges = np.cumsum([0, *map(len, lists)])
            self.rows[f"{name}_begin"], self.rows[f"{name}_end"] = ranges[:-1], ranges[1:]
        kept = ("rows", "bias_ids", "bias_values", "end_ids", "word_ids", "word_begins")
        # Of this memory, for every step: numpy takes 10 us to describe an array of structures.
        self.addresses = {name: _pointer(getattr(self, name)) for name in kept}
        self.followers = tuple(followers) if any(followers) else ()
        self.foresees = any(each is not None and each.foresees for each in self.followers)
        if self.followers:
            found = [0 if each is None else ctypes.addressof(each.struct) for each in self.followers]
            self._structs = np.array(found, dtype=np.uint64)
            self.addresses["followers"] = _pointer(self._structs)


def _describe(row: SampledRow, into: np.void) -> None:
    p = row.params
    into["seed"] = p.seed & 0xFFFFFFFFFFFFFFFF
    into["temperature"] = 0.0 if row.greedy else p.temperature
    into["top_p"], into["min_p"], into["top_k"] = p.top_p, p.min_p, min(p.top_k, _MOST)
    into["repetition"], into["frequency"] = p.repetition_penalty, p.frequency_penalty
    into["presence"] = p.presence_penalty
    into["logprobs"] = -1 if p.logprobs is None else p.top_count
    into["listed"] = bool(p.logprob_token_ids)
    into["prompt_tokens"] = row.prompt_tokens
    into["ends_from"] = 0 if row.masked else min(row.prompt_tokens + p.min_tokens, _MOST)


class NativeSample:
    """The sampling of one step's rows: inputs and outputs of one native call.

    All memory that the call reads or writes lives as long as this object.
    """

    def __init__(
        self,
        rows: NativeRows,
        positions: npt.NDArray[np.int64],
        batch_index: npt.NDArray[np.int32],
        table: torch.Tensor,
        threads: int,
        masks: GrammarBitmask | None = None,
    ) -> None:
        count, top_count = rows.count, rows.top_count
        self.tokens = np.zeros(count, dtype=np.int64)  # rows behind a wrong draft are not sampled
        self.logprobs = np.zeros(count, dtype=np.float32)
        self.top_ids = np.zeros((count, top_count), dtype=np.int32)
        self.top = np.zeros((count, top_count), dtype=np.float32)
        for row, ids in rows.listed.items():
            self.top_ids[row, : len(ids)] = ids
        first = batch_index.astype(np.int64) * table.shape[1]
        self._ended = np.zeros(count, dtype=np.uint8) if rows.followers else None
        self._num_forced = np.zeros(count, dtype=np.int32) if rows.foresees else None
        self._kept = (rows, positions, first, table, masks)
        self._run = rows.library.quire_sample_tokens
        self.call = SampleCall(
            **rows.addresses,
            table=table.data_ptr(),
            first=_pointer(first),
            positions=_pointer(positions),
            tokens=_pointer(self.tokens),
            logprobs=_pointer(self.logprobs),
            top_ids=_pointer(self.top_ids),
            top=_pointer(self.top),
            count=count,
            vocab=rows.vocab_size,
            top_count=top_count,
            threads=threads,
        )
        if masks is not None:
            self.call.masks = ctypes.pointer(_describe_masks(masks))
        if self._ended is not None:
            self.call.ended = _pointer(self._ended)
        if self._num_forced is not None:
            self._forced = np.zeros((count, MAX_FORCED), dtype=np.int32)
            self.call.forced, self.call.num_forced = _pointer(self._forced), _pointer(self._num_forced)
            self.call.forced_count = MAX_FORCED

    @property
    def ended(self) -> dict[int, FinishCause]:
        """The rows whose followers let no token follow, once the step is over; their samples are discarded."""
        if self._ended is None or not self._ended.any():
            return {}
        followers, rows = self._kept[0].followers, np.flatnonzero(self._ended).tolist()
        return {row: each.ending for row in rows if (each := followers[row]) is not None}

    @property
    def forced(self) -> dict[int, tuple[int, ...]]:
        """What constraints force to follow the samples of a step that is over, by the first row of each follower."""
        if self._num_forced is None or not self._num_forced.any():
            return {}
        rows = np.flatnonzero(self._num_forced).tolist()
        return {row: tuple(self._forced[row, : self._num_forced[row]].tolist()) for row in rows}

    def again(self) -> None:
        """Prepare for another step of the same rows, once the results of this one are read."""
        if self._ended is not None:
            self._ended.fill(0)
        if self._num_forced is not None:
            self._num_forced.fill(0)

    def point_at(self, logits: torch.Tensor) -> None:
        self.call.logits, self.call.logits_stride = logits.data_ptr(), logits.stride(0)

    def run(self, logits: torch.Tensor) -> None:
        """Sample, and write the tokens into the table; logits [S, vocab] float32 are overwritten."""
        self.point_at(logits)
        self._run(ctypes.byref(self.call))


def native_rows(
    rows: Sequence[SampledRow], vocab_size: int, followers: Sequence[RowFollower | None] = ()
) -> NativeRows | None:
    """Return the rows for the library; None where it was not built."""
    library = best()
    return None if library is None else NativeRows(rows, vocab_size, library, followers)


def _describe_masks(masks: GrammarBitmask) -> MaskCall:
    addresses = (each.ctypes.data for each in (masks.bits, masks.of, masks.ready, masks.waited))
    return MaskCall(*addresses, masks.bits.shape[1])


def _pointer(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
