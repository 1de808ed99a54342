"""Chat templates that no parser should follow: each has a sentence at start, and none takes minutes or gigabytes."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.contracts.errors import InvalidConfig
from router.answers.text.chat import ChatTemplate

START = "the checkpoint's chat template"
LEVELS = "expected blocks and expressions of few levels"


def refusal(source: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        ChatTemplate(source, {})
    (found,) = caught.value.violations
    assert found.field == "--model"
    return found.description


@pytest.mark.parametrize(
    "source",
    [
        "{% if a %}" * 2000 + "x" + "{% endif %}" * 2000,
        "{% if a %}" * 150 + "x" + "{% endif %}" * 150,
        "{% for a in b %}" * 50 + "x" + "{% endfor %}" * 50,
        "{% if a %}" + "{% elif b %}x" * 4000 + "{% endif %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ " + "1+" * 5000 + "1 }}",
        "{{ a" + "|trim" * 5000 + " }}",
        "{{ a" + ".b" * 20_000 + " }}",
        "{{ a" + "()" * 20_000 + " }}",
        "{{ " + "1 if a else " * 5000 + "2 }}",
    ],
)
def test_a_template_of_thousands_of_levels_is_refused(source: str) -> None:
    said = refusal(source)
    assert said.startswith(f"{START} cannot be compiled (")
    assert said.endswith(f"); {LEVELS}")


def test_a_template_of_megabytes_is_refused() -> None:
    assert refusal("x" * 3_000_000) == f"{START} has 3000000 characters; expected at most 131072"
    assert refusal("{{ a }}" * 4097) == f"{START} has 4097 statements; expected at most 4096"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * ['a'] }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ lipsum(10 ** 9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_computes_nothing_large_when_it_is_compiled_and_probed(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(source, {})
    assert not template.sees_tools
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_products_of_templates_are_those_of_jinja() -> None:
    template = ChatTemplate("{{ '-' * 3 }}{{ 2 ** 5 }}{{ 3 * 1.5 }}{{ [1] * 2 }}", {})
    assert template._template.render() == "---324.5[1, 1]"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (5, "5"),
        ([5], "[5]"),
        ([{"name": "default"}], "a list"),
        ([{"template": "x"}], "a list"),
        ({"default": 5}, "an object"),
    ],
)
def test_a_template_that_is_no_text_is_named(given: object, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": given}))
    with pytest.raises(InvalidConfig) as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.violations[0].description == (
        f"{path}: chat_template is {shown}; expected a text, or a list of objects of name and template"
    )


@pytest.mark.parametrize(("token", "shown"), [([1], "[1]"), ({"a": 1}, "an object"), (5, "5")])
def test_a_special_token_that_is_no_text_is_named(token: object, shown: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "bos_token": token}))
    with pytest.raises(InvalidConfig) as caught:
        ChatTemplate.load(tmp_path)
    what = f"bos_token of the tokenizer in {tmp_path} is {shown}; expected a text, or an object with its content"
    assert caught.value.violations[0].description == what


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["{{ messages }}", "{% if", "{{ 1/0 }}", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "template", "default", "tool_use", "content"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@example(config={}, older={"chat_template": [{"name": []}]})
@given(
    config=st.dictionaries(st.sampled_from(["chat_template", "bos_token", "eos_token"]), VALUES),
    older=st.dictionaries(st.just("chat_template"), VALUES),
)
def test_any_templates_are_read_or_refused(
    config: dict[str, Any], older: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.json").write_text(json.dumps(older))
    try:
        template = ChatTemplate.load(folder)
    except InvalidConfig:
        return
    assert template is None or template.form is not None
