"""What of a tokenizer.json is checked before the tokenizers library gets it, which ends its process where memory ends.

Ids that lie far apart make tables of gigabytes. A step that writes many characters for one makes as much of a short
text, and several such steps multiply.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.checkpoint.files import read_object
from common.contracts.errors import FieldViolation, InvalidConfig

# Ids may have gaps: some vocabularies reserve ranges.
_MOST_GAPS: Final = 1 << 20
_LONGEST_TOKEN: Final = 1 << 14
_LONGEST_TEXT: Final = 1 << 16
_MOST_PARTS: Final = 256
_MOST_GROWTH: Final = 256
_STEPS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")
_TEMPLATES: Final = ("single", "pair")
_TABLE: Final = "precompiled_charsmap"  # of a normalizer of sentencepiece: some 300,000 characters
_PROBE: Final = "aA1 .,\n\té"


def refuse_hostile(path: Path) -> None:
    """Raise InvalidConfig for a tokenizer.json that is broken, or that could take a process all its memory."""
    facts = path.stat()
    _refuse_hostile(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _refuse_hostile(path: Path, size: int, changed: int) -> None:
    whole = read_object(path)
    try:
        tokens = _tokens(whole)
        for name in _STEPS:
            _check_step(name, whole.get(name))
    except ValueError as error:
        raise _bad(path, error) from None
    ids = [number for _, number in tokens]
    most = 4 * len(ids) + _MOST_GAPS
    if ids and (largest := max(ids)) >= most:
        what = f"it has {len(ids)} tokens, and one of them has the id {shown(largest)}; expected ids below {most}"
        raise _bad(path, what)


def read_tokens(path: Path) -> list[tuple[str, int]]:
    """Return the tokens of a tokenizer.json and their ids, added ones last. Raises InvalidConfig for a broken one."""
    try:
        return _tokens(read_object(path))
    except ValueError as error:
        raise _bad(path, error) from None


def _bad(path: Path, why: object) -> InvalidConfig:
    return InvalidConfig(FieldViolation("--model", f"{path}: {why}; correct it, or download the file again"))


# ------------------------------------------------------------ tokens


def _tokens(whole: Mapping[str, Any]) -> list[tuple[str, int]]:
    model, added = whole.get("model"), whole.get("added_tokens")
    if not isinstance(model, dict):
        raise ValueError(f"model is {shown(model)}; expected an object")
    if not isinstance(added, list | None):
        raise ValueError(f"added_tokens is {shown(added)}; expected a list of tokens")
    found = [*_of_vocabulary(model.get("vocab")), *(_added(place, each) for place, each in enumerate(added or ()))]
    for text, number in found:
        if len(text) > _LONGEST_TOKEN:
            what = f"token {shown(number)} has {len(text)} characters"
            raise ValueError(f"{what}; expected at most {_LONGEST_TOKEN}")
    return found


def _of_vocabulary(vocabulary: Any) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, dict):
        for text, number in vocabulary.items():
            _check_id(f"model.vocab has the id {shown(number)} for {shown(text)}", number)
            yield text, number
    elif isinstance(vocabulary, list):  # of Unigram: pairs of text and score, in the order of their ids
        for place, pair in enumerate(vocabulary):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise ValueError(f"model.vocab[{place}] is {shown(pair)}; expected a pair of text and score")
            yield pair[0], place
    elif vocabulary is not None:
        raise ValueError(f"model.vocab is {shown(vocabulary)}; expected an object of ids by token")


def _added(place: int, token: Any) -> tuple[str, int]:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise ValueError(f"added_tokens[{place}] is {shown(token)}; expected an object with content and id")
    _check_id(f"added_tokens[{place}].id is {shown(token.get('id'))}", token.get("id"))
    return token["content"], token["id"]


def _check_id(what: str, number: Any) -> None:
    if type(number) is not int or number < 0:
        raise ValueError(f"{what}; expected a whole number from 0 on")


# ------------------------------------------------------------ steps


def _check_step(name: str, step: Any) -> None:
    """Raise ValueError for a step that is not an object, has too long texts, or makes too much of a text."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise ValueError(f"{name} is {shown(step)}; expected an object or null")
    _check_texts(name, step)
    if (growth := _growth(name, step)) > _MOST_GROWTH:
        times = f"{growth:.0f}" if growth < 1e15 else "over 10^15"
        raise ValueError(f"{name} may make a text {times} times as long; expected at most {_MOST_GROWTH} times")


def _check_texts(place: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT and not place.endswith(_TABLE):
        raise ValueError(f"{place} has {len(value)} characters; expected at most {_LONGEST_TEXT}")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        _check_texts(f"{place}.{key}" if isinstance(value, dict) else f"{place}[{key}]", each)


def _growth(place: str, step: Mapping[str, Any]) -> float:
    """Return how many characters, or tokens, a step may make of one."""
    for key in _LISTS:
        if isinstance(steps := step.get(key), list):
            if len(steps) > _MOST_PARTS:
                raise ValueError(f"{place}.{key} has {len(steps)} steps; expected at most {_MOST_PARTS}")
            return _growth_of_steps(place, [each for each in steps if isinstance(each, dict)])
    kind = step.get("type")
    if kind == "Replace":
        return _growth_of_replace(place, step)
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend")))
    return _growth_of_template(place, step) if kind == "TemplateProcessing" else 1.0


def _growth_of_steps(place: str, steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the most that steps make of a character one after the other.

    What a replacement writes grows further only in a later step that may find it: many of them stand side by side, each
    for a character of its own.
    """
    behind: list[tuple[Mapping[str, Any], float]] = []  # each step with what it and later ones make of a character
    for step in reversed(steps):
        further = [grown for later, grown in behind if _finds(later, step)]
        behind.append((step, _growth(place, step) * max([1.0, *further])))
    return max([1.0, *(grown for _, grown in behind)])


def _finds(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Return whether a step may find characters that an earlier one writes."""
    pattern, content = later.get("pattern"), earlier.get("content")
    text = pattern.get("String") if isinstance(pattern, dict) and later.get("type") == "Replace" else None
    if not isinstance(text, str) or not isinstance(content, str) or earlier.get("type") != "Replace":
        return True
    return not set(text).isdisjoint(content)


def _growth_of_replace(place: str, step: Mapping[str, Any]) -> float:
    """Return the most that a replacement makes of a character; an empty match writes beside each."""
    pattern, content = step.get("pattern"), str(step.get("content"))
    if not isinstance(pattern, dict):
        return 1.0  # the library refuses it
    if isinstance(text := pattern.get("String"), str):
        if not text:
            raise ValueError(f"{place} replaces an empty text; expected a pattern of one character or more")
        return max(1.0, len(content) / len(text))
    return 1.0 + len(content) if _may_be_empty(str(pattern.get("Regex"))) else max(1.0, len(content))


def _may_be_empty(pattern: str) -> bool:
    """Return whether an expression may match nothing, as far as Python's expressions are those of the library."""
    try:
        return any(match.start() == match.end() for match in re.finditer(pattern, _PROBE))
    except (re.error, OverflowError, RecursionError):
        return True


def _growth_of_template(place: str, step: Mapping[str, Any]) -> float:
    for name in _TEMPLATES:
        parts = step.get(name)
        if isinstance(parts, list) and len(parts) > _MOST_PARTS:
            raise ValueError(f"{place}.{name} has {len(parts)} parts; expected at most {_MOST_PARTS}")
    single = step.get(_TEMPLATES[0])
    if not isinstance(single, list):
        return 1.0  # the library refuses it
    return float(max(1, sum("Sequence" in each for each in single if isinstance(each, dict))))
