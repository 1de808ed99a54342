"""Session ids: a client's name for the requests of one conversation, or of one run of an agent.

What a client sends is a stranger's text, and may name a person. So it stays in the request's memory alone: records,
spans and queues have its name here, 128 bits of a hash with the tenant. Equal ids of two tenants have two names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Final

from common.contracts.limits import MAX_SESSION_ID_CHARS

SESSION_HEADERS: Final = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-opencode-session",
    "x-litellm-session-id",
    "x-dynamo-session-id",
    "x-openwebui-chat-id",
)
"""Headers, and keys of gRPC's metadata, whose value is a session's id. The first that is there counts; docs/usage.md
says who sends which."""

_NAME: Final = re.compile(r"[0-9a-f]{32}")


def sent_session(header: Callable[[str], str | None]) -> str:
    """Return the id that the headers of a request have; `header` returns one by its name. "" is none.

    One that is too long is passed over: whoever sent it may mean something else by its header.
    """
    for name in SESSION_HEADERS:
        value = (header(name) or "").strip()
        if 0 < len(value) <= MAX_SESSION_ID_CHARS:
            return value
    return ""


def session_name(owner: str, session_id: str) -> str:
    """Return a session's name, 32 hexadecimal digits; "" for no id. `owner` is the tenant that a key showed, or ""."""
    if not session_id:
        return ""
    # A tenant's name has no NUL, so no two pairs give one text.
    whole = f"quire session\0{owner}\0{session_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(whole).hexdigest()[:32]


def is_session_name(text: str) -> bool:
    """Return whether a text may be a session's name."""
    return _NAME.fullmatch(text) is not None
