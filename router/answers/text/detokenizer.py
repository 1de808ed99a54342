"""Incremental detokenizer: only whole characters, and together the same text as decoding all tokens at once.

An output follows a prompt: the two texts together are what all tokens decode to. Decoders of sentencepiece leave out a
space at the start of a text, and an output begins none.

Nearly all language models use one of two kinds of tokenizer that spell every token as bytes: byte-level BPE, and
sentencepiece with byte fallback. For these a table gives the bytes of a token. An incremental UTF-8 decoder keeps back
the one to three bytes of an unfinished character. Any other decoder (WordPiece, word suffixes, Metaspace) decodes a
small window of tokens twice, without and with the new ones. The difference is the new text.

(`DecodeStream` of the tokenizers library was tried, in version 0.23. On random tokens with byte fallback it differs
from the full decode in a third of all sequences or raises. It never releases an invalid byte at the end.)

Invalid UTF-8 becomes U+FFFD, one for each ill-formed run as the Unicode standard recommends. The byte fallback of the
tokenizers library differs there. One wrong byte turns all characters of its run into U+FFFD, also earlier ones, which a
stream has sent already.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A window that ends in U+FFFD is held back in case the character completes; no character needs more tokens than this.
_MOST_HELD_BACK = 8
# Tokens of a prompt that the first ones of an output may join with.
_MOST_BEFORE = 8
# Tables of bytes that are kept: one for each set of hidden tokens, of which requests use very few.
_MOST_TABLES = 8


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they complete."""
        ...

    def finish(self) -> str:
        """Return the text that was held back: U+FFFD for a character that never completed, or nothing."""
        ...


class Detokenizers(Protocol):
    def __call__(self, hidden: frozenset[int], after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer that leaves out `hidden` tokens, of a text that follows other tokens."""
        ...


def detokenizers(inner: tokenizers.Tokenizer) -> Detokenizers:
    """Return the factory of a tokenizer's detokenizers."""
    spelling = _spelling(json.loads(inner.to_str())["decoder"])
    if spelling is None:
        return lambda hidden, after=(): WindowDetokenizer(inner, hidden, after)

    @lru_cache(maxsize=_MOST_TABLES)
    def table(hidden: frozenset[int]) -> _TokenBytes:
        return _TokenBytes(inner, spelling.to_bytes, hidden)

    return lambda hidden, after=(): BytesDetokenizer(table(hidden), spelling.strip, after)


def bytes_of_tokens(inner: tokenizers.Tokenizer) -> Callable[[int], bytes] | None:
    """Return a function from token id to bytes, empty for an unknown id; None for a decoder that spells no bytes."""
    decoder = json.loads(inner.to_str())["decoder"]
    spelling = _spelling(decoder)
    if decoder is not None and decoder["type"] == "Metaspace":
        # The first token of a text alone loses its spaces, all of them: what a token spells is known, a text is not.
        space = decoder["replacement"]
        return _TokenBytes(inner, lambda token: token.replace(space, " ").encode(), frozenset()).__getitem__
    return None if spelling is None else _TokenBytes(inner, spelling.to_bytes, frozenset()).__getitem__


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a decoder spells tokens as bytes, and which character it strips how often from the start of the text."""

    to_bytes: Callable[[str], bytes]
    strip: tuple[str, int] = ("", 0)


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, filled in as tokens are met; ids without a token, and hidden ones, have none.

    An id without a token is not kept: a client may name two thousand million of them.
    """

    def __init__(self, inner: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], hidden: frozenset[int]) -> None:
        super().__init__()
        self._inner, self._to_bytes, self._hidden = inner, to_bytes, hidden

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        self[token_id] = self._to_bytes(token)
        return self[token_id]


class BytesDetokenizer:
    """For tokenizers that spell tokens as bytes. Characters are stripped from the start of a whole text alone."""

    def __init__(self, token_bytes: dict[int, bytes], strip: tuple[str, int], after: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stripped, self._strips_left = strip
        if self._strips_left and any(token_bytes[token_id] for token_id in after):
            self._strips_left = 0

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._bytes
        return self._strip(self._utf8.decode(b"".join([table[token_id] for token_id in token_ids])))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", True))

    def _strip(self, text: str) -> str:
        while self._strips_left and text:
            if text[0] != self._stripped:
                self._strips_left = 0
                break
            text = text[1:]
            self._strips_left -= 1
        return text


class WindowDetokenizer:
    """For any other decoder: the new text is what new tokens add to the text of a window."""

    def __init__(
        self, inner: tokenizers.Tokenizer, hidden: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> None:
        self._inner, self._hidden = inner, hidden
        # Tokens whose text was sent and which the next ones may join with, then tokens that are held back.
        self._sent = list(islice((token_id for token_id in reversed(after) if token_id not in hidden), _MOST_BEFORE))
        self._sent.reverse()
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        text = self._new_text()
        self._held = []
        return text

    def _push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(_REPLACEMENT) and len(self._held) < _MOST_HELD_BACK):
            return ""
        self._sent, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        before = self._inner.decode(self._sent, skip_special_tokens=False)
        return self._inner.decode(self._sent + self._held, skip_special_tokens=False)[len(before) :]


def _spelling(decoder: dict[str, Any] | None) -> _Spelling | None:
    """Return how the decoder of a tokenizer.json spells bytes; None for a decoder that does not."""
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"], ["Fuse", "ByteLevel"]):
        return _Spelling(_byte_level)
    replaces = [part for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    plain = all("String" in part["pattern"] for part in replaces) and all(part["stop"] == 0 for part in strips)
    order = ["Replace"] * len(replaces) + ["ByteFallback", "Fuse"] + ["Strip"] * len(strips)
    if kinds != order or not plain or len(strips) > 1:
        return None
    replacements = [(part["pattern"]["String"], part["content"]) for part in replaces]
    strip = (strips[0]["content"], strips[0]["start"]) if strips else ("", 0)
    return _Spelling(lambda token: _byte_fallback(token, replacements), strip)


def _byte_fallback(token: str, replacements: Sequence[tuple[str, str]]) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()  # an added token in plain text


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
