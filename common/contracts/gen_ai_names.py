"""The names of OpenTelemetry's conventions for generative AI, of one version. No other file spells them.

They stand in a repository of their own: github.com/open-telemetry/semantic-conventions-genai. They are still in
development, so that a later version may rename them. Sources: `docs/gen-ai/client-inference.md` for attributes,
`docs/gen-ai/gen-ai-metrics.md` for metrics.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
# Spans name it as the schema that they follow. It covers the conventions that it depends on: HTTP, RPC, databases.
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/gen-ai/{VERSION}"
PREFIX: Final = "gen_ai."

# ------------------------------------------------------------ attributes

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
