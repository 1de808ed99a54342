"""The routes of files and batches. What a client names must be its tenant's own; anything else is not found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import IO, Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from common.batch.lines import URLS
from common.contracts import limits
from common.contracts.errors import Cancelled, FieldViolation, InvalidRequest, NotFound
from router.api.openai import errors
from router.api.openai.batches.form import PURPOSE
from router.api.openai.batches.multipart import boundary_of
from router.api.openai.batches.records import Batch, StoredFile, is_id, new_id, not_found, seconds_of
from router.api.openai.batches.runner import BatchParts
from router.api.openai.batches.uploads import on_disk
from router.api.openai.responses.types import Label, Note
from router.api.openai.schema import answers, refused
from router.api.openai.service import Service
from router.tenants.tenancy import Caller


# Files and batches as /openapi.json describes them.
class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileBody(_Exact):
    """A file: requests of a batch, or its answers."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(_Exact):
    """Files, the newest first unless `order` says otherwise."""

    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(_Exact):
    """That a file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(_Exact):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(_Exact):
    """Part of a batch."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(_Exact):
    """Part of a batch; `failed` have a line in the file of errors."""

    total: int
    completed: int
    failed: int


class BatchBody(_Exact):
    """A batch; times are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(_Exact):
    """Batches, the newest first."""

    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


UPLOAD: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSONL: a request on each line"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}
"""The body of an upload, which the router reads as it comes."""


T = TypeVar("T", StoredFile, Batch)
# Bytes of a file that are read and sent at once.
_PIECE: Final = 256 << 10
_MOST_FILES: Final = 10_000


class _Page(BaseModel):
    model_config = ConfigDict(extra="ignore")

    after: str | None = Field(None, description="the id of the entry before the first one")


class FilePage(_Page):
    """Which files are listed."""

    limit: int = Field(_MOST_FILES, ge=1, le=_MOST_FILES)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = Field(None, description="only files of this purpose")


class BatchPage(_Page):
    """Which batches are listed."""

    limit: int = Field(20, ge=1, le=100)


class ExpiresAfter(BaseModel):
    """How long the answers are kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=limits.MIN_BATCH_FILE_SECONDS, le=limits.MAX_BATCH_FILE_SECONDS)


class BatchRequest(BaseModel):
    """Which file is to be answered."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: str = Field(..., description="a file of purpose batch")
    endpoint: str = Field(..., description="the url of every line of the file")
    completion_window: str = Field("24h", description="what is not done by then expires: up to 7d, such as 24h or 30m")
    metadata: Annotated[dict[Label, Note], Field(max_length=limits.MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None


class NoBatches(NotFound):
    """Files and batches at a router without a folder for them."""

    reason = "BATCHES_OFF"


def batch_routes(service: Service, parts: BatchParts | None) -> APIRouter:
    """Return the routes; without a folder they answer with 404, and what to start the router with."""
    router, api = APIRouter(tags=["Batches"]), _Batches(service, parts)
    missing = refused({"404": "no such file or batch"})

    def add(path: str, handler: Callable[..., Any], method: str, whole: type[BaseModel], **more: Any) -> None:
        described = answers(whole) | missing
        router.add_api_route(path, handler, methods=[method], response_model=None, responses=described, **more)

    add("/v1/files", api.upload, "POST", FileBody, openapi_extra=UPLOAD)
    add("/v1/files", api.list_files, "GET", FileList)
    add("/v1/files/{file_id}", api.file, "GET", FileBody)
    add("/v1/files/{file_id}", api.delete, "DELETE", FileDeleted)
    lines: dict[int | str, Any] = {200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}}
    described = answers(FileBody) | missing | lines
    content = "/v1/files/{file_id}/content"
    router.add_api_route(content, api.content, methods=["GET"], response_class=Response, responses=described)
    add("/v1/batches", api.create, "POST", BatchBody)
    add("/v1/batches", api.list_batches, "GET", BatchList)
    add("/v1/batches/{batch_id}", api.batch, "GET", BatchBody)
    add("/v1/batches/{batch_id}/cancel", api.cancel, "POST", BatchBody)
    return router


class _Batches:
    """The handlers of the routes."""

    def __init__(self, service: Service, parts: BatchParts | None) -> None:
        self._service, self._given = service, parts

    @property
    def _parts(self) -> BatchParts:
        if self._given is None:
            raise NoBatches("files and batches are not kept here; start the router with --batch-dir DIR for them")
        return self._given

    # ------------------------------------------------------------ files

    async def upload(self, request: Request) -> Response:
        """Keep a file of requests, each of which is checked."""
        parts, caller = self._parts, self._charged(request)
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise errors.CodingNotServed(f"the content-encoding is {coding[:40]!r}; expected none for a file")
        boundary = boundary_of(request.headers.get("content-type", ""))
        try:
            file = await parts.uploads.receive(caller.tenant.name, boundary, request.stream())
        except ClientDisconnect:
            raise Cancelled("the client went away") from None
        return JSONResponse(file.body())

    async def list_files(self, request: Request, page: Annotated[FilePage, Query()]) -> Response:
        """List the tenant's files."""
        folder, tenant, now = self._parts.folder, _tenant(request), self._parts.now()

        def found() -> list[StoredFile]:
            files = [each for each in folder.files(tenant, now) if page.purpose in (None, each.purpose)]
            return files if page.order == "desc" else files[::-1]

        return JSONResponse(_listed(await on_disk(found), page.after, page.limit))

    async def file(self, file_id: str, request: Request) -> Response:
        """Describe a file."""
        return JSONResponse((await self._found(file_id, request)).body())

    async def delete(self, file_id: str, request: Request) -> Response:
        """Delete a file. A batch of it goes on."""
        await self._found(file_id, request)
        await on_disk(self._parts.folder.delete_file, _tenant(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, file_id: str, request: Request) -> Response:
        """Return the lines of a file."""
        file = await self._found(file_id, request)
        opened = await on_disk(self._parts.folder.opened, _tenant(request), file_id)
        if opened is None:
            raise not_found("file", file_id)
        headers = {"content-length": str(file.size)}
        return StreamingResponse(_pieces(opened), headers=headers, media_type="application/jsonl")

    async def _found(self, file_id: str, request: Request) -> StoredFile:
        parts, file = self._parts, None
        if is_id("file-", file_id):
            file = await on_disk(parts.folder.file, _tenant(request), file_id, parts.now())
        if file is None:
            raise not_found("file", file_id)
        return file

    # ------------------------------------------------------------ batches

    async def create(self, body: BatchRequest, request: Request) -> Response:
        """Begin to answer a file of requests."""
        parts, caller = self._parts, self._charged(request)
        seconds = _checked(body)
        file = await self._input(body, request)
        now = parts.now()
        kept = body.output_expires_after
        batch = Batch(
            id=new_id("batch_", now),
            tenant=caller.tenant.name,
            credential=caller.credential,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=int(now),
            expires_at=int(now) + seconds,
            output_id=new_id("file-", now),
            error_id=new_id("file-", now),
            output_seconds=limits.BATCH_FILE_SECONDS if kept is None else kept.seconds,
            total=file.lines,
            metadata=body.metadata,
        )
        try:
            await on_disk(parts.folder.add, batch)
        except FileNotFoundError:
            raise not_found("file", file.id) from None
        parts.runner.wake()
        return JSONResponse(batch.body())

    async def list_batches(self, request: Request, page: Annotated[BatchPage, Query()]) -> Response:
        """List the tenant's batches."""
        folder, tenant = self._parts.folder, _tenant(request)
        return JSONResponse(_listed(await on_disk(lambda: [*folder.batches(tenant)]), page.after, page.limit))

    async def batch(self, batch_id: str, request: Request) -> Response:
        """Say how far a batch is."""
        return JSONResponse((await self._found_batch(batch_id, request)).body())

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch; what has been answered stays. One that has ended stays as it is."""
        if (await self._found_batch(batch_id, request)).has_ended:
            return await self.batch(batch_id, request)
        await on_disk(self._parts.folder.wish_to_cancel, _tenant(request), batch_id)
        self._parts.runner.wake(batch_id)
        return await self.batch(batch_id, request)

    async def _found_batch(self, batch_id: str, request: Request) -> Batch:
        parts, batch = self._parts, None
        if is_id("batch_", batch_id):
            batch = await on_disk(parts.folder.batch, _tenant(request), batch_id)
        if batch is None:
            raise not_found("batch", batch_id)
        return batch

    async def _input(self, body: BatchRequest, request: Request) -> StoredFile:
        """Return the input of a batch. Raises NotFound, and InvalidRequest where its lines are for other endpoints."""
        file = await self._found(body.input_file_id, request)
        if file.purpose != PURPOSE:
            raise _wrong("input_file_id", f"has the purpose {file.purpose}; expected a file of purpose {PURPOSE}")
        if others := [url for url in file.urls if url != body.endpoint]:
            what = f"is {body.endpoint}, and the file has lines for {', '.join(others)}; expected one url in all"
            raise _wrong("endpoint", what)
        return file

    def _charged(self, request: Request) -> Caller:
        """Return the caller, whose rate is charged for the request itself. Raises Overloaded."""
        call = self._service.call(request)
        self._service.parts.meter.asks(call.caller.tenant)
        call.charge.begin(())
        return call.caller


def _checked(body: BatchRequest) -> int:
    """Return the seconds that a batch may take. Raises InvalidRequest."""
    if body.endpoint not in URLS:
        raise _wrong("endpoint", f"is {body.endpoint[:64]!r}; expected one of {', '.join(URLS)}")
    seconds = seconds_of(body.completion_window)
    if seconds is None or not 0 < seconds <= limits.MAX_BATCH_SECONDS:
        raise _wrong("completion_window", f"is {body.completion_window[:64]!r}; expected 24h, or another span up to 7d")
    return seconds


def _wrong(field: str, words: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, words))


def _listed(found: Sequence[T], after: str | None, most: int) -> dict[str, Any]:
    """Return a page of entries. Raises InvalidRequest where none has the id of `after`."""
    start = 0
    if after is not None:
        place = next((place for place, each in enumerate(found) if each.id == after), None)
        if place is None:
            raise _wrong("after", f"is {after[:64]!r}, and no entry has that id")
        start = place + 1
    shown = [each.body() for each in found[start : start + most]]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    more = start + most < len(found)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": more}


async def _pieces(opened: IO[bytes]) -> AsyncGenerator[bytes, None]:
    with opened:
        while piece := await asyncio.to_thread(opened.read, _PIECE):
            yield piece


def _tenant(request: Request) -> str:
    return str(request.state.caller.tenant.name)
