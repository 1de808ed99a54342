"""Which tokens end an answer: those that files name, and the mark that the template writes behind an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.ends import named_ends
from router.answers.text.chat import ChatTemplate
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.turn_ends import TurnMarks, end_mark
from tests.support.router.families import FAMILIES
from tests.support.router.tokenizers import byte_level

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS: dict[str, str | None] = {
    "chatml": "<|im_end|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3.5": "<|im_end|>",
    "qwen2-vl": "<|im_end|>", "qwen3-coder": "<|im_end|>", "llama2": "</s>", "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>", "llama3.2-vision": "<|eot_id|>", "llama4": "<|eot|>", "mistral-v0.1": "</s>",
    "mistral-nemo": "</s>", "mistral-small-3.1": "</s>", "gemma2": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "phi3": "<|end|>", "phi3-small": "<|end|>", "phi4": "<|im_end|>", "phi4-mini": "<|end|>", "deepseek-v2": "</s>",
    "deepseek-r1": "<｜end▁of▁sentence｜>", "deepseek-v3.1": "<｜end▁of▁sentence｜>",
    "command-r": "<|END_OF_TURN_TOKEN|>", "zephyr": "</s>", "vicuna": "</s>", "alpaca": "</s>",
    "openchat": "<|end_of_turn|>", "falcon": None, "glm4": None, "glm4.5": None, "granite": "<|end_of_text|>",
    "olmo2": "</s>", "smollm3": "<|im_end|>", "idefics3": "<end_of_utterance>", "llava": None,
    "llava-next-vicuna": None, "minimax": "<end_of_sentence>", "gpt-oss": "<|return|>", "internlm2": "<|im_end|>",
    "baichuan2": None, "exaone": "[|endofturn|]", "kimi-k2": "<|im_end|>", "hunyuan": "<|eos|>",
    "apertus": "<|assistant_end|>", "functionary": "<|stop|>", "hermes2-pro": "<|im_end|>",
}  # fmt: skip
OTHERS = (
    *(
        "<|im_start|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "[INST]",
        "[/INST]",
        "<s>",
        "<start_of_turn>",
        "<think>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|start|>", "<|message|>", "<|channel|>", "</think>", "<|im_sep|>"),
    *(
        "<reserved_106>",
        "<reserved_107>",
        "<|extra_0|>",
        "<|im_middle|>",
        "[|assistant|]",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
)
# Tokens that texts do not leave out.
SHOWN = ("<answer>", "</answer>", "<tool_call>")
ADDED = [
    *((text, place, True) for place, text in enumerate((*OTHERS, *sorted({end for end in ENDS.values() if end})))),
    *((text, 900 + place, False) for place, text in enumerate(SHOWN)),
]


def test_the_templates_of_all_families_are_here() -> None:
    assert set(ENDS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_tells_the_mark_behind_an_answer(family: str) -> None:
    marks = ChatTemplate(FAMILIES[family], SPECIAL).end_marks(ADDED)
    assert [text for text, *_ in marks] == ([] if ENDS[family] is None else [ENDS[family]])


@pytest.mark.parametrize(
    ("marks", "end"),
    [
        (TurnMarks("<e>\n"), "<e>"),
        (TurnMarks("</x><e>"), "<e>"),
        (TurnMarks("</x>"), "</x>"),
        (TurnMarks("<a>", asks="<e><a>", between="<u>"), None),
        (TurnMarks("<a>", asks="<a>", between="<a>"), "<a>"),
        (TurnMarks("<e><a>", asks="<e><a>", between="<e><u>"), "<e>"),
        (TurnMarks("<e><b>", inside="<e><b>"), None),
        (TurnMarks("<b><e>", inside="<b>"), "<e>"),
        (TurnMarks(""), None),
        (TurnMarks("<e><b>"), "<e>"),
        (TurnMarks("<e>e>"), "<e>e>"),
    ],
)
def test_the_mark_neither_begins_a_turn_nor_stands_in_one(marks: TurnMarks, end: str | None) -> None:
    added = [
        (text, place, text != "</x>") for place, text in enumerate(("<u>", "<a>", "<b>", "<e>", "</x>", "<e>e>", ""))
    ]
    found = end_mark(marks, added)
    assert (None if found is None else found[0]) == end


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>", None),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>", "<|end|>"),
        ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "<|end|>"),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", None),
        (
            (
                "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
                "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
            ),
            "<|end|>",
        ),
        (
            (
                "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
                "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
            ),
            None,
        ),
    ],
)
def test_what_begins_a_turn_is_no_end(template: str, end: str | None) -> None:
    marks = ChatTemplate(template, SPECIAL).end_marks(ADDED)
    assert [text for text, *_ in marks] == ([] if end is None else [end])


def written(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


PLAIN = {"max_position_embeddings": 64, "vocab_size": 300}
TOKENIZER = {"model": {"vocab": {"a": 0, "<|end|>": 7}}, "added_tokens": [{"id": 9, "content": "<|im_end|>"}]}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {}),
        ({"config": {"eos_token_id": 2}}, {2: ["config.json"]}),
        ({"config": {"text_config": {"eos_token_id": [2, 3]}}}, {2: ["config.json"], 3: ["config.json"]}),
        (
            {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [3, 2]}},
            {3: ["generation_config.json"], 2: ["generation_config.json", "config.json"]},
        ),
        (
            {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": TOKENIZER},
            {2: ["config.json"], 9: ["the tokenizer's eos_token"]},
        ),
        (
            {"tokenizer_config": {"eos_token": {"content": "<|end|>"}}, "tokenizer": TOKENIZER},
            {7: ["the tokenizer's eos_token"]},
        ),
        (
            {"special_tokens_map": {"eos_token": "</s>"}, "added_tokens": {"</s>": 4}},
            {4: ["the tokenizer's eos_token"]},
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</s>",
                    "extra_special_tokens": {"eot_token": "<|eot|>"},
                    "added_tokens_decoder": {"4": {"content": "</s>"}, "5": {"content": "<|eot|>"}},
                }
            },
            {4: ["the tokenizer's eos_token"], 5: ["the tokenizer's eot_token"]},
        ),
        (
            {"tokenizer_config": {"eos_token": "b"}, "tokenizer": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}},
            {1: ["the tokenizer's eos_token"]},
        ),
        ({"tokenizer_config": {"eos_token": "gone"}, "tokenizer": TOKENIZER}, {}),
        ({"config": {"eos_token_id": [-1, None]}, "generation_config": {"eos_token_id": None}}, {}),
    ],
)
def test_all_files_name_ends_together(files: dict[str, Any], ends: dict[int, list[str]], tmp_path: Path) -> None:
    assert named_ends(written(tmp_path, **files)) == ends


def test_the_ends_of_another_tokenizer_count(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    written(model, config=PLAIN | {"eos_token_id": 2}, tokenizer_config={"eos_token": "<|end|>"}, tokenizer=TOKENIZER)
    written(other, tokenizer_config={"eos_token": "<|im_end|>"}, tokenizer=TOKENIZER)
    assert read_checkpoint(model, other).eos_token_ids == (2, 9)


def test_the_mark_of_the_template_ends_an_answer_beside_what_files_name(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mark = tokenizer.get_vocab()["<|im_end|>"]
    written(tmp_path, config=PLAIN | {"eos_token_id": 2}, tokenizer_config={"chat_template": FAMILIES["chatml"]})
    text, facts = CheckpointText.load(tmp_path, 64), read_checkpoint(tmp_path)
    assert text.ends(facts.ends, mark + 1) == {2: ["config.json"], mark: ["the chat template ends a turn with it"]}
    assert text.ends(facts.ends, mark) == {2: ["config.json"]}
