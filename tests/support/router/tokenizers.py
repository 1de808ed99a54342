"""Small tokenizers of each family, made here so that tests need no download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level() -> Tokenizer:
    """Byte-level BPE as GPT-2 has it: bytes, merges that end inside characters, a special and a plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("ä", "½"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("ł", "a"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["two words"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece with byte fallback as Llama 2 has it: one leading space is stripped."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ["▁", "a", "▁a", "é", "▁你", "😀", "▁▁", "b"]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece as BERT has it: spaces appear between words, pieces join."""
    vocab = {token: number for number, token in enumerate(["[UNK]", "play", "##ing", "##s", "you", "!", "你"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with Metaspace: the first token loses its space."""
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -1.0), ("the", -1.0), ("▁▁", -2.0), ("é", -2.0), ("你", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer
