"""LoRA adapters as services name them: by a name that clients use, and by the fingerprint of their content.

A name may be used again for another content. A fingerprint never is: it roots the hashes of the blocks that an adapter
computed, so blocks of the base, of other adapters and of earlier contents are never taken for its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from common.contracts.limits import MAX_ADAPTER_NAME_CHARS

FINGERPRINT_BYTES: Final = 32
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}")
NAME_WORDS: Final = (
    f"1 to {MAX_ADAPTER_NAME_CHARS} letters, digits, dots, hyphens and underscores, a letter or a digit first"
)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request is for: its name, and the SHA-256 of its content in hexadecimal digits."""

    name: str
    fingerprint: str


def is_adapter_name(name: str) -> bool:
    """Return whether a text may name an adapter. It stands in URLs and log lines, and is never a path."""
    return _NAME.fullmatch(name) is not None


def is_fingerprint(text: str) -> bool:
    """Return whether a text has the form of a fingerprint."""
    return re.fullmatch(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}", text) is not None


def root_keys(fingerprint: str) -> tuple[tuple[str, str], ...]:
    """Return what an adapter adds to the root of a hash chain; nothing for the base, whose fingerprint is empty."""
    return (("adapter", fingerprint),) if fingerprint else ()
