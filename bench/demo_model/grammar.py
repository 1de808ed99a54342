"""Checks whether text consists of sentences of the demo world: the measure of fluency."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from cli.demo_model import words, world

_NUMBER: Final = r"\d+"


def well_formed(text: str) -> bool:
    """True when `text` is one or more whole sentences, each of which the world's grammar can make."""
    return _TEXT.fullmatch(text.strip()) is not None


def _any_of(choices: Iterable[str]) -> str:
    return "(?:" + "|".join(sorted(choices)) + ")"


def _pattern(template: str, slots: Mapping[str, str]) -> str:
    """`template` with each `{slot}` replaced by that slot's pattern and all else taken literally."""
    parts = re.split(r"\{(\w+)\}", template)
    return "".join(slots[part] if i % 2 else re.escape(part) for i, part in enumerate(parts))


def _relation(relation: world.Relation) -> str:
    store = f"{_any_of(words.COLOURS)} {_any_of(words.STORES)}"
    subject = _any_of(words.NAMES) if relation in world.PEOPLE else _any_of(words.OBJECTS)
    slots = {"s": store if relation in world.STORES else subject}
    value = _NUMBER if relation.digits else _any_of(relation.values)
    return f"{_pattern(relation.lead, slots)} {value}{re.escape(relation.tail)}"


def _story(template: str) -> str:
    names = {"a": _any_of(words.NAMES), "b": _any_of(words.NAMES)}
    return _pattern(template.strip(), names | {slot: _any_of(choices) for slot, choices in world.STORY_WORDS.items()})


def _sentences() -> list[str]:
    fixed = [*world.PLAIN, world.ACKNOWLEDGED, *(answer for _, answer in world.TALK)]
    return (
        [_relation(relation) for relation in world.RELATIONS]
        + [_story(template) for template in (*world.OPENINGS, *world.MIDDLES, *world.ENDINGS)]
        + [re.escape(text.strip()) for text in fixed]
    )


_TEXT: Final = re.compile("(?:" + "|".join(f"(?:{sentence})" for sentence in _sentences()) + r"|\s(?=\S))+")
