"""Hostile bytes: messages of protobuf and HTTP of any size, made without building what they say.

A packed field of megabytes is one repetition of bytes. So an attacker spends little, and many requests come quickly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

# Just below limits of messages, so that what a server adds when it passes them on is too much.
SIZES: Final = tuple((mebibytes << 20) - 64 for mebibytes in (16, 4, 1))
_LENGTH_DELIMITED: Final = 2
# Ids of one byte are in every vocabulary; 0xff 0x7f is 16383, which is in none of a small model's.
VALID_ID, UNKNOWN_ID = b"\x21", b"\xff\x7f"
_GENERATE, _PROMPT, _TOKEN_IDS, _IDS = 0, 2, 2, 1
_SAMPLING, _MAX_TOKENS, _STOP, _STOP_IDS, _N = 4, 5, 7, 8, 16


def varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field: bytes, a text, a message or packed numbers."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(content)) + content


def number(place: int, value: int) -> bytes:
    return varint(place << 3) + varint(value)


def prompt(ids: bytes = VALID_ID * 8) -> bytes:
    """Return the prompt of a GenerateRequest, from ids that are encoded already."""
    return field(_PROMPT, field(_TOKEN_IDS, field(_IDS, ids)))


def many_stop_ids(size: int) -> bytes:
    """Return a GenerateRequest that stop ids fill; a worker's Submit has more bytes beside them."""
    return prompt() + field(_SAMPLING, number(_MAX_TOKENS, 8) + field(_STOP_IDS, VALID_ID * size))


def long_stop_strings(size: int, count: int = 16, sequences: int = 3) -> bytes:
    """Return a GenerateRequest that stop strings fill, for several sequences."""
    stops = b"".join(field(_STOP, bytes([97 + index]) * (size // count - 16)) for index in range(count))
    return prompt() + field(_SAMPLING, number(_MAX_TOKENS, 8) + stops + number(_N, sequences))


def long_prompt(token: bytes, size: int) -> bytes:
    """Return a GenerateRequest that prompt tokens fill."""
    return prompt(token * (size // len(token)))


def many_tokens(token: bytes, size: int) -> bytes:
    """Return a DetokenizeRequest that ids fill."""
    return field(1, token * (size // len(token)))


def infer(parameters: bytes) -> bytes:
    """Return a ModelInferRequest whose sampling parameters are this text."""
    texts = {b"text_input": b"hello", b"sampling_parameters": parameters}
    inputs = b"".join(field(5, field(1, name) + field(2, b"BYTES") + field(3, b"\x01")) for name in texts)
    raw = b"".join(field(7, len(text).to_bytes(4, "little") + text) for text in texts.values())
    return field(1, b"quire-demo") + inputs + raw


def span_export(spans: int, size: int) -> bytes:
    """Return an OTLP export of spans, each with one attribute; they share the bytes."""
    text = field(1, b"x" * max(1, size // spans - 64))  # AnyValue.string_value
    span = (
        field(1, b"\x11" * 16) + field(2, b"\x22" * 8) + field(5, b"forged") + field(9, field(1, b"a") + field(2, text))
    )
    return field(1, field(2, field(2, span) * spans))


def json_body(head: bytes, entry: bytes, tail: bytes, size: int) -> bytes:
    """Return a JSON document with as many equal entries of an array as fit into `size` bytes."""
    return head + b",".join([entry] * (size // (len(entry) + 1))) + tail


def http_post(path: str, body: bytes, host: str = "quire", key: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += authorization(key)
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def authorization(key: str) -> str:
    """Return the header line with a key; "" without one."""
    return f"Authorization: Bearer {key}\r\n" if key else ""


def half_post(path: str, key: str = "") -> bytes:
    """Return a request whose body never comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: quire\r\n{authorization(key)}"
    return f"{head}Content-Length: 1000\r\n\r\n{{".encode()


def endless_headers(size: int) -> Iterator[bytes]:
    """Yield a request whose headers have `size` bytes and no end."""
    yield b"GET /v1/models HTTP/1.1\r\nHost: quire\r\n"
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    for _ in range(size // len(line)):
        yield line


def garbage(rng: random.Random, size: int = 4096) -> bytes:
    return rng.randbytes(rng.randrange(1, size))


def http1_garbage(rng: random.Random) -> bytes:
    """Return something that begins like HTTP/1, and goes wrong."""
    target = garbage(rng, 200).translate(None, b"\r\n ")
    openings = (
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"GET /" + target + b" HTTP/1.1\r\nHost: quire\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost" + target + b"\r\n\r\n",
        b"\r\n" * 2000,
    )
    return rng.choice(openings) + garbage(rng)


_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2_garbage(rng: random.Random) -> bytes:
    """Return the preface of HTTP/2, settings, and frames of any type, flags and length."""
    frames = [_frame(rng) for _ in range(rng.randrange(1, 40))]
    return _PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"".join(frames)


def _frame(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.randrange(0, 64))
    length = rng.choice((len(payload), len(payload), rng.randrange(1 << 24)))
    head = length.to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)])
    return head + rng.randrange(8).to_bytes(4, "big") + payload
