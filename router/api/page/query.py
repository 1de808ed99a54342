"""The parameters of a request for data: few, short, and named; anything else is refused with what is expected."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import parse_qsl

from common.contracts.errors import FieldViolation, InvalidRequest

_MOST: Final = 16
# A token of the next page names each router of a pool.
_MOST_CHARS: Final = 4_096
_MOST_DIGITS: Final = 20


class Query:
    """Parameters by name. Each may be given once."""

    def __init__(self, text: str) -> None:
        """Raises InvalidRequest for too many parameters, too long ones, and for those that are given twice."""
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST, errors="strict")
        except (ValueError, UnicodeDecodeError):
            raise invalid("query", f"is not of the form a=b&c=d, with at most {_MOST} parameters in UTF-8") from None
        self._values = dict(pairs)
        if len(self._values) < len(pairs):
            raise invalid("query", "names a parameter twice; expected each once")
        for name, value in pairs:
            if len(value) > _MOST_CHARS:
                raise invalid(name[:40], f"has {len(value)} characters; expected at most {_MOST_CHARS}")

    def allow(self, names: Collection[str]) -> None:
        """Raise InvalidRequest for a parameter that is none of these."""
        for name in self._values:
            if name not in names:
                wanted = f"expected {', '.join(sorted(names))}" if names else "expected no parameter"
                raise invalid(name[:40], f"is unknown here; {wanted}")

    def key(self) -> tuple[tuple[str, str], ...]:
        """Return the parameters by name, without empty ones: equal for equal questions."""
        return tuple(sorted((name, value) for name, value in self._values.items() if value))

    def text(self, name: str) -> str:
        """Return a parameter; "" where it is missing."""
        return self._values.get(name, "")

    def needed(self, name: str) -> str:
        """Return a parameter. Raises InvalidRequest where it is missing or empty."""
        if not (value := self.text(name)):
            raise invalid(name, "is missing")
        return value

    def number(self, name: str, default: int, most: int) -> int:
        """Return a number from 0 to `most`. Raises InvalidRequest for anything else."""
        value = self.text(name)
        if not value:
            return default
        is_number = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
        if not is_number or int(value) > most:
            raise invalid(name, f"is {value[:40]!r}; expected a number from 0 to {most}")
        return int(value)

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Return one of `choices`, the first where it is missing. Raises InvalidRequest for anything else."""
        value = self.text(name) or next(iter(choices))
        if value not in choices:
            raise invalid(name, f"is {value[:40]!r}; expected one of {', '.join(choices)}")
        return value


def invalid(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, what))
