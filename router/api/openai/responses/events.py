"""Builds a response from the parts of an answer: its items, and the typed events of its stream.

Every token of a stream passes here, so the lines of deltas are written from a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Final

from router.api.openai.responses.tool_kinds import CUSTOM, ToolKinds, ToolName
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words

Json = dict[str, Any]
COMPLETED, INCOMPLETE, FAILED, CANCELLED = "completed", "incomplete", "failed", "cancelled"
QUEUED, IN_PROGRESS = "queued", "in_progress"
RUNNING: Final = (QUEUED, IN_PROGRESS)
# Tools whose names are what the model calls them.
_FUNCTIONS: Final = ToolKinds()
_DELTAS: Final = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


@dataclass(slots=True)
class _Item:
    """An output item that is being written."""

    body: Json
    index: int
    # What is called, where it is a call.
    tool: ToolName | None = None
    texts: list[str] = field(default_factory=list)
    # Of a message: the log-probabilities of its tokens, each a list in JSON without its brackets.
    logprobs: list[str] = field(default_factory=list)
    # The line of a delta up to its text.
    opening: str = ""

    @property
    def kind(self) -> str:
        return str(self.body["type"])

    @property
    def all_logprobs(self) -> list[Json]:
        return list(json.loads(f"[{','.join(self.logprobs)}]"))

    def written(self, status: str) -> Json:
        """Return the item with its text so far."""
        text = "".join(self.texts)
        if self.tool is not None:
            return self.tool.item({key: self.body[key] for key in ("id", "call_id")}, text, status)
        return self.body | {"content": [self.part(text)], "status": status}

    def part(self, text: str) -> Json:
        return _part(self.kind, text, self.all_logprobs)


class ResponseBuilder:
    """Builds one response. Methods return the lines of events; without `streamed` these are empty."""

    def __init__(
        self,
        body: Json,
        new_id: Callable[[str], str],
        now: Callable[[], float],
        streamed: bool,
        kinds: ToolKinds = _FUNCTIONS,
    ) -> None:
        """`body` has the fields that are known at the beginning; `new_id` makes an id after a prefix."""
        self._body, self._new_id, self._now, self._streamed = body, new_id, now, streamed
        self._kinds = kinds
        self._done: list[Json] = []
        self._open: _Item | None = None
        # White space before an item is known; a message of nothing else would be noise between two calls.
        self._space = ""
        # Log-probabilities of tokens whose text has not come yet, in JSON.
        self._logprobs = list[str]()
        self.sequence_number = 0

    @property
    def status(self) -> str:
        return str(self._body["status"])

    def body(self) -> Json:
        """Return the response as it is now."""
        open_items = [self._open.written(INCOMPLETE if self._ended else IN_PROGRESS)] if self._open else []
        return self._body | {"output": [*self._done, *open_items]}

    def begin(self, status: str = IN_PROGRESS) -> str:
        """Open the response, or let a queued one go on."""
        first = self.sequence_number == 0 and not self._done
        self._body["status"] = status
        opened = self._state("response.created") if first else ""
        return opened + self._state(f"response.{status}")

    def add(self, parts: Sequence[Part], logprobs: str = "") -> str:
        """Add what came next; `logprobs` are those of its tokens, a list in JSON without its brackets.

        A message keeps those of tokens that came with its words, or with none, without the mark that ends a thought.
        """
        if logprobs and (parts or self._open is None or self._open.kind != "reasoning"):
            self._logprobs.append(logprobs)
        return "".join(map(self._add, parts))

    def finish(self, usage: Json, ran_out: bool) -> str:
        """End the response after its last part; `ran_out` of the tokens that it may have."""
        lines = "" if self._open or self._done else self._begin_text("message", "msg_", self._space)
        status = INCOMPLETE if ran_out else COMPLETED
        lines += self._close(status)
        self._body["usage"] = usage
        if ran_out:
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        return lines + self._end(status)

    def fail(self, code: str, message: str) -> str:
        self._body["error"] = {"code": code, "message": message}
        return self._end(FAILED)

    def cancel(self) -> str:
        """End the response on its reader's wish. OpenAI has no event for that."""
        return self._end(CANCELLED)

    def _add(self, part: Part) -> str:
        match part:
            case Words(text):
                return self._text("message", "msg_", text)
            case Thought(text):
                self._logprobs.clear()
                return self._text("reasoning", "rs_", text)
            case CallBegun(name=name):
                self._logprobs.clear()
                return self._begin_call(name)
            case CallArguments(text=text):
                return self._delta(text)

    def _text(self, kind: str, prefix: str, text: str) -> str:
        if self._open is not None and self._open.kind == kind:
            return self._delta(text)
        text, self._space = self._space + text, ""
        if not text.strip():
            self._space = text
            return ""
        return self._begin_text(kind, prefix, text)

    def _begin_text(self, kind: str, prefix: str, text: str) -> str:
        role: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"id": self._new_id(prefix), "type": kind, **role, "content": [], "status": IN_PROGRESS}
        lines = self._begin_item(item) + self._part("response.content_part.added", _part(kind, "", []))
        return lines + (self._delta(text) if text else "")

    def _begin_call(self, name: str) -> str:
        self._space, tool = "", self._kinds.named(name)
        ids = {"id": self._new_id("ctc_" if tool.kind == CUSTOM else "fc_"), "call_id": self._new_id("call_")}
        return self._begin_item(tool.item(ids, "", IN_PROGRESS), tool)

    def _begin_item(self, body: Json, tool: ToolName | None = None) -> str:
        lines = self._close(COMPLETED)
        self._open = item = _Item(body, len(self._done), tool)
        item.opening = f'{_head({"type": _DELTAS[item.kind], **self._place(item)})},"delta":'
        return lines + self._event("response.output_item.added", output_index=item.index, item=body)

    def _delta(self, text: str) -> str:
        assert self._open is not None
        self._open.texts.append(text)
        logprobs = ""
        if self._open.kind == "message":
            found = ",".join(self._logprobs)
            logprobs = f',"logprobs":[{found}]'
            if found:
                self._open.logprobs.append(found)
        self._logprobs.clear()
        if not self._streamed or self._open.kind == "custom_tool_call":  # an input is known when it has ended
            return ""
        number, self.sequence_number = self.sequence_number, self.sequence_number + 1
        return f'{self._open.opening}{encode_basestring(text)}{logprobs},"sequence_number":{number}}}\n\n'

    def _close(self, status: str) -> str:
        """End the open item, if there is one."""
        if (item := self._open) is None:
            return ""
        body, text, lines = item.written(status), "".join(item.texts), ""
        if item.kind == "function_call":
            name = {"name": body["name"], "arguments": text}
            lines = self._event("response.function_call_arguments.done", **self._place(item), **name)
        elif item.kind == "custom_tool_call":
            lines = self._event(_DELTAS[item.kind], **self._place(item), delta=body["input"])
            lines += self._event("response.custom_tool_call_input.done", **self._place(item), input=body["input"])
        else:
            more: Json = {"logprobs": item.all_logprobs} if item.kind == "message" else {}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            lines = self._event(f"response.{kind}.done", **self._place(item), text=text, **more)
            lines += self._part("response.content_part.done", item.part(text))
        self._open = None
        self._done.append(body)
        return lines + self._event("response.output_item.done", output_index=item.index, item=body)

    def _part(self, event: str, part: Json) -> str:
        assert self._open is not None
        return self._event(event, **self._place(self._open), part=part)

    def _place(self, item: _Item) -> Json:
        content = {} if item.tool is not None else {"content_index": 0}
        return {"item_id": item.body["id"], "output_index": item.index, **content}

    @property
    def _ended(self) -> bool:
        return self.status not in RUNNING

    def _end(self, status: str) -> str:
        self._body["status"] = status
        if status == COMPLETED:
            self._body["completed_at"] = self._now()
        return "" if status == CANCELLED else self._state(f"response.{status}")

    def _state(self, event: str) -> str:
        return self._event(event, response=self.body()) if self._streamed else ""

    def _event(self, event: str, **fields: Any) -> str:
        if not self._streamed:
            return ""
        number, self.sequence_number = self.sequence_number, self.sequence_number + 1
        return f'{_head({"type": event, **fields})},"sequence_number":{number}}}\n\n'


def _head(event: Json) -> str:
    """Return the line of an event, without the closing brace of its object."""
    return f"event: {event['type']}\ndata: {_dumps(event)[:-1]}"


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    """Return the content of a message, or of a thought."""
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
