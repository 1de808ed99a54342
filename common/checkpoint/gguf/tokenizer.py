"""The tokenizer of a GGUF file as the files of a Hugging Face checkpoint.

Two kinds are read: "gpt2", byte-level BPE, where `tokenizer.ggml.pre` names how text is cut before merges; and "llama",
the BPE of sentencepiece, whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoint.gguf.header import Header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens
_LONGEST: Final = 1024  # characters: the ways to make a token of two are tried at each of them
_SPACE: Final = "▁"  # stands for a space in sentencepiece
# Tokens that end an answer in one format of chats or another, besides those that a file names. Files made in haste
# give them any type.
_ENDS: Final = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<EOT>"),
        *("<｜end▁of▁sentence｜>", "<end_of_utterance>", "<end_of_sentence>", "<|return|>", "<|call|>", "<|stop|>"),
    )
)
# gpt-oss ends a thought with the one where the other ends an answer.
_INNER, _OUTER = "<|end|>", "<|return|>"
_NAMED: Final = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut into words before merges. `whole`: a word that is a token is not merged from its parts."""

    steps: tuple[_Json, ...]
    normalizer: _Json | None = None
    whole: bool = False
    bos: bool = False


def _split(pattern: str) -> _Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> _Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _words(digits: str) -> str:
    """Return the expression of Llama 3 and Qwen 2, which differ in how many digits a word has."""
    shortened = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return shortened + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + rest


_GPT2: Final = _Cut((_byte_level(True),))
_LLAMA3: Final = _Cut((_split(_words(r"\p{N}{1,3}")), _byte_level(False)), whole=True, bos=True)
_QWEN2: Final = _Cut((_split(_words(r"\p{N}")), _byte_level(False)), normalizer={"type": "NFC"})
_SMOLLM: Final = _Cut(({"type": "Digits", "individual_digits": True}, _byte_level(True)))
_CUTS: Final[Mapping[str, _Cut]] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
}


def tokenizer_files(header: Header) -> dict[str, _Json]:
    """Return tokenizer.json and tokenizer_config.json by name. Raises InvalidConfig for a kind that is not read."""
    vocabulary = _Vocabulary(header)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level_bpe(vocabulary)
    elif kind == "llama":
        made = _sentencepiece(vocabulary)
    else:
        raise header.refuse(
            f"its tokenizer is of kind {kind}; gpt2 (byte-level BPE) and llama (sentencepiece) are read"
        )
    fixed = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(vocabulary.added())}
    return {"tokenizer.json": fixed | made, "tokenizer_config.json": _tokenizer_config(vocabulary)}


def chat_template(header: Header) -> str | None:
    """Return the chat template; None when the file has none."""
    found = header.metadata.get("tokenizer.chat_template")
    return found if isinstance(found, str) and found else None


def generation_config(header: Header) -> _Json:
    """Return what generation_config.json would hold: all tokens that end an answer."""
    vocabulary = _Vocabulary(header)
    named = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {each for each in named if isinstance(each, int)}
    ends |= {index for index, _ in vocabulary.ends()}
    return {"eos_token_id": sorted(ends)} if ends else {}


class _Vocabulary:
    """The tokens of a file with their types. Raises InvalidConfig when it has none."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tokens: Sequence[str] = header.metadata.get("tokenizer.ggml.tokens") or ()
        if not self.tokens:
            raise header.refuse(
                "it has no tokenizer (tokenizer.ggml.tokens); convert the model again with its tokenizer"
            )
        self.types: Sequence[int] = header.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise header.refuse(f"it has {len(self.tokens)} tokens and {len(self.types)} types of tokens")
        if (longest := max(map(len, self.tokens))) > _LONGEST:
            raise header.refuse(f"a token has {longest} characters; expected at most {_LONGEST}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{key}", default)

    def of_type(self, *kinds: int) -> Iterator[tuple[int, str]]:
        return ((index, text) for index, text in enumerate(self.tokens) if self.types[index] in kinds)

    def ends(self) -> Iterator[tuple[int, str]]:
        """Yield the tokens that end an answer by their text, whatever their type."""
        harmony = _OUTER in self.tokens
        for index, text in enumerate(self.tokens):
            if text in _ENDS and self.types[index] != _UNUSED and not (harmony and text == _INNER):
                yield index, text

    def ids(self) -> dict[str, int]:
        """Return the id of each token that can be used; of equal ones the first."""
        found: dict[str, int] = {}
        for index, text in enumerate(self.tokens):
            if self.types[index] != _UNUSED:
                found.setdefault(text, index)
        return found

    def added(self) -> Iterator[_Json]:
        """Yield the tokens that are found in a text before anything else."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        ends = {index for index, _ in self.ends()}
        for index, text in enumerate(self.tokens):
            if index in ends or self.types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                special = index in ends or self.types[index] != _USER_DEFINED
                yield {"id": index, "content": text, **plain, "special": special}

    def named(self, name: str) -> str | None:
        """Return the text of the token whose id is under `name`."""
        found = self.get(f"{name}_token_id")
        return self.tokens[found] if isinstance(found, int) and 0 <= found < len(self.tokens) else None


def _tokenizer_config(vocabulary: _Vocabulary) -> _Json:
    tokens = {f"{plain}_token": vocabulary.named(name) for name, plain in _NAMED.items()}
    found = {name: text for name, text in tokens.items() if text is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **found}


def _byte_level_bpe(vocabulary: _Vocabulary) -> _Json:
    header, pre = vocabulary.header, vocabulary.get("pre")
    if pre is None and str(header.metadata.get("general.architecture")).startswith("qwen"):
        pre = "qwen2"
    if pre not in _CUTS:
        known = ", ".join(_CUTS)
        said = "it does not say how its tokenizer cuts text" if pre is None else f"its tokenizer cuts text like {pre}"
        raise header.refuse(f"{said} (tokenizer.ggml.pre); known are {known}. Convert it again, or serve another file")
    cut = _CUTS[pre]
    merges = [each.split(" ", 1) for each in vocabulary.get("merges", ())]
    steps = list(cut.steps)
    return {
        "normalizer": cut.normalizer,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _around(vocabulary, cut.bos),
        "decoder": _byte_level(True),
        "model": _bpe(vocabulary.ids(), merges, ignore_merges=cut.whole),
    }


def _sentencepiece(vocabulary: _Vocabulary) -> _Json:
    spaces: _Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = bool(vocabulary.get("add_space_prefix", True))
    steps = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    space: _Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    back: list[_Json] = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((text for _, text in vocabulary.of_type(_UNKNOWN)), None)
    more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary, True),
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _bpe(vocabulary.ids(), _merges_of_scores(vocabulary), **more),
    }


def _merges_of_scores(vocabulary: _Vocabulary) -> list[list[str]]:
    """Return the merges of a sentencepiece vocabulary: every way to make a token of two, the best token first."""
    scores = vocabulary.get("scores") or [0.0] * len(vocabulary.tokens)
    ids = {text: index for index, text in vocabulary.of_type(_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for index, text in vocabulary.of_type(_NORMAL):
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], index, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _bpe(ids: dict[str, int], merges: Sequence[Sequence[str]], **more: object) -> _Json:
    plain = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    rest = {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    return plain | rest | more | {"vocab": ids, "merges": merges}


def _around(vocabulary: _Vocabulary, bos: bool) -> _Json | None:
    """Return what puts special tokens before and behind a text, where the file asks for it."""
    wanted = {"bos": vocabulary.get("add_bos_token", bos), "eos": vocabulary.get("add_eos_token", False)}
    texts = {name: text for name in wanted if wanted[name] and (text := vocabulary.named(name)) is not None}
    if not texts:
        return None
    ids = {text: vocabulary.get(f"{name}_token_id") for name, text in texts.items()}

    def part(name: str) -> list[_Json]:
        return [{"SpecialToken": {"id": texts[name], "type_id": 0}}] if name in texts else []

    def whole(sequence: str) -> list[_Json]:
        return [*part("bos"), {"Sequence": {"id": sequence, "type_id": 0}}, *part("eos")]

    special = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in ids.items()}
    return {
        "type": "TemplateProcessing",
        "single": whole("A"),
        "pair": [*whole("A"), *whole("B")],
        "special_tokens": special,
    }
