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


OWN_NAME_WORDS: Final = f"{NAME_WORDS}; a * at its end stands for any further ones"


@dataclass(frozen=True, slots=True)
class AdapterShare:
    """For whom a load is, and what that tenant's own adapters may take.

    `names` are those of its own adapters; a * at the end stands for any further characters. `max_bytes` bounds what
    these take in the memory of one worker; 0: nothing does.
    """

    tenant: str = ""
    names: tuple[str, ...] = ()
    max_bytes: int = 0

    def owns(self, name: str) -> bool:
        """Return whether an adapter is the tenant's own."""
        return any(_is_named(each, name) for each in self.names)


NOBODYS: Final = AdapterShare()


def is_own_name(text: str) -> bool:
    """Return whether a text may stand for names of a tenant's own adapters: a name, or how names begin, and a *."""
    return is_adapter_name(text.removesuffix("*"))


def _is_named(own: str, name: str) -> bool:
    return name.startswith(own[:-1]) if own.endswith("*") else name == own


def is_adapter_name(name: str) -> bool:
    """Return whether a text may name an adapter. It stands in URLs and log lines, and is never a path."""
    return _NAME.fullmatch(name) is not None


def is_fingerprint(text: str) -> bool:
    """Return whether a text has the form of a fingerprint."""
    return re.fullmatch(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}", text) is not None


def root_keys(fingerprint: str) -> tuple[tuple[str, str], ...]:
    """Return what an adapter adds to the root of a hash chain; nothing for the base, whose fingerprint is empty."""
    return (("adapter", fingerprint),) if fingerprint else ()
