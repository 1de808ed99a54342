"""Ids of the events of a stream, and what a client says with one: `Last-Event-ID`, with the body that it sent first.

An id is `<request id>:<received>`. The second part has, for each choice, its tokens so far. `r` follows where the text
has come that the output held back at its end, `e` where its last event has: `quire-4f..:12,7e`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_REQUEST_ID_CHARS, MAX_SEQUENCES
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.events import Finished, GenerateEvent, Tokens

HEADER: Final = "last-event-id"
_CHOICE: Final = r"\d{1,9}[re]?"
_ID: Final = rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}"
_FORM: Final = re.compile(rf"({_ID}):((?:{_CHOICE},){{0,{MAX_SEQUENCES - 1}}}{_CHOICE})")
_ALL: Final = (1 << 31) - 1


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
        """Raises InvalidRequest for what is no id of ours."""
        found = _FORM.fullmatch(header)
        if found is None:
            what = "is no id of an event of this API; send the last `id` of the stream that broke, or leave it out"
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
