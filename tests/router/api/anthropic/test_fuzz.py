"""Whatever a body says, it is served or refused in Anthropic's form; nothing is an error of the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from router.api.anthropic.app import MessagesError
from tests.support.router.http_harness import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | WORDS
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner), max_leaves=6)
KINDS = "text thinking redacted_thinking tool_use tool_result image"
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS.split()) | WORDS},
    optional={
        "text": WORDS | SCALARS,
        "thinking": WORDS,
        "id": WORDS,
        "name": WORDS,
        "input": st.dictionaries(WORDS, ANY, max_size=2) | SCALARS,
        "tool_use_id": WORDS,
        "content": WORDS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}), max_size=2) | ANY,
        "is_error": st.booleans(),
    },
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGE = st.fixed_dictionaries({"role": ROLES | SCALARS, "content": WORDS | st.lists(BLOCK, max_size=3) | ANY})
TOOL = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "sub", "a b"])},
    optional={"input_schema": st.just({"type": "object"}) | st.dictionaries(WORDS, ANY), "strict": ANY, "type": WORDS},
)
CHOICE = st.fixed_dictionaries(
    {"type": st.sampled_from(["auto", "any", "tool", "none"]) | WORDS},
    optional={"name": st.sampled_from(["add", "sub"]), "disable_parallel_tool_use": st.booleans()},
)
THINKING = st.fixed_dictionaries(
    {"type": st.sampled_from(["enabled", "adaptive", "disabled"]) | WORDS}, optional={"budget_tokens": st.integers()}
)
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["json_schema", "x"])}, optional={"schema": st.dictionaries(WORDS, ANY, max_size=2)}
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "system": WORDS | st.lists(BLOCK, max_size=2) | ANY,
        "tools": st.lists(TOOL, max_size=2) | ANY,
        "tool_choice": CHOICE | ANY,
        "thinking": THINKING | ANY,
        "output_config": st.fixed_dictionaries({}, optional={"format": FORMAT, "effort": WORDS}) | ANY,
        "stop_sequences": st.lists(WORDS, max_size=3) | ANY,
        "temperature": st.floats(-1, 3) | SCALARS,
        "top_k": st.integers(-3, 40) | SCALARS,
        "metadata": ANY,
        "chat_template_kwargs": st.dictionaries(WORDS, ANY, max_size=2) | ANY,
        "stream": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]),
    messages=st.lists(MESSAGE, max_size=4) | ANY,
    max_tokens=st.integers(-1, 99),
    fields=FIELDS,
)
async def test_no_body_is_an_error_of_the_server(
    served: Api, path: str, messages: Any, max_tokens: int, fields: dict[str, Any]
) -> None:
    served.reset()
    answer = await served.http.post(path, json={"messages": messages, "max_tokens": max_tokens, **fields})
    event(f"status {answer.status_code}")
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert MessagesError.model_validate(answer.json()).error.message
