"""Bodies that a client has compressed: gzip and deflate, decoded within a bound."""

from __future__ import annotations

import zlib
from typing import Final

SERVED: Final = ("gzip", "deflate")
_GZIP: Final = 16 + zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS


def decoded(body: bytes, coding: str, most: int) -> bytes | None:
    """Return a body without its coding, cut behind `most` bytes; None where it is not whole, or none of that coding.

    Clients send deflate with the frame of zlib, as the standard has it, and without.
    """
    windows = (_GZIP,) if coding == "gzip" else (zlib.MAX_WBITS, _RAW)
    for window in windows:
        decoder, parts, rest = zlib.decompressobj(window), bytearray(), body
        try:
            while rest and len(parts) <= most:
                parts += decoder.decompress(rest, most + 1 - len(parts))
                rest = decoder.unconsumed_tail
                if decoder.eof and coding == "gzip" and (rest := decoder.unused_data):
                    decoder = zlib.decompressobj(window)  # gzip's files may follow each other
        except zlib.error:
            continue
        if len(parts) > most or decoder.eof:
            return bytes(parts)
    return None
