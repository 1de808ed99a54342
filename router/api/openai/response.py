"""A whole answer of the OpenAI-compatible API: JSON that is made as the output comes, and sent in parts.

An answer may have 50 MB. Encoded at its end it would hold up the event loop for seconds, and as objects of Python it
would take ten times the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.contracts.types import TokenLogprobs
from router.api.openai.answer import Answer, Form, Json, Piece, new_call_id
from router.api.openai.logprobs import ChoiceLogprobs, Columns
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words

# Bytes that are handed to the connection at once; it takes more only when most of them are sent.
_PART_BYTES: Final = 256 << 10
_MESSAGE: Final = '"message":{"role":"assistant","content":'
# Clients read one of two names.
_THOUGHT_NAMES: Final = ("reasoning_content", "reasoning")
_NO_THOUGHT: Final = "".join([f',"{name}":null' for name in _THOUGHT_NAMES])


@dataclass(slots=True)
class ReadParts:
    """The message of one choice as it was read, in JSON. Each call has its name, and its arguments in pieces."""

    thoughts: list[bytes] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)
    calls: list[tuple[bytes, list[bytes]]] = field(default_factory=list)

    def add(self, part: Part) -> bytes:
        """Take a part; return what is kept of it."""
        match part:
            case Thought(text) | Words(text):
                kept = self.thoughts if isinstance(part, Thought) else self.words
                kept.append(_inner(text))
                return kept[-1]
            case CallBegun(name=name):
                self.calls.append((_inner(name), []))
                return self.calls[-1][0]
            case CallArguments(text=text):
                self.calls[-1][1].append(_inner(text))
                return self.calls[-1][1][-1]

    def message(self, older: bool) -> Iterator[bytes]:
        yield _MESSAGE.encode()
        # OpenAI's own form of a message that has calls alone.
        yield from (b"null",) if self.calls and not self.words else _text(self.words)
        for name in _THOUGHT_NAMES if self.thoughts else ():
            yield f',"{name}":'.encode()
            yield from _text(self.thoughts)
        if not self.thoughts:
            yield _NO_THOUGHT.encode()
        yield b',"refusal":null'
        yield from self._older_call() if older else self._calls()
        yield b"}"

    def _calls(self) -> Iterator[bytes]:
        for place, call in enumerate(self.calls):
            yield b"," if place else b',"tool_calls":['
            yield f'{{"id":"{new_call_id()}","type":"function","function":'.encode()
            yield from _function(*call)
            yield b"}"
        if self.calls:
            yield b"]"

    def _older_call(self) -> Iterator[bytes]:
        if self.calls:
            yield b',"function_call":'
            yield from _function(*self.calls[0])


@dataclass(slots=True)
class PromptParts:
    """The log-probabilities of a prompt, in JSON: the lists that an echoed prompt has, and vLLM's form."""

    columns: dict[str, list[bytes]] = field(default_factory=dict)
    ranked: list[bytes] = field(default_factory=list)

    def add(self, columns: Columns, ranked: str = "") -> int:
        """Add what came next; return its bytes."""
        added = _append(self.columns, columns)
        if ranked:
            added.append(ranked.encode())
            self.ranked.append(added[-1])
        return sum(map(len, added))


def _append(lists: dict[str, list[bytes]], columns: Columns) -> list[bytes]:
    """Append to lists by name; return what was appended."""
    added = [column.encode() for column in columns.values()]
    for name, part in zip(columns, added, strict=True):
        lists.setdefault(name, []).append(part)
    return added


@dataclass(slots=True)
class _Choice:
    """One choice: parts of its lists and texts, in JSON without what surrounds them."""

    form: Form
    logprobs: ChoiceLogprobs
    text: list[bytes] = field(default_factory=list)
    read: ReadParts = field(default_factory=ReadParts)
    token_ids: list[bytes] = field(default_factory=list)
    columns: dict[str, list[bytes]] = field(default_factory=dict)
    prompt: PromptParts = field(default_factory=PromptParts)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> int:
        """Take an addition; return its bytes."""
        added = [_inner(piece.text)]
        self.text += added
        added += [self.read.add(part) for part in piece.parts]
        if self.form.return_token_ids and piece.token_ids:
            added.append(",".join(map(str, piece.token_ids)).encode())
            self.token_ids.append(added[-1])
        if piece.logprobs:
            added += _append(self.columns, self.logprobs.columns(piece.logprobs))
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return sum(map(len, added))

    def parts(self, index: int) -> Iterator[bytes]:
        yield f'{{"index":{index},'.encode()
        if self.form.reading is not None:
            yield from self.read.message(self.form.older_calls)
        else:
            before, after = (_MESSAGE, f'{_NO_THOUGHT},"refusal":null}}') if self.form.chat else ('"text":', "")
            yield f'{before}"'.encode()
            yield from self.text
            yield f'"{after}'.encode()
        yield b',"logprobs":'
        yield from self._logprobs()
        yield f',"finish_reason":{_dumps(self.finish_reason)},"stop_reason":{_dumps(self.stop_reason)}'.encode()
        yield from _list(b',"token_ids"', self.token_ids if self.form.return_token_ids else None)
        if not self.form.chat:
            yield from self.of_prompt(index)
        yield b"}"

    def of_prompt(self, index: int) -> Iterator[bytes]:
        """Yield the members with the prompt's tokens and their log-probabilities in vLLM's form; null if not wanted."""
        yield (self.form.prompt_ids(index) or ',"prompt_token_ids":null').encode()
        wanted = self.form.of_prompts.ranked is not None
        yield from _list(b',"prompt_logprobs"', [b"null", *self.prompt.ranked] if wanted else None)

    def _logprobs(self) -> Iterator[bytes]:
        columns = {name: list(parts) for name, parts in self.prompt.columns.items()}
        for name, parts in self.columns.items():
            columns[name] = columns.get(name, []) + parts
        if not columns:
            yield b"null"
            return
        for place, (name, parts) in enumerate(columns.items()):
            yield from _list(f'{"," if place else "{"}"{name}"'.encode(), parts)
        yield b',"refusal":null}' if self.form.chat else b"}"


class WholeAnswer:
    """Collects the pieces of an answer. `grow` is called with the bytes of each, and may raise."""

    def __init__(self, answer: Answer, grow: Callable[[int], None] = lambda size: None) -> None:
        self._answer, self._grow = answer, grow
        form = answer.form
        self._choices = [_Choice(form, logprobs) for logprobs in answer.new_logprobs()]
        self._prompts, self._of_prompt = answer.new_prompt_logprobs(), [PromptParts() for _ in range(answer.prompts)]
        for choice in form.choices(answer.prompts):
            self.add(choice)
        for place, begun in enumerate(self._choices):
            begun.prompt = self._of_prompt[place // form.sequences]
        for prompt, token in enumerate(form.first_tokens):
            self._of_prompt[prompt].add(self._prompts[prompt].first(token))

    def add(self, piece: Piece) -> None:
        if piece.prompt_logprobs:
            self._add_prompt(piece.index // self._answer.form.sequences, piece.prompt_logprobs)
        else:
            self._grow(self._choices[piece.index].add(piece))

    def _add_prompt(self, prompt: int, entries: Sequence[TokenLogprobs]) -> None:
        """Add what the choices of a prompt share. A completion has it in each choice, a chat once."""
        encoder, form = self._prompts[prompt], self._answer.form
        size = self._of_prompt[prompt].add(encoder.columns(entries), encoder.ranked(entries))
        self._grow(size if form.chat else size * form.sequences)

    def parts(self) -> Iterator[bytes]:
        """Yield the JSON of the answer, which has taken its last event."""
        kind = "chat.completion" if self._answer.form.chat else "text_completion"
        yield f'{_dumps(self._answer.head(kind))[:-1]},"choices":['.encode()
        for index, choice in enumerate(self._choices):
            if index:
                yield b","
            yield from choice.parts(index)
        if self._answer.form.chat:
            yield b"]"
            yield from self._choices[0].of_prompt(0)
            yield b","
        else:
            yield b"],"
        yield f'"usage":{_dumps(self._answer.bill.body())}}}'.encode()


class WholeResponse(Response):
    """Sends JSON that has been made already, in parts; `sent` is called at the end, whatever that is."""

    media_type = "application/json"

    def __init__(self, parts: Iterable[bytes], headers: Mapping[str, str], sent: Callable[[], None]) -> None:
        self._parts, self._sent = list(parts), sent
        size = sum(map(len, self._parts))
        super().__init__(headers={**headers, "content-length": str(size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in _gathered(self._parts):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._sent()


def _gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in larger parts."""
    gathered = bytearray()
    for part in parts:
        gathered += part
        if len(gathered) >= _PART_BYTES:
            yield bytes(gathered)
            gathered.clear()
    yield bytes(gathered)


def _inner(text: str) -> bytes:
    """Return a text in JSON, without its quotes."""
    return encode_basestring(text)[1:-1].encode()


def _text(parts: Iterable[bytes]) -> Iterator[bytes]:
    yield b'"'
    yield from parts
    yield b'"'


def _function(name: bytes, arguments: Iterable[bytes]) -> Iterator[bytes]:
    yield b'{"name":"' + name + b'","arguments":'
    yield from _text(arguments)
    yield b"}"


def _list(name: bytes, parts: Iterable[bytes] | None) -> Iterator[bytes]:
    """Yield a list after its name, or null."""
    if parts is None:
        yield name + b":null"
        return
    yield name + b":["
    for place, part in enumerate(parts):
        yield b"," + part if place else part
    yield b"]"


def _dumps(value: Json | str | int | None) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
