"""A message of Anthropic's API, from the blocks of an answer: as a whole, or as typed events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Final

from router.api.anthropic.content_blocks import BlockBegun, BlockEnded, BlockText, Step
from router.api.openai.answer import Bill, Piece

Json = dict[str, Any]
# An event that clients skip.
PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
_DELTAS: Final = {
    "text": '{"type":"text_delta","text":',
    "thinking": '{"type":"thinking_delta","thinking":',
    "tool_use": '{"type":"input_json_delta","partial_json":',
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an answer ended; `sequence` is the stop sequence that ended it, if one did."""

    reason: str
    sequence: str | None = None


def stop_of(piece: Piece, lowered: bool) -> Stop:
    """Return why the last piece ended an answer. `lowered`: the context holds fewer tokens than were asked for."""
    if piece.finish_reason == "length":
        return Stop("model_context_window_exceeded" if lowered else "max_tokens")
    if piece.finish_reason == "tool_calls":
        return Stop("tool_use")
    if isinstance(piece.stop_reason, str):
        return Stop("stop_sequence", piece.stop_reason)
    return Stop("end_turn")


def usage_of(bill: Bill, output: int) -> Json:
    """Return the tokens: those of the prompt that were cached are apart."""
    return {
        "input_tokens": bill.prompt_tokens - bill.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": bill.cached_tokens,
        "output_tokens": output,
    }


def head(name: str, model: str) -> Json:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


@dataclass(slots=True)
class _Written:
    """A block as parts of its JSON; `text` is the JSON of a tool's input as it came."""

    begun: BlockBegun
    text: list[str] = field(default_factory=list)
    signature: str = ""

    def json(self) -> Iterator[bytes]:
        match self.begun.kind:
            case "tool_use":
                named = {"type": "tool_use", "id": self.begun.id, "name": self.begun.name}
                yield f'{_dumps(named)[:-1]},"input":{_object("".join(self.text))}}}'.encode()
            case "thinking":
                yield b'{"type":"thinking","thinking":"'
                yield from map(_inner, self.text)
                yield f'","signature":{_dumps(self.signature)}}}'.encode()
            case "text":
                yield b'{"type":"text","text":"'
                yield from map(_inner, self.text)
                yield b'","citations":null}'


class WholeMessage:
    """Collects the blocks of an answer. `grow` is called with the bytes of each piece, and may raise."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self._blocks: list[_Written] = []

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case BlockBegun():
                    self._blocks.append(_Written(step))
                case BlockText():
                    self._grow(len(step.text.encode()))
                    self._blocks[-1].text.append(step.text)
                case BlockEnded():
                    self._blocks[-1].signature = step.signature

    def parts(self, opening: Json, stop: Stop, usage: Json) -> Iterator[bytes]:
        """Yield the JSON of the message."""
        yield f'{_dumps(opening)[:-1]},"content":['.encode()
        for place, block in enumerate(self._blocks):
            if place:
                yield b","
            yield from block.json()
        ending = {"stop_reason": stop.reason, "stop_sequence": stop.sequence, "usage": usage}
        yield f"],{_dumps(ending)[1:]}".encode()


def opening_event(opening: Json, usage: Json) -> str:
    message = opening | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return _event("message_start", message=message)


def step_events(steps: Iterable[Step]) -> str:
    """Return the events of a few steps; every token of a stream passes here."""
    return "".join(map(_step_event, steps))


def closing_events(stop: Stop, usage: Json) -> str:
    delta = {"stop_reason": stop.reason, "stop_sequence": stop.sequence}
    return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")


def error_event(body: Json) -> str:
    """Return the event of an error that comes after the status."""
    return f"event: error\ndata: {_dumps(body)}\n\n"


def _step_event(step: Step) -> str:
    match step:
        case BlockText(index, kind, text):
            return _delta(index, f"{_DELTAS[kind]}{encode_basestring(text)}}}")
        case BlockBegun(index):
            return _event("content_block_start", index=index, content_block=_empty(step))
        case BlockEnded(index, kind, signature):
            end = _event("content_block_stop", index=index)
            if kind != "thinking":
                return end
            return _delta(index, f'{{"type":"signature_delta","signature":{_dumps(signature)}}}') + end


def _delta(index: int, delta: str) -> str:
    data = f'{{"type":"content_block_delta","index":{index},"delta":{delta}}}'
    return f"event: content_block_delta\ndata: {data}\n\n"


def _event(event: str, **fields: Any) -> str:
    return f"event: {event}\ndata: {_dumps({'type': event, **fields})}\n\n"


def _empty(begun: BlockBegun) -> Json:
    """Return a block at its beginning."""
    if begun.kind == "tool_use":
        return {"type": "tool_use", "id": begun.id, "name": begun.name, "input": {}}
    if begun.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _object(text: str) -> str:
    """Return the JSON of a tool's input; an empty object for a call that the output left incomplete."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "{}"
    return text if isinstance(found, dict) else "{}"


def _inner(text: str) -> bytes:
    return encode_basestring(text)[1:-1].encode()


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
