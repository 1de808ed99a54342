"""Rows of a benchmark that are kept: the conditions of one run, and its figures under `figures`, a line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.contracts.errors import FieldViolation, InvalidConfig

Row = dict[str, Any]


class Rows:
    """The rows of a file, by their conditions; new ones are appended to it. Without a file they are of this run."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidConfig for a file that cannot be read and written, or has other lines."""
        self._path, self._known = path, dict[str, Row]()
        if path is None:
            return
        try:
            path.open("a").close()
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                dict[str, float](row["figures"])
                self._known[_conditions(row)] = row
        except OSError as error:
            what = f"{path} cannot be read and written: {error.strerror}"
            raise InvalidConfig(FieldViolation("--rows", what)) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{path} must have a row of a replay in each line ({error}); give another file"
            raise InvalidConfig(FieldViolation("--rows", what)) from None

    @property
    def all(self) -> list[Row]:
        return list(self._known.values())

    def figures(self, conditions: Row, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the figures of the row with these conditions; where there is none, run, and keep one."""
        key = _conditions(conditions)
        if key not in self._known:
            self._known[key] = conditions | {"figures": run()}
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self._known[key]) + "\n")
        found: dict[str, float] = self._known[key]["figures"]
        return found


def _conditions(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "figures"}, sort_keys=True)
