"""The demonstration prompts: fixed, long enough to share blocks, and asked over what the text says."""

import ast
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cli import demo_model
from cli.demo_model import CHECKPOINT, prompts, words, world


def test_the_system_text_holds_300_to_700_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert 300 <= len(tokenizer.encode(prompts.system_text()).ids) <= 700


@pytest.mark.parametrize("count", [1, 2, 8, 20])
def test_questions_are_distinct_and_their_answers_in_the_text(count: int) -> None:
    asked = prompts.questions(count)
    assert len({question.text for question in asked}) == count
    assert all(question.answer in prompts.system_text() for question in asked)


def test_messages_hold_the_text_then_the_question() -> None:
    roles = [(message["role"], message["content"]) for message in prompts.messages("Hello!")]
    assert roles == [("system", prompts.system_text()), ("user", "Hello!")]


@pytest.mark.parametrize("module", [demo_model, prompts, words, world])
def test_prompts_need_only_the_standard_library(module: object) -> None:
    source = Path(str(getattr(module, "__file__", ""))).read_text()
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported}
    others = {name.split(".")[0] for name in names if not name.startswith("cli.demo_model")}
    assert others <= sys.stdlib_module_names
