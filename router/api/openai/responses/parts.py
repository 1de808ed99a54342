"""The parts of the Responses API that the process makes, and closes at its end."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.openai.responses.background import BackgroundResponses
from router.api.openai.responses.store import ResponseStore


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """Where responses are kept, and those that a router makes in the background."""

    store: ResponseStore
    background: BackgroundResponses
