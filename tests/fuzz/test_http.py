"""The HTTP API against its own OpenAPI document: whatever fits it is served, the rest refused, as it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import ANY, PATIENCE, Fuzzed, again_and_again

schemathesis: Any = pytest.importorskip("schemathesis", reason="`make fuzz` installs it")
MODES = ("POSITIVE", "NEGATIVE")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "negative_data_rejection", "unsupported_method"),
)
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
SETTINGS = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "stream": st.booleans(),
    "priority": st.integers(-100, 100),
}
SEQUENCES = {
    **SETTINGS,
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 8),
    "seed": st.integers(0, 99),
    "return_token_ids": st.booleans(),
}
# Bodies that are served: what must be there, and what may be. Those that are drawn from the document seldom are.
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "POST /v1/chat/completions": (
        {"messages": HI},
        {
            **SEQUENCES,
            "logprobs": st.booleans(),
            "tools": st.just([{"type": "function", "function": FUNCTION}]),
            "tool_choice": st.sampled_from(["auto", "none"]),
        },
    ),
    "POST /v1/completions": ({"prompt": "Hi"}, SEQUENCES | {"logprobs": st.integers(0, 3)}),
    "POST /v1/responses": (
        {"input": "Hi", "max_output_tokens": 8},
        SETTINGS | {"store": st.booleans(), "instructions": st.just("Be brief."), "tools": st.just([])},
    ),
    "POST /v1/messages": ({"messages": HI, "max_tokens": 8}, SETTINGS | {"system": st.just("Be brief.")}),
    "POST /v1/messages/count_tokens": ({"messages": HI}, {"system": st.just("Be brief.")}),
    "POST /v1/responses/input_tokens": ({"input": "Hi"}, {"instructions": st.just("Be brief.")}),
    "POST /tokenize": ({"prompt": "Hi"}, {"return_token_strs": st.booleans()}),
    "POST /detokenize": ({"tokens": [7, 8]}, {}),
}


def operations(fuzzed: Fuzzed) -> dict[str, Any]:
    """Return the operations of the document by their labels, such as `POST /v1/completions`."""
    document = schemathesis.openapi.from_url(f"{fuzzed.suite.stack.http_url}/openapi.json")
    found = (result.ok() for result in document.get_all_operations())
    return {operation.label: operation for operation in found}


def checks() -> list[Any]:
    return [getattr(schemathesis.checks, name) for name in CHECKS]


@pytest.mark.parametrize("mode", MODES)
def test_requests_are_answered_as_the_document_says(fuzzed: Fuzzed, mode: str) -> None:
    known = operations(fuzzed)
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize"} <= set(known)
    generation = getattr(schemathesis.GenerationMode, mode)
    cases = st.one_of([each.as_strategy(generation_mode=generation) for each in known.values()])

    @ANY
    @given(case=cases)
    def call(case: Any) -> None:
        fuzzed.recent.append(case.as_curl_command())
        response = case.call(timeout=PATIENCE)
        case.validate_response(response, checks=checks())

    again_and_again(call, 0.1)
    fuzzed.check()


def test_what_is_served_is_as_the_document_says(fuzzed: Fuzzed) -> None:
    known = operations(fuzzed)
    bodies = st.one_of([st.tuples(st.just(label), _bodies(*given)) for label, given in SERVED.items()])

    def check(label: str, body: dict[str, Any]) -> None:
        case = known[label].Case(body=body, media_type="application/json")
        fuzzed.recent.append(case.as_curl_command())
        response = case.call(timeout=PATIENCE)
        assert response.status_code == 200, response.text
        case.validate_response(response, checks=checks())

    @ANY
    @given(asked=bodies)
    def call(asked: tuple[str, dict[str, Any]]) -> None:
        check(*asked)

    for label, (needed, possible) in SERVED.items():
        for stream in (False, True) if "stream" in possible else (False,):
            check(label, needed | ({"stream": True} if stream else {}))
    again_and_again(call, 0.1)
    fuzzed.check()


def _bodies(needed: dict[str, Any], possible: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.just(value) for name, value in needed.items()}, optional=possible)
