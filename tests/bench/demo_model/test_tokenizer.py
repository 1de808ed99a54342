"""The demo model's tokenizer as it ships: words are single tokens, text comes back, the chat template is exact."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench.demo_model import rows, tokenizer
from cli.demo_model import CHECKPOINT


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(CHECKPOINT)
    return found


def test_every_word_of_the_world_is_one_token(shipped: Tokenizer) -> None:
    assert [word for word in rows.ALL_WORDS if len(shipped.encode(word).ids) != 1] == []


@pytest.mark.parametrize(
    "text", [" Anna visits Oslo.", "naïve 日本語 🙂\n\ttab", " The red gate opens with 4821.", "{}[]<>"]
)
def test_any_text_comes_back(shipped: Tokenizer, text: str) -> None:
    assert shipped.decode(shipped.encode(text).ids) == text


def test_digits_are_tokens_of_their_own(shipped: Tokenizer) -> None:
    assert shipped.encode(" 4821").tokens[-4:] == ["4", "8", "2", "1"]


def test_the_cached_encoder_equals_the_tokenizer(shipped: Tokenizer) -> None:
    encode = tokenizer.Encoder(shipped)
    for seed in range(40):
        ids = rows.draw(random.Random(seed), encode, 256).ids
        text = shipped.decode(ids, skip_special_tokens=False)
        assert encode(text) == shipped.encode(text).ids == ids


def test_the_shipped_tokenizer_is_the_one_that_training_makes(shipped: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab() == shipped.get_vocab()


def test_the_chat_template_writes_roles_and_ends(loaded: PreTrainedTokenizerBase) -> None:
    chat = [
        {"role": "system", "content": "Anna visits Oslo."},
        {"role": "user", "content": "Which town does Anna visit?"},
    ]
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|system|> Anna visits Oslo.<|end|><|user|> Which town does Anna visit?<|end|><|assistant|>"
    )


def test_the_chat_template_holds_earlier_answers(loaded: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello! How can I help you?"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == (
        "<|bos|><|user|> Hello!<|end|><|assistant|> Hello! How can I help you?<|end|>"
    )
