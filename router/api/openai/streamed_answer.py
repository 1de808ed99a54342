"""A streamed answer of the OpenAI-compatible API: its lines, and the ids by which a client goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_REQUEST_ID_CHARS, MAX_SEQUENCES
from quire.inference.v1 import inference_pb2 as pb
from router.api.openai.answer import Answer, Json, Piece, new_call_id
from router.api.openai.logprobs import lists
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words
from router.contracts.events import Finished, GenerateEvent, Tokens

LAST_EVENT_HEADER: Final = "last-event-id"
_CHOICE: Final = r"\d{1,9}[re]?"
_ID: Final = rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}"
_FORM: Final = re.compile(rf"({_ID}):((?:{_CHOICE},){{0,{MAX_SEQUENCES - 1}}}{_CHOICE})")
_ALL: Final = (1 << 31) - 1


# Ids of the events of a stream, and what a client says with one: `Last-Event-ID`, with the body that it sent first.
# An id is `<request id>:<received>`. The second part has, for each choice, its tokens so far. `r` follows where the
# text has come that the output held back at its end, `e` where its last event has: `quire-4f..:12,7e`.
@dataclass(slots=True)
class _Choice:
    tokens: int = 0
    rested: bool = False
    ended: bool = False

    @staticmethod
    def of(part: str) -> _Choice:
        return _Choice(int(part.rstrip("re")), rested=part[-1] in "re", ended=part[-1] == "e")

    def __str__(self) -> str:
        return f"{self.tokens}{'e' if self.ended else 'r' if self.rested else ''}"


@dataclass(frozen=True, slots=True)
class LastEvent:
    """What a client has of a request."""

    request_id: str
    choices: Sequence[_Choice]

    @staticmethod
    def of(header: str) -> LastEvent:
        """Raises InvalidRequest for what is not an event id of this API."""
        found = _FORM.fullmatch(header)
        if found is None:
            what = "is not an event id of this API; send the last `id` of the stream that broke, or leave it out"
            raise InvalidRequest(FieldViolation("Last-Event-ID", what))
        parts = found[2].split(",")
        return LastEvent(
            found[1], [_Choice(int(part.rstrip("re")), part[-1] in "re", part[-1] == "e") for part in parts]
        )

    def check(self, choices: int) -> None:
        """Raise InvalidRequest where a body, or the request that is resumed, has other choices."""
        if len(self.choices) != choices:
            what = f"is of an answer with {len(self.choices)} choices, and the body asks for {choices}"
            raise InvalidRequest(FieldViolation("Last-Event-ID", f"{what}; send the body of the stream that broke"))

    def request(self, choices: int) -> pb.GenerateRequest:
        """Return what resumes the request. Raises InvalidRequest where the body asks for other choices."""
        self.check(choices)
        received = [choice.tokens for choice in self.choices]
        resume = pb.Resume(request_id=self.request_id, output_tokens_received=received, prompt_logprobs_received=_ALL)
        return pb.GenerateRequest(resume=resume)


class EventIds:
    """Follows one request's events: gives ids, and says which events the client has."""

    def __init__(self, request_id: str, choices: int, last: LastEvent | None = None) -> None:
        self._request_id, self._choices = request_id, [_Choice() for _ in range(choices)]
        self._last = last

    def take(self, event: GenerateEvent) -> bool:
        """Count an event; return whether the client has it already."""
        if not isinstance(event, Tokens | Finished):
            return False
        choice = self._choices[event.index]
        known = None if self._last is None else self._last.choices[event.index]
        if isinstance(event, Finished):
            choice.ended = True
            return known is not None and known.ended
        if not event.token_ids:
            choice.rested = True
            return known is not None and known.rested
        choice.tokens += len(event.token_ids)
        return known is not None and choice.tokens <= known.tokens

    def marked(self, lines: str) -> str:
        """Return one or several events, the last of them with the id of what has come by then."""
        before, _, last = lines.removesuffix("\n\n").rpartition("\n\n")
        mark = ",".join(map(str, self._choices))
        return f"{before}{'' if not before else chr(10) * 2}id: {self._request_id}:{mark}\n{last}\n\n"


class NoEventIds:
    """Without `stream_options.event_ids`, which some clients could not read, and for an answer to several prompts."""

    def take(self, event: GenerateEvent) -> bool:
        return False

    def marked(self, lines: str) -> str:
        return lines


DONE = "data: [DONE]\n\n"


# A streamed answer of the OpenAI-compatible API: each piece becomes one line of server-sent events.
# Every token of a stream passes here, so lines are written from a template. A chunk takes 0.3 microseconds, where
# `json.dumps` of the whole chunk took 3.2 (CPython 3.11).
class StreamedAnswer:
    """Writes the lines of one answer; the answer must have taken its first event."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._form = answer, answer.form
        kind = "chat.completion.chunk" if self._form.chat else "text_completion"
        # Without the closing brace of the object.
        self._head = f"data: {_dumps(answer.head(kind))[:-1]}"
        self._logprobs = answer.new_logprobs()
        self._prompts = answer.new_prompt_logprobs()

    def openings(self) -> Iterator[str]:
        """Yield the lines before the first token: the role of each choice in a chat, else its prompt if wanted."""
        for choice in self._form.choices(self._answer.prompts):
            ids = self._form.prompt_ids(choice.index)
            if self._form.chat:
                # Whether words or calls follow shows only later.
                content = encode_basestring(choice.text) if choice.text or self._form.reading is None else "null"
                yield self._line(choice, f'"delta":{{"role":"assistant","content":{content}}}', ids)
            elif self._form.echo or ids:
                text = f'"text":{encode_basestring(choice.text)}{ids}'
                yield self._line(choice, text, logprobs=self._first_logprobs(choice.index))

    def line(self, piece: Piece) -> str:
        """Return the line of a piece, "" for one without content. Each part that was read has a line of its own."""
        if piece.prompt_logprobs:
            return self._prompt_line(piece)
        if self._form.reading is not None:
            return self._lines(piece)
        ids = piece.token_ids if self._form.return_token_ids else ()
        if not (piece.text or piece.logprobs or piece.finish_reason or ids):
            return ""
        if not self._form.chat:
            return self._line(piece, f'"text":{encode_basestring(piece.text)}')
        content = f'"content":{encode_basestring(piece.text)}' if piece.text else ""
        return self._line(piece, f'"delta":{{{content}}}')

    def _first_logprobs(self, index: int) -> str:
        """Return the lists of a prompt's first token; "null" where they are not wanted."""
        if self._form.of_prompts.echoed is None:
            return "null"
        prompt = index // self._form.sequences
        return f"{{{lists(self._prompts[prompt].first(self._form.first_tokens[prompt]))}}}"

    def _prompt_line(self, piece: Piece) -> str:
        """Return a line with the next log-probabilities of an echoed prompt, whose text came first."""
        columns = self._prompts[piece.index // self._form.sequences].columns(piece.prompt_logprobs)
        return self._line(piece, '"text":""', logprobs=f"{{{lists(columns)}}}") if columns else ""

    def _lines(self, piece: Piece) -> str:
        """Return the lines of a piece that was read; its tokens and its end belong to the last one."""
        deltas = [delta_of(part, self._form.older_calls) for part in piece.parts]
        last = "{}" if piece.finish_reason or not deltas else deltas.pop()
        lines = [self._line(Piece(piece.index), f'"delta":{delta}') for delta in deltas]
        ids = piece.token_ids if self._form.return_token_ids else ()
        if last != "{}" or piece.logprobs or piece.finish_reason or ids:
            lines.append(self._line(piece, f'"delta":{last}'))
        return "".join(lines)

    def closing(self) -> str:
        """Return the line with the usage of the stream, "" if it is not wanted."""
        if not self._form.include_usage:
            return ""
        return f'{self._head},"choices":[],"usage":{_dumps(self._answer.bill.body())}}}\n\n'

    def _line(self, piece: Piece, text: str, more: str = "", logprobs: str = "") -> str:
        logprobs = logprobs or self._logprobs[piece.index].text(piece.logprobs)
        finish = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        stop = "null" if piece.stop_reason is None else _dumps(piece.stop_reason)
        ids = f',"token_ids":{_dumps(list(piece.token_ids))}' if self._form.return_token_ids else ""
        choice = (
            f'"index":{piece.index},{text},"logprobs":{logprobs},"finish_reason":{finish},"stop_reason":{stop}{ids}'
        )
        return f'{self._head},"choices":[{{{choice}}}]{more}{self._usage()}}}\n\n'

    def _usage(self) -> str:
        if not self._form.include_usage:
            return ""
        return f',"usage":{_dumps(self._answer.bill.so_far())}' if self._form.continuous_usage else ',"usage":null'


def delta_of(part: Part, older: bool) -> str:
    """Return what a part adds to a message, in JSON. A call begins with its name; its arguments follow in pieces."""
    match part:
        case Thought(text):
            thought = encode_basestring(text)
            return f'{{"reasoning_content":{thought},"reasoning":{thought}}}'
        case Words(text):
            return f'{{"content":{encode_basestring(text)}}}'
        case CallBegun(index, name):
            function = f'{{"name":{encode_basestring(name)},"arguments":""}}'
            if older:
                return f'{{"function_call":{function}}}'
            call = f'"index":{index},"id":"{new_call_id()}","type":"function","function":{function}'
            return f'{{"tool_calls":[{{{call}}}]}}'
        case CallArguments(index, text):
            function = f'{{"arguments":{encode_basestring(text)}}}'
            if older:
                return f'{{"function_call":{function}}}'
            return f'{{"tool_calls":[{{"index":{index},"function":{function}}}]}}'


def error_line(body: Json) -> str:
    """Return the line of an error that comes after the status; clients look for `error` in each chunk."""
    return f"data: {_dumps(body)}\n\n"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
