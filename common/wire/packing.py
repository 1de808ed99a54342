"""Packed arrays in `bytes` fields: little-endian integers and 16-byte hashes, concatenated.

Block ids are signed 32-bit integers (-1 is TRIMMED). What counts for the life of a process, sequences and steps, has 64
bits and never wraps. Everything else is unsigned and has 32 bits. A repeated field costs some hundred times as much.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from struct import Struct
from typing import cast

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import KEY_BYTES
from common.contracts.types import BlockHash, BlockId, SequenceId

_SWAP = sys.byteorder == "big"
_HASHES = Struct(f"{KEY_BYTES}s")


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers of 0 to 2^32 - 1. Raises OverflowError outside that range."""
    return _pack("I", values)


def unpack_u32(packed: bytes) -> list[int]:
    """Raises ProtocolViolation when the length is not a multiple of 4."""
    return _unpack("I", packed)


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers of 0 to 2^64 - 1. Raises OverflowError outside that range."""
    return _pack("Q", values)


def unpack_u64(packed: bytes) -> list[int]:
    """Raises ProtocolViolation when the length is not a multiple of 8."""
    return _unpack("Q", packed)


def pack_sequences(sequences: Iterable[SequenceId]) -> bytes:
    return _pack("Q", sequences)


def unpack_sequences(packed: bytes) -> list[SequenceId]:
    """Raises ProtocolViolation when the length is not a multiple of 8."""
    return cast("list[SequenceId]", _unpack("Q", packed))


def pack_blocks(blocks: Iterable[BlockId]) -> bytes:
    """Pack block ids, TRIMMED included."""
    return _pack("i", blocks)


def unpack_blocks(packed: bytes) -> list[BlockId]:
    """Return ids of real blocks. Raises ProtocolViolation for a negative id, or a length not a multiple of 4."""
    return cast("list[BlockId]", _at_least(0, _unpack("i", packed)))


def unpack_indexes(packed: bytes) -> list[BlockId]:
    """Return numbers of which -1 is one: block ids where TRIMMED may stand, and indexes of parents.

    Raises ProtocolViolation for any other negative number.
    """
    return cast("list[BlockId]", _at_least(-1, _unpack("i", packed)))


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises ProtocolViolation when the length is not a multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise ProtocolViolation(f"{len(packed)} bytes hold no whole number of {KEY_BYTES}-byte hashes")
    return cast("tuple[BlockHash, ...]", tuple(chain.from_iterable(_HASHES.iter_unpack(packed))))


def parallel(what: str, *columns: Sequence[object]) -> None:
    """Raises ProtocolViolation unless the columns of a table have one length."""
    if len({len(column) for column in columns}) > 1:
        raise ProtocolViolation(f"columns of {what} have lengths {', '.join(str(len(column)) for column in columns)}")


def _at_least(least: int, numbers: list[int]) -> list[int]:
    if numbers and min(numbers) < least:
        raise ProtocolViolation(f"{min(numbers)} is not a block; expected a number from {least} up")
    return numbers


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = array.array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, packed: bytes) -> list[int]:
    if not packed:
        return []
    values = array.array(code)
    if len(packed) % values.itemsize:
        raise ProtocolViolation(f"{len(packed)} bytes hold no whole number of {8 * values.itemsize}-bit integers")
    values.frombytes(packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()
