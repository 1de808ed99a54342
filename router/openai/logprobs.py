"""Log-probabilities of output tokens as OpenAI-compatible clients expect them, for chats and for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from common.errors import Unsupported
from common.types import TokenLogprobs
from router.ports import TextCodec

Json = dict[str, Any]
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ChoiceLogprobs:
    """Encodes the log-probabilities of one choice, at once or piece by piece."""

    def __init__(self, codec: TextCodec, chat: bool) -> None:
        self._codec, self._chat = codec, chat
        # Characters of the output before the next token; a token may be a part of a character.
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def body(self, tokens: Sequence[TokenLogprobs]) -> Json | None:
        """Return the body of the next tokens, None when there are none."""
        if not tokens:
            return None
        if self._chat:
            return {"content": [self._chat_token(token) for token in tokens], "refusal": None}
        return self._legacy(tokens)

    def _chat_token(self, token: TokenLogprobs) -> Json:
        top = [self._chat_entry(*pair) for pair in token.top]
        return self._chat_entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _chat_entry(self, token_id: int, logprob: float) -> Json:
        name, spelt = _named(self._codec, token_id)
        return {"token": name, "logprob": logprob, "bytes": None if spelt is None else list(spelt)}

    def _legacy(self, tokens: Sequence[TokenLogprobs]) -> Json:
        return {
            "tokens": [_named(self._codec, token.token_id)[0] for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._by_name(token) for token in tokens],
            "text_offset": [self._next_offset(token.token_id) for token in tokens],
        }

    def _by_name(self, token: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens, best first; of tokens with equal text the likeliest counts."""
        found: dict[str, float] = {}
        for token_id, logprob in token.top:
            found.setdefault(_named(self._codec, token_id)[0], logprob)
        return found

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        name, spelt = _named(self._codec, token_id)
        self._offset += len(name) if spelt is None else len(self._utf8.decode(spelt))
        return offset


def _named(codec: TextCodec, token_id: int) -> tuple[str, bytes | None]:
    """Return a token's text, and its bytes where they are known. A token that is no text by itself shows its bytes."""
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
