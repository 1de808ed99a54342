"""POST /invocations, which SageMaker calls: the body says which of OpenAI's paths is meant. Its probe is GET /ping."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.contracts.errors import FieldViolation, InvalidRequest
from router.api.openai import errors

PATH: Final = "/invocations"
# The path of the first field that a body has.
_PATHS: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/v1/rerank",
    "text_1": "/v1/score",
}


class Invocations:
    """Middleware that puts the path that is meant in place of /invocations. It gets bodies whole (BodyGate).

    All that stands around it, such as records and metrics, sees the path that is meant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        message = await receive()
        # Whatever is no JSON by its type was not looked at before: it may be anything.
        is_json = "json" in Headers(scope=scope).get("content-type", "").lower()
        path = _path_of(message.get("body", b"")) if is_json else None
        if path is None:
            what = f"names no kind of request; expected an object of JSON with one of {', '.join(_PATHS)}"
            refused = errors.response_to(InvalidRequest(FieldViolation("body", what)), scope)
            await refused(scope, receive, send)
            return
        scope["path"], scope["raw_path"] = path, path.encode()
        whole = [message]

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replayed, send)


def _path_of(body: bytes) -> str | None:
    try:
        read: Any = json.loads(body)
    except ValueError:
        return None
    named = (path for field, path in _PATHS.items() if isinstance(read, dict) and field in read)
    return next(named, None)
