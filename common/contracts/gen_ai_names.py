"""The names of OpenTelemetry's conventions for generative AI, of one version. No other file spells them.

They stand in a repository of their own: github.com/open-telemetry/semantic-conventions-genai. They are still in
development, so that a later version may rename them. Sources: `docs/gen-ai/client-inference.md` for attributes,
`docs/gen-ai/gen-ai-metrics.md` for metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

VERSION: Final = "0.1.0"
# Spans name it as the schema that they follow. It covers the conventions that it depends on: HTTP, RPC, databases.
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/gen-ai/{VERSION}"
PREFIX: Final = "gen_ai."

# ------------------------------------------------------------ attributes

CONVERSATION_ID: Final = "gen_ai.conversation.id"
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
OUTPUT_TYPE: Final = "gen_ai.output.type"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# ------------------------------------------------------------ values of them

PROVIDER: Final = "quire"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
OPERATIONS: Final = (CHAT, COMPLETION, EMBEDDINGS)
JSON, TEXT = "json", "text"
# The finish reason of a sequence that ended abnormally, or of which no end came.
ERROR: Final = "error"
# The attribute that says by what an operation failed, and its value for what has no word of its own.
ERROR_TYPE: Final = "error.type"
OTHER_ERROR: Final = "_OTHER"

# ------------------------------------------------------------ metrics


@dataclass(frozen=True, slots=True)
class ServerHistogram:
    """A histogram of a model server, in seconds; `bounds` are the upper bounds of its buckets that are asked for."""

    name: str
    words: str
    bounds: tuple[float, ...]


REQUEST_DURATION: Final = ServerHistogram(
    "gen_ai.server.request.duration",
    "arrival to end of the request, that of requests which admission refuses too",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN: Final = ServerHistogram(
    "gen_ai.server.time_to_first_token",
    "arrival to first token of requests that succeeded",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN: Final = ServerHistogram(
    "gen_ai.server.time_per_output_token",
    "time from first token to end, by the tokens after the first, of requests that succeeded",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)


def prometheus_label(attribute: str) -> str:
    """Return the label that OpenTelemetry's rules for Prometheus make of an attribute."""
    return attribute.replace(".", "_")


def prometheus_name(histogram: ServerHistogram) -> str:
    """Return the name that these rules make of a metric in seconds."""
    return f"{prometheus_label(histogram.name)}_seconds"
