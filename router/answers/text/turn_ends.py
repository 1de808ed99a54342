"""The tokens that end an answer: those that the checkpoint's files name, and the mark behind an answer in its template.

A template ends a turn by a token that base models do not know as an end. A model that was trained with it and never
meets its end goes on with the user's next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Text, id, and whether texts leave it out.
AddedToken: TypeAlias = "tuple[str, int, bool]"


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """What a template writes behind an answer that is the last message, and between a thought and the answer.

    `asks` is what it writes behind the user's words although no answer was asked for, where that begins an answer.
    `between` stands between an answer and the user's next words.
    """

    behind: str
    inside: str = ""
    asks: str = ""
    between: str = ""


def end_mark(marks: TurnMarks, added: Iterable[AddedToken]) -> AddedToken | None:
    """Return the first token behind an answer that neither begins the next one nor stands inside an answer.

    Tokens that texts leave out come first: a template may close a tag before it ends the turn.
    """
    tokens = [token for token in added if token[0]]
    others = set(_found(marks.inside, tokens))
    asks = _found(marks.asks, tokens)
    if asks and asks[-1] not in _found(marks.between, tokens):
        others.add(asks[-1])
    behind = [token for token in _found(marks.behind, tokens) if token not in others]
    return next((token for token in behind if token[2]), behind[0] if behind else None)


def _found(text: str, tokens: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the tokens in a text, in their order; of those that begin at one place the longest."""
    found, place = list[AddedToken](), 0
    while place < len(text):
        here = max(
            (token for token in tokens if text.startswith(token[0], place)), key=lambda t: len(t[0]), default=None
        )
        if here is None:
            place += 1
        else:
            found.append(here)
            place += len(here[0])
    return found
