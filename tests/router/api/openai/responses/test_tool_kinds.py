"""Tools of the Responses API as functions of a chat, and their calls as items."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, Unsupported
from router.api.openai.requested_tools import left_out_note
from router.api.openai.responses.items import items_of
from router.api.openai.responses.request import conversation, order_of
from router.api.openai.responses.tool_kinds import ToolKinds, ToolName, arguments_of, choice_of, input_of, tool_kinds
from router.api.openai.responses.types import ResponsesRequest

IDS = {"id": "fc_1", "call_id": "call_1"}
GRAMMAR: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}

LONG = 'start: "a"\n#' + "." * 8_000


def custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "patch", "description": "Patches."} | ({"format": form} if form else {})


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    (found,) = tool_kinds([tool]).functions
    return dict(found["function"])


def test_functions_stay_as_they_are() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    assert function_of(tool) == {"name": "add", "parameters": {"type": "object"}, "strict": True}


def test_functions_of_a_namespace_have_its_name_before_theirs() -> None:
    given = [{"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "spawn"}, custom()]}]
    found = tool_kinds(given)
    assert [each["function"]["name"] for each in found.functions] == ["crew.spawn", "crew.patch"]
    assert found.named("crew.spawn") == ToolName("function", "spawn", "crew")
    assert found.named("crew.patch") == ToolName("custom", "patch", "crew")
    assert found.placed("tools[1].function.name") == "tools[0].tools[1].function.name"
    assert found.placed("tools[2].function") == "tools[2].function"


def test_a_name_that_is_too_long_with_its_namespace_stands_alone() -> None:
    assert ToolName("function", "a" * 40, "b" * 23).function == "b" * 23 + "." + "a" * 40
    assert ToolName("function", "a" * 40, "b" * 24).function == "a" * 40


@pytest.mark.parametrize(
    ("form", "schema", "description", "strict"),
    [
        ({}, {"type": "string"}, "Patches.", False),
        ({"type": "text"}, {"type": "string"}, "Patches.", False),
        (
            {"type": "grammar", "syntax": "regex", "definition": "a|b+"},
            {"type": "string", "pattern": "^(?:a|b+)$"}, "Patches.", True,
        ),
        (GRAMMAR, {"type": "string"}, 'Patches.\nThe input follows this grammar of Lark:\nstart: "a"', True),
    ],
)  # fmt: skip
def test_a_custom_tool_is_a_function_of_a_text(
    form: dict[str, Any], schema: dict[str, Any], description: str, strict: bool
) -> None:
    found = function_of(custom(**form))
    assert (found["name"], found["description"], found["strict"]) == ("patch", description, strict)
    assert found["parameters"] == {
        "type": "object", "properties": {"input": schema}, "required": ["input"], "additionalProperties": False,
    }  # fmt: skip


def test_a_grammar_is_kept_for_the_function_that_the_model_sees() -> None:
    inner = [custom(**GRAMMAR), {"type": "custom", "name": "free"}]
    found = tool_kinds([{"type": "namespace", "name": "crew", "tools": inner}, {"type": "function", "name": "add"}])
    assert found.grammars == {"crew.patch": 'start: "a"'}


def test_a_grammar_reaches_the_tool_that_is_called() -> None:
    body = ResponsesRequest(input="Hi", tools=[custom(**GRAMMAR), {"type": "custom", "name": "free"}])
    kinds = tool_kinds(body.tools or ())
    order = order_of(body, kinds, conversation(body, [], items_of(body.input)))
    assert order.tools is not None
    patch, free = order.tools.use.tools
    assert (patch.name, patch.strict, patch.grammar) == ("patch", True, 'start: "a"')
    assert (free.name, free.strict, free.grammar) == ("free", False, "")
    # The model sees the schema of a text.
    assert order.tools.given[0]["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert patch.parameters["properties"] == {"input": {"type": "string", "format": "lark"}}


def test_tools_of_vendors_are_left_out_and_named_once() -> None:
    found = tool_kinds([{"type": "web_search"}, custom(), {"type": "mcp"}, {"type": "web_search"}])
    assert [each["function"]["name"] for each in found.functions] == ["patch"]
    assert found.left_out == ("web_search", "mcp")
    assert left_out_note(found.left_out) == "tools are left out that this server does not run: web_search, mcp"
    assert left_out_note(ToolKinds().left_out) == ""


@pytest.mark.parametrize(
    ("tool", "error", "what"),
    [
        ({"type": "psychic"}, Unsupported, "tools[0].type: 'psychic' is not offered; function, custom and namespace"),
        ({}, Unsupported, "tools[0].type: None is not offered"),
        ({"type": ["web_search"]}, Unsupported, "tools[0].type: ['web_search'] is not offered"),
        ({"type": "namespace", "name": 5, "tools": []}, InvalidRequest, "tools[0].name: is 5; expected a text"),
        ({"type": "namespace", "name": "a", "tools": [5]}, InvalidRequest, "tools[0].tools: must be a list of tools"),
        (
            {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]},
            Unsupported, "tools[0].tools[0].type: 'namespace' is not offered",
        ),
        (custom(type="poem"), InvalidRequest, "tools[0].format.type: is 'poem'; expected text or grammar"),
        (custom(**GRAMMAR | {"syntax": "ebnf"}), InvalidRequest, "tools[0].format: must be a grammar; expected"),
        (custom(**GRAMMAR | {"definition": 5}), InvalidRequest, "tools[0].format: must be a grammar; expected"),
        (
            {"type": "namespace", "name": "a", "tools": [custom(), custom(**GRAMMAR | {"definition": ""})]},
            InvalidRequest, "tools[0].tools[1].format.definition: cannot be enforced: no rule is named start",
        ),
        (
            custom(**GRAMMAR | {"definition": "start: /a(?=b)/"}), InvalidRequest,
            "tools[0].format.definition: cannot be enforced: the expression /a(?=b)/ has (?=b, a look-around",
        ),
        (
            custom(**GRAMMAR | {"definition": "#" * 8_193}), InvalidRequest,
            "tools[0].format.definition: cannot be enforced: it has 8193 bytes; expected at most 8192",
        ),
        (
            {"type": "namespace", "name": "a", "tools": [custom(**GRAMMAR | {"definition": LONG})] * 3},
            InvalidRequest, "tools: has grammars of more than 16384 bytes",
        ),
        ({"type": "namespace", "name": "a", "tools": [custom()] * 2_000}, InvalidRequest, "tools: has more than"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_named(tool: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error) as caught:
        tool_kinds([tool])
    assert what in str(caught.value)


def test_a_choice_names_the_function() -> None:
    assert choice_of({"type": "custom", "name": "patch"}) == {"type": "function", "function": {"name": "patch"}}
    chosen = {"type": "function", "name": "spawn", "namespace": "crew"}
    assert choice_of(chosen) == {"type": "function", "function": {"name": "crew.spawn"}}
    with pytest.raises(Unsupported, match="'web_search' is not offered"):
        choice_of({"type": "web_search"})


@pytest.mark.parametrize("text", ["", "a", 'say "hi"\n', "\u00e9\u2028"])
def test_an_input_is_the_argument_of_its_function(text: str) -> None:
    assert input_of(arguments_of(text)) == text


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"input": 5}', '{"text": "a"}'])
def test_arguments_of_another_form_are_the_input_themselves(arguments: str) -> None:
    assert input_of(arguments) == arguments


def test_calls_have_the_names_of_the_client() -> None:
    assert ToolName("function", "spawn", "crew").item(IDS, "{}", "completed") == {
        **IDS, "type": "function_call", "name": "spawn", "namespace": "crew", "arguments": "{}", "status": "completed",
    }  # fmt: skip
    assert ToolName("custom", "patch").item(IDS, '{"input": "a"}', "completed") == {
        **IDS, "type": "custom_tool_call", "name": "patch", "input": "a", "status": "completed",
    }  # fmt: skip
