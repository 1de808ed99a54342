"""Errors about the fields of a chat, in the words of a body that became one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from common.contracts.errors import InvalidRequest


class FieldNames:
    """Names of a chat's fields in another API: patterns, and what replaces a match, one after another."""

    def __init__(self, *table: tuple[str, str]) -> None:
        self._table = [(re.compile(pattern), name) for pattern, name in table]

    def __call__(self, field: str) -> str:
        for pattern, name in self._table:
            field = pattern.sub(name, field)
        return field


@contextmanager
def in_words_by(named: Callable[[str], str]) -> Iterator[None]:
    """Let errors about fields of a chat name those of the body."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(*[replace(each, field=named(each.field)) for each in error.violations]) from None
