"""Holds bodies to the models of the official client: types strictly, no field missing, and none that is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, ErrorObject
from pydantic import BaseModel, TypeAdapter

# What Quire adds on purpose, by the class of the client's model.
OURS = frozenset(
    {
        # vLLM's names, which its clients ask for: what ended a choice, the tokens, and those of the prompt.
        *("Choice.stop_reason", "Choice.token_ids", "ChatCompletion.prompt_token_ids"),
        *("ChatCompletionChunk.prompt_token_ids", "CompletionChoice.stop_reason", "CompletionChoice.token_ids"),
        *("ChatCompletion.prompt_logprobs", "CompletionChoice.prompt_logprobs"),
        *("CompletionChoice.prompt_token_ids", "ChunkChoice.stop_reason", "ChunkChoice.token_ids"),
        *("ChunkChoice.prompt_token_ids", "Model.root", "Model.parent", "Model.max_model_len"),
        # Which vectors a pool makes of prompts, or "" where it generates.
        "Model.pooling",
        # What a model thought: OpenAI shows it by the Responses API alone.
        *("ChatCompletionMessage.reasoning_content", "ChoiceDelta.reasoning_content"),
        *("ChatCompletionMessage.reasoning", "ChoiceDelta.reasoning"),
        # OpenAI's API answers with it, but the client's model does not have it.
        "Response.store",
        # In events too, where the client's model has them in items alone.
        *("Logprob.bytes", "LogprobTopLogprob.bytes"),
        # Needed by older releases of the client.
        "ResponseFunctionCallArgumentsDoneEvent.name",
    }
)


class ChunkChoice(CompletionChoice):
    """A choice of a streamed completion: the client has no model of its own for it."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    """A chunk of a streamed completion."""

    choices: list[ChunkChoice]  # type: ignore[assignment]


class ErrorBody(BaseModel):
    """The body of a refusal; the client itself reads the object in it."""

    model_config = {"extra": "forbid"}

    error: ErrorObject


def hold(model: Any, body: bytes | str) -> Any:
    """Return the body in its model. Fail unless it has all that the model needs, and nothing that is unknown."""
    read = TypeAdapter(model).validate_json(body, strict=True)
    assert {*_unknown(read)} <= OURS, {*_unknown(read)} - OURS
    return read


def _unknown(value: Any) -> Iterator[str]:
    """Yield CLASS.FIELD for every field without a place in its model."""
    if isinstance(value, BaseModel):
        kind = type(value)
        yield from (f"{kind.__name__}.{name}" for name in value.model_extra or ())
        for name in kind.model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from _unknown(each)
