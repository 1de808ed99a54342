"""Hides user names and passwords of URLs, such as that of Redis, in log lines and error messages."""

from __future__ import annotations

import re
from typing import Final

# A password may have any character but a space; the bound keeps the search linear.
_USER_INFO: Final = re.compile(r"""(\w+://)[^\s"']{0,512}@""")


def redacted(text: str) -> str:
    """Return a text with `***` in place of what stands before the @ of a URL."""
    return _USER_INFO.sub(r"\1***@", text) if "@" in text else text
