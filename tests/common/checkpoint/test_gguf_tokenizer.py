"""Tokenizers of GGUF files: the ids that the original tokenizers give, for each way to cut text."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.checkpoint.gguf.header import Header, read_header
from common.checkpoint.gguf.tokenizer import chat_template, generation_config, tokenizer_files
from common.contracts.errors import InvalidConfig
from tests.support.gguf_files import finish

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXTS = (
    "Hello, world! It's 12345 o'clock; they'll say I'D LIKE 3.14159 euros.",
    "  spaces   and\ttabs\n\n\nnew lines \r\n end ",
    "naïve café — Straße, 東京 and हिन्दी, مرحبا, emoji 👩‍🚀🎉, e\u0301 combined",
    "def f(x):\n    return x**2 + 10_000  # comment",
    "<|im_start|>user\nWhat's 2024?<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
)
_CORPUS = (Path(__file__).parents[3] / "README.md", Path(__file__).parents[3] / "ARCHITECTURE.md")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cut(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


def split(pattern: str) -> Any:
    return cut(
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


# How the original tokenizers cut text, by the name that a file has for it.
_ORIGINALS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": split(_LLAMA3),
    "qwen2": split(_LLAMA3.replace("{1,3}", "")),
    "smollm": cut(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


@functools.cache
def trained(pre: str) -> Tokenizer:
    """Return a byte-level tokenizer whose merges were learned with a way to cut text."""
    made = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    made.pre_tokenizer, made.decoder = _ORIGINALS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"vocab_size": 1500, "initial_alphabet": alphabet, "show_progress": False}
    made.train([str(path) for path in _CORPUS], trainers.BpeTrainer(special_tokens=list(_SPECIAL), **options))
    return made


def header_of(path: Path, made: Tokenizer, kind: str, pre: str | None = None, **more: Any) -> Header:
    """Return the header of a file with a trained tokenizer, written as llama.cpp's converter would."""
    model = json.loads(made.to_str())["model"]
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token.content for token in made.get_added_tokens_decoder().values()}
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [more.get("types", {}).get(token, found) for token, found in zip(tokens, types, strict=True)]
    )
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    else:
        writer.add_token_scores(more["scores"](tokens, model["merges"]))
    for name, token in more.get("named", {}).items():
        getattr(writer, f"add_{name}_token_id")(vocabulary[token])
    if "bos" in more:
        writer.add_add_bos_token(more["bos"])
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    return read_header(finish(writer, path))


def loaded(header: Header) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(header)["tokenizer.json"]))


def assert_equal(ours: Tokenizer, original: Tokenizer, texts: Iterable[str], special: bool = False) -> None:
    for text in texts:
        wanted = original.encode(text, add_special_tokens=special).ids
        assert ours.encode(text, add_special_tokens=special).ids == wanted, text
        assert ours.decode(wanted, skip_special_tokens=False) == original.decode(wanted, skip_special_tokens=False)


@pytest.mark.parametrize("pre", _ORIGINALS)
def test_byte_level_tokenizers_give_the_ids_of_the_original(tmp_path: Path, pre: str) -> None:
    original = trained(pre)
    assert_equal(loaded(header_of(tmp_path / "t.gguf", original, "gpt2", pre)), original, _TEXTS)


def test_each_way_to_cut_text_gives_other_ids(tmp_path: Path) -> None:
    """Files with equal merges: a wrong way would show in the test above."""
    original = trained("gpt-2")
    ids = {
        pre: tuple(
            tuple(loaded(header_of(tmp_path / f"{pre}.gguf", original, "gpt2", pre)).encode(text).ids)
            for text in _TEXTS
        )
        for pre in _ORIGINALS
    }
    assert len(set(ids.values())) == len(_ORIGINALS)


@functools.cache
def sentencepiece() -> Tokenizer:
    """Return a tokenizer as Llama 2's is converted: bytes where no token fits, a space before the text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    options: dict[str, Any] = {"vocab_size": 1500, "show_progress": False, "max_token_length": 12}
    made.train(
        [str(path) for path in _CORPUS],
        trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>", *bytes_of], **options),
    )
    model = json.loads(made.to_str())
    model["added_tokens"] = [token for token in model["added_tokens"] if token["content"] not in bytes_of]
    model["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Tokenizer.from_str(json.dumps(model))


def scores_of(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return sentencepiece's scores: the earlier a token is merged, the higher."""
    ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    return [ranks.get(token, 0.0) for token in tokens]


def sentencepiece_types() -> dict[str, Any]:
    found = {f"<0x{byte:02X}>": gguf.TokenType.BYTE for byte in range(256)}
    return {**found, "<unk>": gguf.TokenType.UNKNOWN}


def test_a_sentencepiece_tokenizer_gives_the_ids_of_the_original(tmp_path: Path) -> None:
    original = sentencepiece()
    options: dict[str, Any] = {"scores": scores_of, "types": sentencepiece_types(), "named": {"bos": "<s>"}}
    header = header_of(tmp_path / "t.gguf", original, "llama", **options)
    assert_equal(loaded(header), original, _TEXTS)
    ours = loaded(header)
    assert ours.encode("a").tokens == ["<s>", *original.encode("a").tokens]  # by default, as llama.cpp does
    header = header_of(tmp_path / "u.gguf", original, "llama", bos=False, **options)
    assert loaded(header).encode("a").tokens == original.encode("a").tokens


def test_special_tokens_have_their_names_and_ends(tmp_path: Path) -> None:
    named = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}
    header = header_of(tmp_path / "t.gguf", trained("smollm"), "gpt2", "smollm", named=named)
    config = tokenizer_files(header)["tokenizer_config.json"]
    assert {name: config[f"{name}_token"] for name in named} == named
    assert generation_config(header) == {"eos_token_id": [0, 2]}
    assert chat_template(header) is None
    assert loaded(header).encode("hi").ids == loaded(header).encode("hi", add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL])
def test_a_token_ends_an_answer_by_its_text_whatever_its_type(kind: gguf.TokenType, tmp_path: Path) -> None:
    named = {"eos": "<|endoftext|>"}
    header = header_of(
        tmp_path / "t.gguf", trained("smollm"), "gpt2", "smollm", named=named, types={"<|im_end|>": kind}
    )
    assert generation_config(header) == {"eos_token_id": [0, 2]}
    ids = loaded(header).encode("<|im_end|>").ids
    assert ids == [2]
    assert loaded(header).decode(ids) == ""


def test_the_mark_inside_an_answer_of_gpt_oss_ends_none(tmp_path: Path) -> None:
    made = trained("smollm")
    made.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    vocabulary = made.get_vocab()
    header = header_of(tmp_path / "t.gguf", made, "gpt2", "smollm")
    ends = sorted([0, 2, vocabulary["<|return|>"], vocabulary["<|call|>"]])
    assert generation_config(header) == {"eos_token_id": ends}


def test_a_byte_level_tokenizer_begins_texts_where_the_file_says_so(tmp_path: Path) -> None:
    named = {"bos": "<|im_start|>"}
    header = header_of(tmp_path / "t.gguf", trained("smollm"), "gpt2", "smollm", named=named, bos=True)
    assert loaded(header).encode("hi").tokens[0] == "<|im_start|>"
    header = header_of(tmp_path / "u.gguf", trained("llama-bpe"), "gpt2", "llama-bpe", named=named)
    assert loaded(header).encode("hi").tokens[0] == "<|im_start|>"  # Llama 3 does by default


def test_user_defined_tokens_are_found_whole_and_are_not_special(tmp_path: Path) -> None:
    types = {"<|im_start|>": gguf.TokenType.USER_DEFINED}
    ours = loaded(header_of(tmp_path / "t.gguf", trained("smollm"), "gpt2", "smollm", types=types))
    ids = ours.encode("a<|im_start|>b<|im_end|>").ids
    assert ours.decode(ids) == "a<|im_start|>b"


def test_unused_tokens_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    types = {"<|im_start|>": gguf.TokenType.UNUSED}
    ours = loaded(header_of(tmp_path / "t.gguf", trained("smollm"), "gpt2", "smollm", types=types))
    assert ours.token_to_id("<|im_start|>") is None
    assert ours.token_to_id("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("kind", "pre", "words"),
    [
        ("bert", None, "its tokenizer is of kind bert; gpt2 (byte-level BPE) and llama (sentencepiece) are read"),
        ("gpt2", "tekken", "its tokenizer cuts text like tekken (tokenizer.ggml.pre); known are gpt-2"),
        ("gpt2", None, "it does not say how its tokenizer cuts text (tokenizer.ggml.pre)"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, kind: str, pre: str | None, words: str) -> None:
    header = header_of(tmp_path / "t.gguf", trained("gpt-2"), kind, pre, scores=scores_of)
    with pytest.raises(InvalidConfig) as caught:
        tokenizer_files(header)
    assert words in str(caught.value)


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    header = read_header(finish(writer, tmp_path / "t.gguf"))
    with pytest.raises(InvalidConfig, match="it has no tokenizer"):
        tokenizer_files(header)
