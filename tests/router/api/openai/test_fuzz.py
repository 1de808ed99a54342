"""Whatever a body says, it is served or refused in OpenAI's form; nothing is an error of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from router.api.openai.schema import ErrorBody
from tests.support.router.http_harness import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | WORDS
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner), max_leaves=6)
NUMBERS = (
    "temperature top_p n seed presence_penalty frequency_penalty top_k min_p min_tokens repetition_penalty priority "
    "logprobs top_logprobs max_tokens max_completion_tokens best_of"
)
OTHERS = (
    "stop stop_token_ids logit_bias ignore_eos logprobs stream_options echo response_format structured_outputs "
    "guided_json guided_regex guided_grammar guided_choice modalities cache_salt return_token_ids request_id user "
    "tools tool_choice parallel_tool_calls functions function_call documents chat_template_kwargs "
    "add_generation_prompt continue_final_message reasoning_effort include_reasoning "
    "text reasoning metadata include truncation previous_response_id max_output_tokens store"
)
FORMAT_TYPES = st.sampled_from(["text", "json_object", "json_schema"])
STRUCTURED = st.sampled_from(["json", "regex", "grammar", "choice", "json_object"])
NAMES = st.sampled_from(["add", "b", ""]) | WORDS
FUNCTION = st.fixed_dictionaries({"name": NAMES}, optional={"parameters": ANY, "strict": ANY, "description": ANY})
TOOL = st.fixed_dictionaries(
    {"function": FUNCTION | ANY},
    optional={"type": st.just("function") | WORDS, "name": NAMES, "parameters": ANY, "strict": ANY},
)
SHAPES = {
    "tools": st.lists(TOOL, max_size=3) | ANY,
    "functions": st.lists(FUNCTION, max_size=3) | ANY,
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | TOOL | ANY,
    "function_call": st.sampled_from(["none", "auto"]) | FUNCTION | ANY,
    "chat_template_kwargs": st.dictionaries(WORDS, ANY, max_size=3) | ANY,
    "documents": st.lists(st.dictionaries(WORDS, ANY), max_size=3) | ANY,
    "response_format": st.fixed_dictionaries(
        {"type": FORMAT_TYPES}, optional={"json_schema": st.fixed_dictionaries({"schema": ANY})}
    ),
    "structured_outputs": st.dictionaries(STRUCTURED, ANY, max_size=2),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), ANY),
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": FORMAT_TYPES}, optional={"schema": ANY})}),
    "reasoning": st.dictionaries(st.sampled_from(["effort", "summary"]), ANY),
    "logit_bias": st.dictionaries(st.text("0123456789-", max_size=5), SCALARS, max_size=3),
    "guided_regex": st.text("a(|)[]*+?{}1,\\b^$.", max_size=12),
    "guided_grammar": st.text('start: "a"|b/\n', max_size=24),
}
NUMBER = st.integers(-3, 40) | st.floats(-3, 3) | SCALARS
FIELD = st.one_of(
    st.tuples(st.sampled_from(NUMBERS.split()), NUMBER),
    *(st.tuples(st.just(name), SHAPES.get(name, ANY)) for name in OTHERS.split()),
)
FIELDS = st.lists(FIELD, max_size=4).map(dict)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "<|x|>"])
CALL = st.fixed_dictionaries({"id": WORDS, "function": st.fixed_dictionaries({"name": WORDS, "arguments": WORDS})})
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | SCALARS, "content": WORDS | ANY},
    optional={"tool_calls": st.lists(CALL | ANY, max_size=2), "tool_call_id": WORDS, "reasoning_content": WORDS | ANY},
)
ITEM_TYPES = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])
ITEM = st.fixed_dictionaries(
    {}, optional=dict.fromkeys("id content name arguments call_id output summary".split(), WORDS | ANY)
    | {"type": ITEM_TYPES | SCALARS, "role": ROLES | SCALARS},
)  # fmt: skip
NEEDED = {
    "/v1/completions": {"prompt": st.text(min_size=1, max_size=9) | ANY},
    "/v1/chat/completions": {"messages": st.lists(MESSAGE, max_size=3) | ANY},
    "/v1/responses": {"input": st.lists(ITEM, max_size=3) | ANY},
    "/v1/conversations": {"items": st.lists(ITEM, max_size=3) | ANY},
    "/tokenize": {"prompt": WORDS | ANY},
    "/detokenize": {"tokens": st.lists(st.integers(-1, 3000)) | ANY},
}
ASKED = st.one_of([st.tuples(st.just(path), st.fixed_dictionaries(needed), FIELDS) for path, needed in NEEDED.items()])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=ASKED)
async def test_no_body_is_an_error_of_the_server(
    served: Api, asked: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    path, needed, fields = asked
    content = json.dumps(fields | needed)
    answer = await served.http.post(path, content=content, headers={"content-type": "application/json"})
    event(f"{path} {answer.status_code}")
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        ErrorBody.model_validate_json(answer.content, strict=True)
