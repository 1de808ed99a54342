"""Log-probabilities of output tokens as OpenAI-compatible clients expect them, for chats and for completions."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from math import isfinite
from typing import Final, TypeAlias

from common.contracts.errors import Unsupported
from common.contracts.types import TokenLogprobs
from router.contracts.ports import TextCodec

# JSON of one or several lists by name, without their brackets: so that parts of them can be joined.
Columns: TypeAlias = Mapping[str, str]
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
# OpenAI's number for a token that cannot come; JSON has no infinity.
_IMPOSSIBLE: Final = "-9999.0"
# Tokens whose text is remembered, of some 200 bytes each.
_REMEMBERED: Final = 32_768


class ChoiceLogprobs:
    """Encodes the log-probabilities of one choice, at once or piece by piece."""

    def __init__(
        self, codec: TextCodec, chat: bool, as_ids: bool = False, offset: int = 0, begins: bool = False
    ) -> None:
        """With `as_ids`, tokens are named token_id:N, as two tokens may have one text. `offset` is the first one's.

        `begins`: a whole text begins with these tokens, which may leave out special ones and a space.
        """
        self._codec, self._chat = codec, chat
        self._name, self._spelling = (_id_name, _id_spelling) if as_ids else (_name, _spelling)
        # Characters of the output before the next token; a token may be a part of a character.
        self._offset, self._begins = offset, begins
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, tokens: Sequence[TokenLogprobs]) -> str:
        """Return the JSON of the next tokens, "null" when there are none."""
        if not tokens:
            return "null"
        text = lists(self.columns(tokens))
        return f'{{{text},"refusal":null}}' if self._chat else f"{{{text}}}"

    def first(self, token_id: int) -> Columns:
        """Return the JSON of a completion's token that has no log-probability: the first one of a prompt."""
        name, offset = self._name(self._codec, token_id), str(self._next_offset(token_id))
        return {"tokens": name, "token_logprobs": "null", "top_logprobs": "null", "text_offset": offset}

    def columns(self, tokens: Sequence[TokenLogprobs]) -> Columns:
        """Return the JSON of the next tokens without the brackets of its lists."""
        if self._chat:
            return {"content": ",".join(map(self._chat_token, tokens))}
        return {
            "tokens": ",".join([self._name(self._codec, token.token_id) for token in tokens]),
            "token_logprobs": ",".join([number(token.logprob) for token in tokens]),
            "top_logprobs": ",".join(map(self._by_name, tokens)),
            "text_offset": ",".join([str(self._next_offset(token.token_id)) for token in tokens]),
        }

    def _chat_token(self, token: TokenLogprobs) -> str:
        top = ",".join([f"{self._chat_entry(*pair)}}}" for pair in token.top])
        return f'{self._chat_entry(token.token_id, token.logprob)},"top_logprobs":[{top}]}}'

    def _chat_entry(self, token_id: int, logprob: float) -> str:
        """Return an entry without its closing brace."""
        before, after = self._spelling(self._codec, token_id)
        return before + number(logprob) + after

    def _by_name(self, token: TokenLogprobs) -> str:
        """Return the sampled token, then the most likely ones, best first; of equal texts the likeliest counts."""
        found: dict[str, float] = {}
        for token_id, logprob in ((token.token_id, token.logprob), *token.top):
            name = self._name(self._codec, token_id)
            found[name] = max(logprob, found.get(name, logprob))
        return "{" + ",".join([f"{name}:{number(logprob)}" for name, logprob in found.items()]) + "}"

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        name, spelt = _named(self._codec, token_id)
        if self._begins and spelt is not None and _REPLACEMENT not in spelt.decode(errors="replace"):
            shown = self._codec.decode([token_id])
            self._begins = not shown
            self._offset += len(shown)
            return offset
        self._offset += len(name) if spelt is None else len(self._utf8.decode(spelt))
        return offset


def lists(columns: Columns) -> str:
    """Return the members of an object that has the columns as lists."""
    return ",".join([f'"{name}":[{column}]' for name, column in columns.items()])


def token_json(codec: TextCodec, token_id: int) -> str:
    """Return a token's text in JSON."""
    return _name(codec, token_id)


def number(logprob: float) -> str:
    return repr(logprob) if isfinite(logprob) else _IMPOSSIBLE


# An answer names few tokens often: each takes a microsecond from here, and five to spell.
@lru_cache(maxsize=_REMEMBERED)
def _name(codec: TextCodec, token_id: int) -> str:
    """Return a token's text in JSON."""
    return encode_basestring(_named(codec, token_id)[0])


@lru_cache(maxsize=_REMEMBERED)
def _spelling(codec: TextCodec, token_id: int) -> tuple[str, str]:
    """Return what stands before and after the number in an entry of a chat."""
    spelt = _named(codec, token_id)[1]
    octets = "null" if spelt is None else f"[{','.join(map(str, spelt))}]"
    return f'{{"token":{_name(codec, token_id)},"logprob":', f',"bytes":{octets}'


def _id_name(codec: TextCodec, token_id: int) -> str:
    return f'"token_id:{token_id}"'


def _id_spelling(codec: TextCodec, token_id: int) -> tuple[str, str]:
    return f'{{"token":"token_id:{token_id}","logprob":', _spelling(codec, token_id)[1]


def _named(codec: TextCodec, token_id: int) -> tuple[str, bytes | None]:
    """Return a token's text, and its bytes where they are known. A token that is not text by itself shows its bytes."""
    try:
        spelt = codec.token_bytes(token_id)
    except Unsupported:
        return f"token_id:{token_id}", None
    if spelt is None:
        text = codec.decode([token_id], skip_special_tokens=False)
        return text, None if _REPLACEMENT in text else text.encode()
    if not spelt:
        return f"token_id:{token_id}", None
    try:
        return spelt.decode(), spelt
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt), spelt
