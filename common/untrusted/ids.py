"""The form of ids that peers choose. Ids stand in log lines, metrics and keys, so no character may end any of these."""

from __future__ import annotations

import re
from typing import Final

from common.contracts.limits import MAX_ID_CHARS

ID_WORDS: Final = f"1 to {MAX_ID_CHARS} printable ASCII characters without spaces"
_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None
