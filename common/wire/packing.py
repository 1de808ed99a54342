"""Packed arrays in `bytes` fields: little-endian 32-bit integers and 16-byte hashes, concatenated.

Block ids are signed (-1 is TRIMMED), everything else is unsigned. A repeated field costs some hundred times as much.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from typing import cast

from common.errors import ProtocolViolation
from common.hashing import KEY_BYTES
from common.types import BlockHash, BlockId, SequenceId

_SWAP = sys.byteorder == "big"


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers of 0 to 2^32 - 1. Raises OverflowError outside that range."""
    return _pack("I", values)


def unpack_u32(packed: bytes) -> list[int]:
    """Raises ProtocolViolation when the length is no multiple of 4."""
    return _unpack("I", packed)


def pack_sequences(sequences: Iterable[SequenceId]) -> bytes:
    return _pack("I", sequences)


def unpack_sequences(packed: bytes) -> list[SequenceId]:
    """Raises ProtocolViolation when the length is no multiple of 4."""
    return cast("list[SequenceId]", _unpack("I", packed))


def pack_blocks(blocks: Iterable[BlockId]) -> bytes:
    """Pack block ids, TRIMMED included."""
    return _pack("i", blocks)


def unpack_blocks(packed: bytes) -> list[BlockId]:
    """Raises ProtocolViolation when the length is no multiple of 4."""
    return cast("list[BlockId]", _unpack("i", packed))


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises ProtocolViolation when the length is no multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise ProtocolViolation(f"{len(packed)} bytes hold no whole number of {KEY_BYTES}-byte hashes")
    return tuple(BlockHash(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))


def parallel(what: str, *columns: Sequence[object]) -> None:
    """Raises ProtocolViolation unless the columns of a table have one length."""
    if len({len(column) for column in columns}) > 1:
        raise ProtocolViolation(f"columns of {what} have lengths {', '.join(str(len(column)) for column in columns)}")


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = array.array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, packed: bytes) -> list[int]:
    if len(packed) % 4:
        raise ProtocolViolation(f"{len(packed)} bytes hold no whole number of 32-bit integers")
    values = array.array(code, packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()
