"""The texts of a checkpoint: prompts become tokens, and each sequence gets what turns its tokens into text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from common.contracts.errors import FieldViolation, InvalidConfig, InvalidRequest, Unsupported
from common.contracts.limits import SHORT_TEXT_BYTES
from common.contracts.types import SamplingParams
from quire.inference.v1 import inference_pb2
from router.answers.requested_tools import UNSEEN_TOOLS
from router.answers.text.assembler import AnswerText, NoText, OutputText
from router.answers.text.chat import ChatTemplate, PromptTooLong
from router.answers.text.chat_input import characters, chat_input, check_messages
from router.answers.text.control_texts import NO_TEXTS, ControlTexts
from router.answers.text.tokenizer import Tokenizer
from router.contracts.answer_parts import Parser
from router.contracts.ports import TextAssembler
from router.contracts.refusals import beyond_context

# Messages that are rendered on the event loop; a template takes some 10 microseconds for each.
_FEW_MESSAGES = 32
# Characters of tools and documents in JSON that are read and rendered there; 16,000 take a third of a millisecond.
_FEW_CHARACTERS = 16_000
# A vocabulary is often rounded up, by less than this.
_OF_ONE_MODEL = 0.9
_NAMED = 3
# Of a character in UTF-8, at most.
_CHARACTER_BYTES = 4
# Texts with fewer characters for each token of the context are encoded at once: most of them fit.
_USUAL_CHARACTERS = 4


class CheckpointText:
    """The TextCodec and TextAssemblers of a checkpoint; without a tokenizer it serves token ids only."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        max_model_len: int,
        chat_control_tokens: bool = False,
    ) -> None:
        """`chat_control_tokens`: text of a chat that spells a special token becomes it."""
        self._tokenizer = tokenizer
        self._template = template
        self._control = NO_TEXTS if chat_control_tokens else ControlTexts(self.hidden_tokens)
        self._max_model_len = max_model_len
        # A text longer than max_model_len times the longest token cannot fit, and need not be encoded.
        self._max_characters = max_model_len * tokenizer.longest_token if tokenizer else 0
        # The chat that was rendered last for `rendered`, and its prompt: `encode` mostly follows with the same one.
        self._last_rendered: tuple[bytes, tuple[str, ...]] | None = None

    @classmethod
    def load(
        cls,
        directory: Path,
        max_model_len: int,
        chat_template: Path | None = None,
        chat_control_tokens: bool = False,
    ) -> CheckpointText:
        """Read the tokenizer of a folder, and its template or that of a file. Raises InvalidConfig for broken ones."""
        template = ChatTemplate.load(directory, chat_template)
        return cls(Tokenizer.load(directory), template, max_model_len, chat_control_tokens)

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
                return await self._encode((prompt.text,), "prompt.text", add_special_tokens)
            case "token_ids":
                return self._ids(prompt.token_ids)
            case "chat":
                # A template writes the special tokens itself.
                return await self._encode(await self._prompt_of(prompt.chat), "prompt.chat", add_special_tokens=False)
            case _:
                raise InvalidRequest(FieldViolation("prompt", "has no content; expected text, token_ids or chat"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises InvalidRequest for a negative id, Unsupported without a tokenizer."""
        return self._need_tokenizer().decode(token_ids, skip_special_tokens)

    async def text_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return what `decode` returns; many tokens are decoded off the event loop."""
        return await self._need_tokenizer().text_of(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, None where the tokenizer has text alone. Unsupported without a tokenizer."""
        return self._need_tokenizer().token_bytes(token_id)

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary has it, "" for an unknown id. Raises Unsupported without a tokenizer."""
        return self._need_tokenizer().token_name(token_id)

    def assembler(
        self,
        sampling: SamplingParams,
        kept: Collection[str] = (),
        skip: bool = True,
        after: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> TextAssembler:
        if self._tokenizer is None:
            return NoText()
        detokenizer = self._tokenizer.detokenizer(kept, skip, after)
        if parser is None or not sampling.stop:
            return OutputText(detokenizer, sampling)
        return AnswerText(detokenizer, sampling, parser)

    @property
    def template_source(self) -> str | None:
        """The chat template in Jinja; None where the checkpoint has none."""
        return None if self._template is None else self._template.source

    @property
    def tool_template_source(self) -> str | None:
        """The chat template for chats with tools."""
        return None if self._template is None else self._template.for_tools.source

    @property
    def sees_tools(self) -> bool:
        """Whether the chat template writes the tools of a request into the prompt."""
        return self._template is not None and self._template.sees_tools

    def ends(self, named: Mapping[int, Sequence[str]], vocab_size: int) -> dict[int, list[str]]:
        """Return the tokens that end an answer and why: those that files name, and the marks of the template."""
        found = {each: list(why) for each, why in named.items() if each < vocab_size}
        if self._template is not None:
            for _, token, _ in self._template.end_marks(self.added_tokens):
                if token < vocab_size:
                    found.setdefault(token, []).append("the chat template ends a turn with it")
        return found

    def remarks(self) -> Sequence[str]:
        """Return what an operator should know of the chat template."""
        if self._template is None or self._tokenizer is None:
            return ()
        return [*self._template.remarks(), *(() if self.sees_tools else (UNSEEN_TOOLS,))]

    def check_vocabulary(self, vocab_size: int) -> str:
        """Return in what the tokenizer differs from a vocabulary of so many tokens; "" where both may be of one model.

        Raises InvalidConfig where texts have tokens that the model has not.
        """
        if self._tokenizer is None:
            return ""
        count = max(self._tokenizer.last_id, *(token for _, token, _ in self.added_tokens), -1) + 1
        sizes = f"the tokenizer has {count:,} tokens and the model {vocab_size:,}"
        if self._tokenizer.last_id >= vocab_size:
            what = f"{sizes}, so texts have tokens that the model does not know; name the model's own tokenizer"
            raise InvalidConfig(FieldViolation("--tokenizer", what))
        beyond = [text for text, token, _ in self.added_tokens if token >= vocab_size]
        if beyond:
            return f"{sizes}: a prompt with {', '.join(sorted(beyond)[:_NAMED])} is refused"
        if count < _OF_ONE_MODEL * vocab_size:
            return f"{sizes}: where it is another model's, answers lack the text of the other tokens"
        return ""

    @property
    def added_tokens(self) -> Sequence[tuple[str, int, bool]]:
        """Text and id of the tokens that were added to the vocabulary, and whether they are special."""
        return () if self._tokenizer is None else self._tokenizer.added_tokens

    @property
    def hidden_tokens(self) -> Mapping[str, int]:
        """The special tokens, which texts leave out, and their ids."""
        return {} if self._tokenizer is None else self._tokenizer.hidden_tokens

    async def rendered(self, chat: inference_pb2.Chat) -> str:
        """Return the prompt of a chat as text. Raises InvalidRequest, and Unsupported as `encode` does."""
        parts = await self._rendered(chat)
        self._last_rendered = chat.SerializeToString(), parts
        return "".join(parts)

    def close(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _ids(self, given: inference_pb2.TokenIds) -> list[int]:
        if len(given.ids) > self._max_model_len:
            what = f"the prompt has {len(given.ids)} tokens; shorten it"
            raise self._too_long("prompt.token_ids.ids", what)
        return _not_empty(list(given.ids), "prompt.token_ids.ids")

    async def _encode(self, parts: Sequence[str], field: str, add_special_tokens: bool) -> list[int]:
        tokenizer, text = self._need_tokenizer(), "".join(parts)
        if not text:
            raise InvalidRequest(FieldViolation(field, "is empty; expected at least one character"))
        self._check_characters(len(text), field)
        if len(text) > max(SHORT_TEXT_BYTES, _USUAL_CHARACTERS * self._max_model_len):
            await self._check_tokens(tokenizer, text, field)
        return _not_empty(await tokenizer.encode(parts[0], add_special_tokens, parts[1:]), field)

    def _check_characters(self, characters: int, field: str) -> None:
        if characters > self._max_characters:
            what = f"the prompt has {characters} characters, and these tokens hold at most {self._max_characters}"
            raise self._too_long(field, f"{what}; shorten it")

    async def _check_tokens(self, tokenizer: Tokenizer, text: str, field: str) -> None:
        """Refuse a text of far more tokens than the context, part by part: while it is encoded a token has 100 bytes.

        A part's ends may divide words, so the count is not exact, and twice the context is allowed here. Other texts
        are encoded between two parts.
        """
        counted, most = 0, 2 * self._max_model_len
        part = SHORT_TEXT_BYTES if text.isascii() else SHORT_TEXT_BYTES // _CHARACTER_BYTES
        for start in range(0, len(text), part):
            counted += await tokenizer.count(text[start : start + part])
            if counted > most:
                raise self._too_long(field, f"the prompt has more than {most} tokens; shorten it")

    async def _prompt_of(self, chat: inference_pb2.Chat) -> tuple[str, ...]:
        last, self._last_rendered = self._last_rendered, None
        if last is not None and last[0] == chat.SerializeToString():
            return last[1]
        return await self._rendered(chat)

    async def _rendered(self, chat: inference_pb2.Chat) -> tuple[str, ...]:
        """Return the parts of the prompt of a chat; a long one is rendered in an encoder thread."""
        tokenizer = self._need_tokenizer()
        if self._template is None:
            raise Unsupported("this checkpoint has no chat template; render the messages yourself and send text")
        check_messages(chat)
        self._check_characters(characters(chat), "prompt.chat")
        size = len(chat.tools_json) + len(chat.documents_json) + len(chat.template_kwargs_json)
        is_short = characters(chat) <= SHORT_TEXT_BYTES and size <= _FEW_CHARACTERS
        if is_short and len(chat.messages) <= _FEW_MESSAGES:
            return self._render(self._template, chat)
        return await tokenizer.off_loop(chat.ByteSize(), partial(self._render, self._template, chat))

    def _render(self, template: ChatTemplate, chat: inference_pb2.Chat) -> tuple[str, ...]:
        try:
            return template.parts(chat_input(chat), self._max_characters, self._control)
        except PromptTooLong as error:
            raise self._too_long("prompt.chat", str(error)) from None

    def _too_long(self, field: str, what: str) -> InvalidRequest:
        return InvalidRequest(beyond_context(field, self._max_model_len, what))

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            what = "this checkpoint has no tokenizer.json, so only token ids can be served: send prompt.token_ids, or"
            raise Unsupported(f"{what} add one by `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`")
        return self._tokenizer


def _not_empty(token_ids: list[int], field: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(FieldViolation(field, "makes no token; expected at least one"))
    return token_ids
