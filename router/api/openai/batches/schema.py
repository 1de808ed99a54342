"""Files and batches as /openapi.json describes them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict


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
