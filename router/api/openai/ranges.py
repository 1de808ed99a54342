"""Writes into the OpenAPI document which values are served: the ranges that `requests/validate.py` checks.

They stand in no model of a body: each API would say in other words what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from common.contracts.limits import MAX_HTTP_SEQUENCES
from router.requests.violations import RANGES, Range

Json = dict[str, Any]
# Fields under the name of the range that holds for them.
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
# -1 stands for all, as in vLLM.
_OTHERS: Final[Mapping[str, Json]] = {"top_k": {"minimum": -1}, "priority": {"minimum": -100, "maximum": 100}}
_NOT_EMPTY: Final[Mapping[tuple[str, str], Json]] = {
    ("ChatRequest", "messages"): {"minItems": 1},
    ("ChatBatchRequest", "messages"): {"minItems": 1, "maxItems": MAX_HTTP_SEQUENCES},
    ("MessagesRequest", "messages"): {"minItems": 1},
    ("CountRequest", "messages"): {"minItems": 1},
    ("ResponsesRequest", "input"): {"minItems": 1},
    ("RerankRequest", "documents"): {"minItems": 1},
    ("RerankRequest", "top_n"): {"minimum": 0},
    ("CompletionRequest", "prompt"): {"minItems": 1, "minLength": 1},
}


def add_ranges(schemas: Mapping[str, Json]) -> None:
    """Add the ranges to the properties of bodies."""
    for name, schema in schemas.items():
        if name.endswith("Request"):
            for field, given in schema.get("properties", {}).items():
                given.update(_NOT_EMPTY.get((name, field)) or _range_of(field))


def _range_of(field: str) -> Json:
    """Return the keywords for a field; each holds for values of its own type alone."""
    if field in _OTHERS:
        return {**_OTHERS[field]}
    found = RANGES.get(_NAMES.get(field, field))
    return {} if found is None else _keywords(found)


def _keywords(given: Range) -> Json:
    low = {"exclusiveMinimum" if given.open_low else "minimum": given.low}
    return low if given.high == math.inf else low | {"maximum": given.high}
