"""The tokens of a response, those of its thought apart."""

from __future__ import annotations

from typing import Any

from router.api.openai.answer import Bill

Json = dict[str, Any]


def usage_body(bill: Bill) -> Json:
    output = bill.output_tokens
    return {
        "input_tokens": bill.prompt_tokens,
        # Writing to the cache costs nothing here, so it is not counted.
        "input_tokens_details": {"cached_tokens": bill.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": min(bill.reasoning_tokens or 0, output)},
        "total_tokens": bill.prompt_tokens + output,
    }
