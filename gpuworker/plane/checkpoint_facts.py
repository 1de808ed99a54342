"""The numbers of a checkpoint's configuration, read with the standard library alone, without its weights.

A multi-modal checkpoint keeps some numbers in its `text_config`; they are read from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from common.checkpoint.completed import completed, text_part
from common.checkpoint.context import ATTENTION_FREE, CONTEXT_KEYS, context_of, runs_any_length, usual_of_states
from common.checkpoint.ends import named_ends
from common.checkpoint.files import read_config, read_object
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import KvGeometry, KvGroupKind
from gpuworker.memory.layout import KV_BYTES, IndexKey, LayerShape, Reach, geometry_of, with_groups

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
# What the kinds of layers keep for a while, and where the configuration says how long.
_SPANS: Final = {
    "sliding_attention": (KvGroupKind.WINDOW, "sliding_window"),
    "chunked_attention": (KvGroupKind.CHUNK, "attention_chunk_size"),
}
# Numbers of layers with the gated delta rule, whose states are 4 bytes a number, and their convolutions' in the model's
# type.
_KEY_HEADS, _KEY_SIZE = "linear_num_key_heads", "linear_key_head_dim"
_VALUE_HEADS, _VALUE_SIZE = "linear_num_value_heads", "linear_value_head_dim"
_COLUMNS: Final = "linear_conv_kernel_dim"
_RECURRENT_BYTES: Final = 4
_DTYPES: Final = ("float32", "bfloat16", "float16")


class CheckpointFacts:
    """config.json of a checkpoint. Raises InvalidConfig when the file is broken, or a requested number is missing."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "config.json"
        self._config: Mapping[str, Any] = text_part(completed(read_config(directory)))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._number("vocab_size")

    @property
    def context(self) -> int:
        """Positions that the model spans."""
        return context_of(self._config) or self._number(*CONTEXT_KEYS)

    def usual_len(self, tokenizer: Path) -> int | None:
        """Return the length that is served where no option says one, by the tokenizer's folder; None: the model's."""
        if not runs_any_length(self._config):
            return None
        path = tokenizer / "tokenizer_config.json"
        return usual_of_states(read_object(path) if path.is_file() else {})

    def kv_geometry(self, dtype: str, kv_cache_dtype: str, block_size: int) -> KvGeometry:
        """Return the shape of a token's K/V, if all layers are alike; "auto" is the checkpoint's own type.

        Where some of them slide or attend in chunks, and others see everything, they are groups. Those of `states` have
        no K/V.

        Where no layer attends there is none.

        Where the configuration names latents, they are taken to be all that is kept, with index keys where layers
        attend by index. Layers that share K/V have none, and those that share an indexer no index keys.
        """
        if self._config.get("model_type") in ATTENTION_FREE:
            return geometry_of({}, self._kept(dtype, kv_cache_dtype), 0)
        heads, layers, kept = self._number(*_HEADS), self._number(*_LAYERS), self._kept(dtype, kv_cache_dtype)
        if self._config.get("num_kv_shared_layers"):
            layers = max(1, layers - self._number("num_kv_shared_layers"))
        if self._config.get("kv_lora_rank"):
            rank = self._number("kv_lora_rank")
            wide = rank + self._number("qk_rope_head_dim")
            index = self._index_key(dtype) if self._config.get("index_head_dim") else None
            alone = self._config.get("indexer_types") or ()
            shapes = {
                layer: LayerShape(1, wide, rank, values_in_keys=True, index=None if mode == "shared" else index)
                for layer, mode in zip_longest(range(layers), alone[:layers])
            }
            return geometry_of(shapes, kept, 0)
        head_dim = self._config.get("head_dim") or self._number(*_HIDDEN) // heads
        kv_heads = self._config.get("num_key_value_heads") or heads
        shape = LayerShape(int(kv_heads), int(head_dim), int(head_dim))
        mixers, _ = self.states(dtype)
        reaches = {layer: reach for layer, reach in enumerate(self._reaches(layers)) if layer not in mixers}
        return with_groups(geometry_of(dict.fromkeys(reaches, shape), kept, 0), reaches, {}, block_size)

    def states(self, dtype: str) -> tuple[tuple[int, ...], int]:
        """Return the layers that keep a state, and the bytes of one sequence's; none where they are not named.

        Named are those of layers with the gated delta rule (qwen3_next, qwen3_5).
        """
        kinds = self._config.get("layer_types") or ()
        layers = tuple(number for number, kind in enumerate(kinds) if kind == "linear_attention")
        names = (_KEY_HEADS, _KEY_SIZE, _VALUE_HEADS, _VALUE_SIZE, _COLUMNS)
        if not layers or not all(isinstance(self._config.get(name), int) for name in names):
            return (), 0
        key_heads, key_size, value_heads, value_size, columns = (self._number(name) for name in names)
        channels = 2 * key_heads * key_size + value_heads * value_size
        convolution = channels * columns * KV_BYTES[self._kept(dtype, "auto")]
        return layers, len(layers) * (value_heads * key_size * value_size * _RECURRENT_BYTES + convolution)

    def _reaches(self, layers: int) -> list[Reach]:
        """Return how far back each layer sees, by its kind; a span that holds every context leaves nothing out."""
        kinds, found = self._config.get("layer_types") or (), [Reach()] * layers
        for layer, name in enumerate(kinds[:layers]):
            kind, key = _SPANS.get(name, (KvGroupKind.FULL, ""))
            span = self._config.get(key)
            if isinstance(span, int) and 0 < span < self.context:
                found[layer] = Reach(kind, span)
        return found

    def _index_key(self, dtype: str) -> IndexKey:
        return IndexKey(self._number("index_head_dim"), self._kept(dtype, "auto"))

    def _kept(self, dtype: str, kv_cache_dtype: str) -> str:
        own = self._config.get("dtype") or self._config.get("torch_dtype")
        of_model = dtype if dtype != "auto" else own if own in _DTYPES else "float32"
        return of_model if kv_cache_dtype == "auto" else kv_cache_dtype

    def _number(self, *keys: str) -> int:
        found = next((value for key in keys if isinstance(value := self._config.get(key), int)), None)
        if found is None:
            raise InvalidConfig(FieldViolation("--model", f"{self._path} has no number under {' or '.join(keys)}"))
        return found


def eos_token_ids(directory: Path, tokenizer: Path | None = None) -> tuple[int, ...]:
    """Return the ids that end a generation, rising; `tokenizer` is the folder of another tokenizer."""
    return tuple(sorted(named_ends(directory, tokenizer)))
