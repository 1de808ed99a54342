"""The text ports of a checkpoint: prompts to tokens, tokens to text, text of outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import CONTEXT_LENGTH_EXCEEDED, FieldViolation, InvalidRequest, Unsupported
from common.types import SamplingParams
from quire.inference.v1 import inference_pb2
from router.ports import TextAssembler
from router.text.chat import ChatTemplate
from router.text.output import NoText, OutputText
from router.text.tokenizer import Tokenizer

# A template may build control tokens from the role ("<|" + role + "|>"); a plain word cannot inject another token.
_ROLE = re.compile(r"[A-Za-z_]{1,32}")


class CheckpointText:
    """The TextCodec and TextAssemblers of a checkpoint; without a tokenizer it serves token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        # A text longer than max_model_len times the longest token cannot fit, and need not be encoded.
        self._max_characters = max_model_len * tokenizer.longest_token if tokenizer else 0

    @classmethod
    def load(cls, directory: Path, max_model_len: int) -> CheckpointText:
        """Read tokenizer and template of a checkpoint. Raises InvalidConfig when one of them is broken."""
        return cls(Tokenizer.load(directory), ChatTemplate.load(directory), max_model_len)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._template is not None

    async def encode(self, prompt: inference_pb2.Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises InvalidRequest, and Unsupported without tokenizer or template."""
        match prompt.WhichOneof("content"):
            case "text":
                return await self._encode(prompt.text, "prompt.text", add_special_tokens)
            case "token_ids":
                return _not_empty(list(prompt.token_ids.ids), "prompt.token_ids.ids")
            case "chat":
                # A template writes the special tokens itself.
                return await self._encode(self._render(prompt.chat), "prompt.chat", add_special_tokens=False)
            case _:
                raise InvalidRequest(FieldViolation("prompt", "has no content; expected text, token_ids or chat"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises InvalidRequest for a negative id, Unsupported without a tokenizer."""
        return self._need_tokenizer().decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, None where the tokenizer has text alone. Unsupported without a tokenizer."""
        return self._need_tokenizer().token_bytes(token_id)

    def assembler(self, sampling: SamplingParams) -> TextAssembler:
        return NoText() if self._tokenizer is None else OutputText(self._tokenizer.detokenizer(), sampling)

    def close(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer()
        if not text:
            raise InvalidRequest(FieldViolation(field, "is empty; expected at least one character"))
        if len(text) > self._max_characters:
            what = f"has {len(text)} characters; the model's context cannot hold more than {self._max_characters}"
            raise InvalidRequest(FieldViolation(field, f"{what}; shorten the prompt", CONTEXT_LENGTH_EXCEEDED))
        return _not_empty(await tokenizer.encode(text, add_special_tokens), field)

    def _render(self, chat: inference_pb2.Chat) -> str:
        self._need_tokenizer()
        if self._template is None:
            raise Unsupported("this checkpoint has no chat template; render the messages yourself and send text")
        if not chat.messages:
            raise InvalidRequest(FieldViolation("prompt.chat.messages", "is empty; expected at least one message"))
        violations = [
            FieldViolation(f"prompt.chat.messages[{place}].role", f"is {message.role!r}; expected a word such as user")
            for place, message in enumerate(chat.messages)
            if not _ROLE.fullmatch(message.role)
        ]
        if violations:
            raise InvalidRequest(*violations)
        return self._template.render([(message.role, message.content) for message in chat.messages])

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            what = "this checkpoint has no tokenizer.json, so token ids alone can be served: send prompt.token_ids, or"
            raise Unsupported(f"{what} add one by `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`")
        return self._tokenizer


def _not_empty(token_ids: list[int], field: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(FieldViolation(field, "makes no token; expected at least one"))
    return token_ids
