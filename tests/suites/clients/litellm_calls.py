"""Calls a server by LiteLLM, and prints what each call got; reads {"url", "small", "model", "calls"} in JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Without it the package asks the network for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

ASKED: Any = [{"role": "user", "content": "Where does Anna live?"}]
LONG: Any = [{"role": "user", "content": "Anna lives here. " * 50}]
TOWN: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Lyon", "Basel"]}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "find_town", "description": "Finds a town.", "parameters": TOWN}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN, "strict": True}}
FORCED: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "find_town"}},
    "max_tokens": 400,
    "seed": 4,
}


class Calls:
    """All calls; `small` is a server whose context is short."""

    def __init__(self, url: str, small: str, model: str) -> None:
        self._small = {"model": f"openai/{model}", "api_base": small, "api_key": "none", "num_retries": 0}
        self._large = self._small | {"api_base": url}

    def chat(self) -> Any:
        """Return the text of a chat, whole and streamed, with the tokens that were counted."""
        whole = litellm.completion(messages=ASKED, temperature=0, max_tokens=16, **self._large)
        stream = litellm.completion(
            messages=ASKED,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            **self._large,
        )
        together: Any = litellm.stream_chunk_builder(list(stream), messages=ASKED)
        return [[each.choices[0].message.content, each.usage.total_tokens] for each in (whole, together)]

    def tools(self) -> Any:
        """Return the arguments of a named call, whole and streamed."""
        whole = litellm.completion(messages=ASKED, **FORCED, **self._large)
        chunks = list(litellm.completion(messages=ASKED, stream=True, **FORCED, **self._large))
        together: Any = litellm.stream_chunk_builder(chunks, messages=ASKED)
        return [_calls(each) for each in (whole, together)]

    def result(self) -> Any:
        """Return a call that the model chose, and the answer to its result."""
        first: Any = litellm.completion(messages=ASKED, tools=[TOOL], **self._large)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Lyon is big."}
        last: Any = litellm.completion(messages=[*ASKED, message, result], tools=[TOOL], **self._large)
        return [_calls(first), last.choices[0].message.content]

    def structured(self) -> Any:
        answer: Any = litellm.completion(messages=ASKED, response_format=FORMAT, seed=4, max_tokens=400, **self._large)
        return json.loads(answer.choices[0].message.content)

    def responses(self) -> Any:
        answer: Any = litellm.responses(input="Where does Anna live?", max_output_tokens=16, **self._large)
        return [answer.status, answer.output[0].content[0].text]

    def too_long(self) -> Any:
        """Return the class of the error about a prompt that the context cannot hold."""
        try:
            litellm.completion(messages=LONG, **self._small)
        except litellm.ContextWindowExceededError as error:
            return [type(error).__name__, error.status_code]
        return []

    def fallback(self) -> Any:
        """Return the text of a prompt that only the second server's context holds."""
        named = [{"model_name": "small", "litellm_params": self._small}]
        named += [{"model_name": "large", "litellm_params": self._large}]
        router = litellm.Router(model_list=named, context_window_fallbacks=[{"small": ["large"]}], num_retries=0)
        answer: Any = router.completion(model="small", messages=LONG, temperature=0, max_tokens=8)
        return answer.choices[0].message.content


def _calls(answer: Any) -> list[Any]:
    calls = answer.choices[0].message.tool_calls
    return [[each.function.name, json.loads(each.function.arguments)] for each in calls]


def main() -> None:
    given = json.load(sys.stdin)
    calls = Calls(given["url"], given["small"], given["model"])
    json.dump([getattr(calls, name)() for name in given["calls"]], sys.stdout)


main()
