"""Floods of HTTP/2: frames that cost their sender a few bytes, and a server a stream, a header list or an answer.

Frames are made by hand: no library of HTTP/2 makes what it should refuse. A flood is an opening and an endless series
of chunks; each chunk follows from the number of the one before, so no two connections share a thing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED = 0x4, 0x8
_INITIAL_WINDOW_SIZE: Final = 4
# Frames of one chunk: some kilobytes, so that a write is worth its call.
_FRAMES: Final = 256
_CANCEL: Final = (8).to_bytes(4, "big")
_STATUS: Final = b"/quire.inference.v1.InferenceService/GetStatus"
_GENERATE: Final = b"/quire.inference.v1.InferenceService/Generate"
# The largest entry of a dynamic table of 4,096 bytes: 32 of them are overhead.
_LARGE: Final = b"a" * 3_900
# The newest entry of the dynamic table, by its index.
_NEWEST: Final = b"\xbe"

Chunks = Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Flood:
    """What is sent after the preface; `reads` says whether the sender takes what the server answers."""

    chunks: Chunks
    settings: bytes = b""
    reads: bool = True
    acknowledges: bool = True


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame: 9 bytes, then what it carries."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def request_head(path: bytes) -> bytes:
    """Return the header block of a call, without use of the dynamic table."""
    return (
        b"\x83\x86"  # :method POST, :scheme http
         b"\x04" + _text(path)
        + b"\x01" + _text(b"quire")  # :authority
        + b"\x0f\x10" + _text(b"application/grpc")  # content-type
        + b"\x00" + _text(b"te") + _text(b"trailers")
    )  # fmt: skip


def opening(flood: Flood) -> bytes:
    """Return what opens the flood's connection: an acknowledgement of settings lifts the limits before it."""
    return PREFACE + frame(SETTINGS, 0, 0, flood.settings) + (frame(SETTINGS, ACK, 0) if flood.acknowledges else b"")


def _text(text: bytes) -> bytes:
    """Return a text as HPACK has it, without Huffman's code: its length has 7 bits, then groups of 7."""
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    parts, rest = bytearray((127,)), length - 127
    while rest >= 128:
        parts.append(rest % 128 | 128)
        rest //= 128
    return bytes((*parts, rest)) + text


def _streams() -> Iterator[int]:
    return itertools.count(1, 2)


def _of_each_stream(make: Callable[[int], bytes], frames: int = _FRAMES) -> Chunks:
    def chunks() -> Iterator[bytes]:
        streams = _streams()
        while True:
            yield b"".join(make(stream) for stream in itertools.islice(streams, frames))

    return chunks


def _over_and_over(first: bytes, each: bytes, frames: int = _FRAMES) -> Chunks:
    def chunks() -> Iterator[bytes]:
        yield first
        chunk = each * frames
        while True:
            yield chunk

    return chunks


def _call(path: bytes, flags: int = 0, more: bytes = b"") -> Callable[[int], bytes]:
    block = request_head(path) + more
    return lambda stream: frame(HEADERS, END_HEADERS | flags, stream, block)


_of_status: Final = _call(_STATUS)
_of_generate: Final = _call(_GENERATE)


def _reset(stream: int) -> bytes:
    return _of_status(stream) + frame(RST_STREAM, 0, stream, _CANCEL)


def _asked(stream: int) -> bytes:
    return _of_status(stream) + frame(DATA, END_STREAM, stream, bytes(5))


def _asked_and_reset(stream: int) -> bytes:
    return _asked(stream) + frame(RST_STREAM, 0, stream, _CANCEL)


def _reset_by_server(stream: int) -> bytes:
    """Let the server reset the stream: a window update of 0 is an error of the stream."""
    return _of_status(stream) + frame(WINDOW_UPDATE, 0, stream, bytes(4))


def _unfinished(stream: int) -> bytes:
    """Announce a message of 4 MiB, and send what the first window of a stream takes."""
    begun = b"\x00" + ((4 << 20) - 64).to_bytes(4, "big")
    parts = (begun + bytes(15_995), *[bytes(16_000)] * 3)
    return _of_generate(stream) + b"".join(frame(DATA, 0, stream, part) for part in parts)


# One literal that is kept, and as many references to it as fit into a frame: 60 MB of headers.
_KEPT: Final = b"\x40" + _text(b"x") + _text(_LARGE)
_REFERENCES: Final = _call(_STATUS, END_STREAM, _KEPT + _NEWEST * 12_000)
# As many references as the limit of a header list lets pass: each entry counts its length and 32.
_SMALL_REFERENCES: Final = _call(_STATUS, END_STREAM, b"\x40" + _text(b"x") + _text(b"") + _NEWEST * 230)
_LARGE_ALLOWED: Final = _call(_GENERATE, 0, _KEPT + _NEWEST)
_BEGINS_HEADERS: Final = frame(HEADERS, 0, 1, request_head(_STATUS))
_FILLER: Final = b"\x00" + _text(b"x-filler") + _text(b"a" * 1_000)
_NO_WINDOW: Final = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)

FLOODS: Final[dict[str, Flood]] = {
    "rapid_reset": Flood(_of_each_stream(_reset)),
    "rapid_reset_asked": Flood(_of_each_stream(_asked_and_reset)),
    "rapid_reset_unread": Flood(_of_each_stream(_reset), reads=False),
    "reset_by_server": Flood(_of_each_stream(_reset_by_server)),
    "open_streams": Flood(_of_each_stream(_of_generate)),
    "open_streams_of_headers": Flood(_of_each_stream(_LARGE_ALLOWED, 16)),
    "unfinished_messages": Flood(_of_each_stream(_unfinished, 1)),
    "hpack_references": Flood(_of_each_stream(_REFERENCES, 4)),
    "hpack_references_before_settings": Flood(_of_each_stream(_REFERENCES, 4), acknowledges=False),
    "hpack_small_references": Flood(_of_each_stream(_SMALL_REFERENCES)),
    "continuation": Flood(_over_and_over(_BEGINS_HEADERS, frame(CONTINUATION, 0, 1, _FILLER))),
    "continuation_before_settings": Flood(
        _over_and_over(_BEGINS_HEADERS, frame(CONTINUATION, 0, 1, _FILLER)), acknowledges=False
    ),
    "continuation_references": Flood(
        _over_and_over(frame(HEADERS, 0, 1, request_head(_STATUS) + _KEPT), frame(CONTINUATION, 0, 1, _NEWEST), 4096)
    ),
    "continuation_empty": Flood(_over_and_over(_BEGINS_HEADERS, frame(CONTINUATION, 0, 1), 4096)),
    "settings": Flood(_over_and_over(b"", frame(SETTINGS, 0, 0), 2048)),
    "settings_unread": Flood(_over_and_over(b"", frame(SETTINGS, 0, 0), 2048), reads=False),
    "pings": Flood(_over_and_over(b"", frame(PING, 0, 0, b"12345678"), 1024)),
    "pings_unread": Flood(_over_and_over(b"", frame(PING, 0, 0, b"12345678"), 1024), reads=False),
    "empty_data": Flood(_over_and_over(_of_generate(1), frame(DATA, 0, 1), 2048)),
    "padded_data": Flood(_over_and_over(_of_generate(1), frame(DATA, PADDED, 1, b"\xff" + bytes(255)), 64)),
    "window_updates": Flood(
        _over_and_over(
            _of_generate(1), frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")
        )
    ),
    "priorities": Flood(_over_and_over(_of_generate(1), frame(PRIORITY, 0, 3, b"\0\0\0\1\x10"), 1024)),
    "zero_window": Flood(_of_each_stream(_asked), settings=_NO_WINDOW),
    "unread_answers": Flood(_of_each_stream(_asked), reads=False),
}
