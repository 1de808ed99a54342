"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from common.contracts.limits import MAX_ADAPTER_NAME_CHARS, MAX_ADAPTER_PATH_CHARS
from router.api.openai import schema
from router.tenants.tenancy import Tenant
from router.workers.adapters import OPERATOR, AdapterManager


class LoadAdapterRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter. A name that is in use gets the new content."""

    lora_name: str = Field(..., max_length=MAX_ADAPTER_NAME_CHARS, description="the model name that selects it")
    lora_path: str = Field(
        ..., max_length=MAX_ADAPTER_PATH_CHARS, description="folder below the workers' --lora-dir, on their hosts"
    )


class UnloadAdapterRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(..., max_length=MAX_ADAPTER_NAME_CHARS)


def adapter_routes(manager: AdapterManager, asks_for_keys: bool) -> APIRouter:
    """Return the two routes. Where callers have keys, tenants change what is their own, and those of operators all."""
    router = APIRouter()
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None, "tags": ["OpenAI"]}
    answers = schema.answers(LoadAdapterRequest) | {200: {"content": {"text/plain": {}}, "description": "Done."}}

    def caller(request: Request) -> Tenant:
        tenant: Tenant = request.state.caller.tenant
        return tenant if asks_for_keys else OPERATOR

    async def load(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
        """Load a LoRA adapter at every worker, from a folder below their --lora-dir. Streams go on meanwhile."""
        found = await manager.load_adapter(body.lora_name, body.lora_path, caller(request))
        loaded = [each.worker_id for each in found if not each.error]
        failed = "".join(f"; {each.worker_id}: {each.error}" for each in found if each.error)
        return PlainTextResponse(f"adapter {body.lora_name!r} is loaded on {', '.join(loaded)}{failed}")

    async def unload(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Let every worker forget a LoRA adapter. Requests that run on it end as usual."""
        await manager.unload_adapter(body.lora_name, caller(request))
        return PlainTextResponse(f"adapter {body.lora_name!r} is unloaded")

    router.add_api_route("/v1/load_lora_adapter", load, responses=answers, **post)
    router.add_api_route("/v1/unload_lora_adapter", unload, responses=answers, **post)
    return router
