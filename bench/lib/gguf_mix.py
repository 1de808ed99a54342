"""Writes a GGUF file with random weights in the mix that llama.cpp calls Q4_K_M, with the tokenizer of another file.

    python -m bench.lib.gguf_mix FILE --tokenizer smollm2
    python -m bench.gguf --model FILE --json

Memory and speed are those of a trained model of the shape; no package has a file of this mix. Tensors are Q4_K. A tied
embedding is Q6_K, and so are values and the last linear of the MLP in half of the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from common.checkpoint.gguf.names import gguf_file

_BLOCK: Final = 256
_VOCAB: Final = "tokenizer.ggml.tokens"
_HEAD_DIM: Final = 64
_DEVIATION: Final = 0.02  # of the weights, about
# Bytes of a block, and its float16 numbers: where each stands, and its value for weights of deviation 1 around 0.
_BLOCKS: Final = {"Q4_K": (144, {0: 1 / 280, 2: 7.5 / 280}), "Q6_K": (210, {208: 1 / 1360})}
Octets = npt.NDArray[np.uint8]


def write_mix(path: Path, tokenizer: Path, hidden: int, inner: int, layers: int) -> None:
    """Write a model of the Llama family whose heads have 64 elements, four of them on each head of K and V."""
    writer = GGUFWriter(path, "llama")
    vocab = _copy_tokenizer(GGUFReader(tokenizer), writer)
    heads = hidden // _HEAD_DIM
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    made = np.random.default_rng(1)
    for name, shape in _shapes(vocab, hidden, inner, layers):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            kind = _type(name, layers)
            writer.add_tensor(name, _blocks(made, kind, shape), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(source: GGUFReader, writer: GGUFWriter) -> int:
    """Copy what a file says about its tokenizer; return how many tokens there are."""
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    return len(source.fields[_VOCAB].contents())


def _shapes(vocab: int, hidden: int, inner: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    parts: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (hidden // 4, hidden),
        "attn_v": (hidden // 4, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for layer in range(layers):
        yield from ((f"blk.{layer}.{part}.weight", shape) for part, shape in parts.items())


def _type(name: str, layers: int) -> str:
    """Return the type of a matrix. The first and last eighth of the layers have more bits, and a third of others."""
    if not name.startswith("blk."):
        return "Q6_K"
    layer, part = int(name.split(".")[1]), name.split(".")[2]
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more and part in ("attn_v", "ffn_down") else "Q4_K"


def _blocks(made: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Octets:
    nbytes, halves = _BLOCKS[kind]
    blocks = made.integers(0, 256, (shape[0] * shape[1] // _BLOCK, nbytes), dtype=np.uint8)
    for at, each in halves.items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(_DEVIATION * each).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def main() -> None:
    flags: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("file", type=Path)
    flags.add_argument("--tokenizer", default="smollm2", help="a GGUF file, or the name of one (default: smollm2)")
    flags.add_argument("--hidden", type=int, default=2048)
    flags.add_argument("--inner", type=int, default=8192)
    flags.add_argument("--layers", type=int, default=16)
    args = flags.parse_args()
    source = gguf_file(args.tokenizer)
    assert source is not None
    write_mix(args.file, source, args.hidden, args.inner, args.layers)


if __name__ == "__main__":
    main()
