"""The checkpoint's tokenizer: text to token ids off the event loop, token ids to text.

How to encode was measured: tokenizers 0.23, 100 texts of 4,300 tokens at once, beside a ticker of 1 ms on the same
loop. The figures are its p99 lateness in ms. `encode` gives 1196 on the loop, and 75 in a thread (it holds the GIL).
`async_encode` gives 794: it converts on the loop, all results at once. `encode_batch_fast` gives 11 to 15 in a pool of
four threads, and **1.1 in one thread** (an idle loop on that machine: 0.3). One thread encodes about 400,000 tokens a
second. Tenants use it by turns (`encoder.py`).

A short text is encoded on the loop all the same. 79 characters take 15 us there and 41 through the thread; 316 take 50
and 80. The thread's answer also waits for a turn of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import tokenizers

from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import FieldViolation, InvalidConfig, InvalidRequest
from router.answers.text.detokenizer import Detokenizer, bytes_of_tokens, detokenizers
from router.answers.text.encoder import Encoder

_SHORT_CHARACTERS: Final = 512
# Decoding takes 0.1 microseconds a token where tokens spell bytes, 10 with any other decoder.
_FEW_TOKENS: Final = 1024
# Of a token's text, where it is not known yet.
BYTES_A_TOKEN: Final = 4
_MOST_CHARACTERS: Final = 300  # of an error of the library
_PANIC: Final = "PanicException"  # in a module that cannot be imported
# It forms no token with what follows.
_BEFORE: Final = "\n"
_PROBE: Final = "Tokens of a text: 1,234 words, caf\u00e9 \u2581 \u4f60\u597d \U0001f600\n\t  the end."
ResultT = TypeVar("ResultT")


class Tokenizer:
    """Encodes and decodes with one tokenizer.json; safe for concurrent use on one event loop."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Some checkpoints carry the settings of their training; prompts must not be cut or padded silently.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._new_detokenizer = detokenizers(inner)
        self._token_bytes = bytes_of_tokens(inner)
        added = inner.get_added_tokens_decoder().items()
        # Text, id, and whether texts leave it out.
        self.added_tokens = [(token.content, key, token.special) for key, token in added]
        self.hidden_tokens = {text: key for text, key, special in self.added_tokens if special}
        self._hidden = frozenset(self.hidden_tokens.values())
        self._encoder = Encoder()
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.last_id = max(inner.get_vocab(with_added_tokens=False).values(), default=-1)
        self.longest_token = max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint, or None when it has none. Raises InvalidConfig for a broken one."""
        path = tokenizer_json(directory)
        if path is None:
            return None
        # Broad, as the library raises bare Exception for a file that it cannot parse, and not an Exception where
        # its code panics.
        try:
            made = cls(tokenizers.Tokenizer.from_file(str(path)))
            made.decode(made._encode(_PROBE, True))
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            why = " ".join(str(error).split())[:_MOST_CHARACTERS]
            raise InvalidConfig(FieldViolation("--model", f"{path} cannot be read: {why}")) from None
        return made

    async def encode(self, text: str, add_special_tokens: bool = True, further: Sequence[str] = ()) -> list[int]:
        """Return the token ids of a text; a long one is encoded in an encoder thread.

        What goes on in `further` parts has no token that is of two of them.
        """
        work = partial(self._encode, text, add_special_tokens, further)
        if len(text) + sum(map(len, further)) <= _SHORT_CHARACTERS:
            return work()
        return await self.off_loop(size_of(text) + sum(map(size_of, further)), work)

    async def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special ones around it; counted in an encoder thread."""
        return await self.off_loop(size_of(text), lambda: len(self._encoding(text, False)))

    async def text_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return what `decode` returns; many tokens are decoded in an encoder thread, a thousand at a time."""
        if len(token_ids) <= _FEW_TOKENS:
            return self.decode(token_ids, skip_special_tokens)
        detokenizer, texts = self._decoder(token_ids, skip_special_tokens), list[str]()
        for start in range(0, len(token_ids), _FEW_TOKENS):
            part = token_ids[start : start + _FEW_TOKENS]
            texts.append(await self.off_loop(BYTES_A_TOKEN * len(part), partial(detokenizer.push, part)))
        return "".join([*texts, detokenizer.finish()])

    async def off_loop(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Run work on so many bytes, which takes milliseconds, in an encoder thread. Raises Overloaded."""
        return await self._encoder.run(size, work)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, equal to that of streaming them. Raises InvalidRequest for a negative id."""
        detokenizer = self._decoder(token_ids, skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def _decoder(self, token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        if any(token_id < 0 for token_id in token_ids):
            bad = next(position for position, token_id in enumerate(token_ids) if token_id < 0)
            what = f"is {token_ids[bad]}; expected a token id, which is never negative"
            raise InvalidRequest(FieldViolation(f"token_ids[{bad}]", what))
        return self._new_detokenizer(self._hidden if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that one token stands for, none for an unknown id; None where the decoder has text alone."""
        return self._token_bytes(token_id) if self._token_bytes is not None else None

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary has it, "" for an unknown id."""
        return self._inner.id_to_token(token_id) or ""

    def detokenizer(self, kept: Collection[str] = (), skip: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer of an output `after` a prompt.

        It leaves out special tokens, but for those in `kept`; without `skip` none.
        """
        if not skip:
            return self._new_detokenizer(frozenset(), after)
        if not kept:
            return self._new_detokenizer(self._hidden, after)
        return self._new_detokenizer(
            self._hidden.difference([self.hidden_tokens.get(name, -1) for name in kept]), after
        )

    def close(self) -> None:
        """End the encoder threads; texts not yet begun are dropped."""
        self._encoder.close()

    def _encode(self, text: str, add_special_tokens: bool, further: Sequence[str] = ()) -> list[int]:
        found = self._encoding(text, add_special_tokens).ids
        for part in further:
            found += self._encoding_behind(part)
        return found

    def _encoding_behind(self, part: str) -> list[int]:
        """Return the tokens of a part within a text: some tokenizers put a space before the first word of a text."""
        before, both = self._encoding(_BEFORE, False).ids, self._encoding(_BEFORE + part, False).ids
        return both[len(before) :] if both[: len(before)] == before else self._encoding(part, False).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch of one releases the GIL where a single text does not; _fast leaves out the offsets.
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def size_of(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
