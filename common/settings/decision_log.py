"""The options of a decision log on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from common.settings.options import Bytes, Duration, Settings

# Files of less would end after a few flushes each.
_SMALLEST: Final = 1 << 20
_SHORTEST_S: Final = 60.0
_AGE_S: Final = 7 * 86_400.0


class DecisionLogSettings(Settings):
    """options of the decision log"""

    decision_log: Annotated[Path | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="folder in which decision records are kept on disk too, for `quire why --log`; several services "
        "may share it; unset: only in memory",
    )
    decision_log_size: Annotated[Bytes, Field(ge=_SMALLEST)] = Field(
        256 << 20,
        json_schema_extra={"unsaid": ""},
        description="bytes that the log of each process may have on disk, such as 1GiB; default 256MiB",
    )
    decision_log_age: Annotated[Duration, Field(ge=_SHORTEST_S)] = Field(
        _AGE_S,
        json_schema_extra={"unsaid": ""},
        description="age at which records leave the disk: seconds, or such as 12h; default 7d",
    )
