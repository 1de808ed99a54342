"""The checkpoint's tokenizer: text to token ids off the event loop, token ids to text.

How to encode was measured (tokenizers 0.23, 100 texts of 4,300 tokens at once, a ticker of 1 ms on the same loop; its
p99 lateness in ms): `encode` on the loop 1196, `encode` in a thread 75 (it holds the GIL), `async_encode` 794 (it
converts on the loop, all results at once), `encode_batch_fast` in a pool of four threads 11-15, **in one thread 1.1**
(an idle loop on that machine: 0.3). One thread encodes about 400,000 tokens a second.

A short text is encoded on the loop all the same: 79 characters take 15 us there and 41 through the thread, 316 take 50
and 80, and the thread's answer waits for a turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import tokenizers

from common.errors import FieldViolation, InvalidConfig, InvalidRequest
from router.text.detokenizer import Detokenizer, bytes_of_tokens, detokenizers

_SHORT_CHARACTERS: Final = 512


class Tokenizer:
    """Encodes and decodes with one tokenizer.json; safe for concurrent use on one event loop."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Some checkpoints carry the settings of their training; prompts must not be cut or padded silently.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._new_detokenizer = detokenizers(inner)
        self._token_bytes = bytes_of_tokens(inner)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint, or None when it has no tokenizer.json. Raises InvalidConfig."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        # Broad, as the library raises bare Exception for a file that it cannot parse, and nothing narrower.
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # noqa: BLE001
            raise InvalidConfig(FieldViolation("--model", f"{path} cannot be read: {error}")) from None

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; a long one is encoded in the encoder thread."""
        if len(text) <= _SHORT_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, self._encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, equal to that of streaming them. Raises InvalidRequest for a negative id."""
        if any(token_id < 0 for token_id in token_ids):
            bad = next(position for position, token_id in enumerate(token_ids) if token_id < 0)
            what = f"is {token_ids[bad]}; expected a token id, which is never negative"
            raise InvalidRequest(FieldViolation(f"token_ids[{bad}]", what))
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that one token stands for, none for an unknown id; None where the decoder has text alone."""
        return self._token_bytes(token_id) if self._token_bytes is not None else None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return self._new_detokenizer(skip_special_tokens)

    def close(self) -> None:
        """End the encoder thread; texts not yet begun are dropped."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one releases the GIL where a single text does not; _fast leaves out the offsets.
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
