"""Attributes of a request's span by OpenTelemetry's conventions for generative AI (`gen_ai.*`).

The text of prompts, outputs and stop strings is in no attribute, though the conventions have names for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from common.contracts.types import ConstraintKind
from router.contracts.events import Finished, ValidatedRequest

Value = str | int | float | Sequence[str]
PROVIDER: Final = "quire"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"


def span_name(request: ValidatedRequest, model: str) -> str:
    """Return the name of the span that stands for the inference; `model` is that of a request that names none."""
    return f"{_operation(request)} {request.model or model}".rstrip()


def _operation(request: ValidatedRequest) -> str:
    return EMBEDDINGS if request.embeds else CHAT if request.chat else COMPLETION


def request_attributes(request: ValidatedRequest, model: str) -> dict[str, Value]:
    """Return what was asked for; `model` is what the request gets if it names none."""
    whole: dict[str, Value] = {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model or model,
    }
    return whole if request.embeds else whole | _sampling(request)


def _sampling(request: ValidatedRequest) -> dict[str, Value]:
    """Return the parameters with which tokens are sampled, defaults filled in; a top_k of 0 is none."""
    sampling, constraint = request.sampling, request.sampling.constraint
    is_json = constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA
    several: dict[str, Value] = {"gen_ai.request.choice.count": sampling.n} if sampling.n != 1 else {}
    top_k: dict[str, Value] = {"gen_ai.request.top_k": sampling.top_k} if sampling.top_k else {}
    return several | top_k | {
        "gen_ai.output.type": "json" if is_json else "text",
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
    }  # fmt: skip


def response_attributes(ends: Mapping[int, Finished], model: str, response_id: str) -> dict[str, Value]:
    """Return what came, of the sequences that ended, by their index; nothing before the first end.

    The prompt counts once: its sequences share it.
    """
    if not ends:
        return {}
    ordered = [ends[index] for index in sorted(ends)]
    return {
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [each.reason.value for each in ordered],
        "gen_ai.usage.input_tokens": ordered[0].usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ordered[0].usage.cached_tokens,
        "gen_ai.usage.output_tokens": sum(each.usage.output_tokens for each in ordered),
    }
