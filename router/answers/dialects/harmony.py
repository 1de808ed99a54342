"""The output of gpt-oss: messages in channels, each with a head (`harmony`).

The analysis channel is the thought, the final channel the answer. A message that is addressed to `functions.NAME` is a
call. The marks are special tokens: the detokenizer must keep them, because without them nothing tells a head from text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from router.answers.dialects.json_text import copy_value
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.part_tape import FlowParser, PartTape
from router.answers.dialects.tape import Flow, Mismatch
from router.contracts.answer_parts import Parser

CHANNEL, START, MESSAGE, CONSTRAIN = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def harmony_parser(offered: Sequence[OfferedTool], reads_calls: bool) -> Parser:
    """Return the parser of all messages of an output. Without `reads_calls` a call is text of its thought."""
    return FlowParser(PartTape(offered), lambda tape: _messages(tape, reads_calls))


def _messages(tape: PartTape, reads_calls: bool) -> Flow[None]:
    while opener := (yield from tape.copy_until((CHANNEL, START, *ENDS), tape.words)):
        if opener not in ENDS:
            yield from tape.attempt(_message(tape, opener, reads_calls), len(opener))


def _message(tape: PartTape, opener: str, reads_calls: bool) -> Flow[None]:
    pieces = [opener]
    if not (yield from tape.copy_until((MESSAGE,), pieces.append)):
        raise Mismatch
    head = "".join(pieces)
    tape.release()
    recipient = _RECIPIENT.search(head)
    if recipient and recipient[1].startswith(_FUNCTIONS) and reads_calls:
        yield from _call(tape, recipient[1].removeprefix(_FUNCTIONS))
        return
    channel = _CHANNEL.search(head)
    is_thought = recipient is not None or (channel is not None and channel[1] == "analysis")
    yield from tape.copy_until(ENDS, tape.thought if is_thought else tape.words)


def _call(tape: PartTape, name: str) -> Flow[None]:
    tape.begin(name)
    for end in ENDS:
        if (yield from tape.take(end)):
            tape.arguments("{}")
            return
    if (yield from tape.peek()) == "{":  # whose strings may spell a mark
        yield from copy_value(tape, tape.arguments)
    yield from tape.copy_until(ENDS, tape.arguments)
