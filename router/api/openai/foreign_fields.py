"""Fields of other servers that change the answer and are not offered here, each with the values that have no effect.

A field that is dropped silently gives an answer to another question. Fields that change speed or bookkeeping alone
(`rid`, `cache_prompt`, `session_params`) are ignored, as unknown ones are.
"""

from __future__ import annotations

from typing import Any, Final

# Values that have no effect.
NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
_OFF: Final = (*NOTHING, 0)
_ONE: Final = (None, 1)

_VLLM: Final = {
    "best_of": _ONE,
    "detokenize": (None, True),
    "guided_whitespace_pattern": NOTHING,
    "kv_transfer_params": NOTHING,
    "length_penalty": _ONE,
    "logits_processors": NOTHING,
    "min_output_tokens": _OFF,
    "mm_processor_kwargs": NOTHING,
    "prompt_embeds": NOTHING,
    "repetition_detection": NOTHING,
    "spaces_between_special_tokens": (None, True),
    "structural_tag": NOTHING,
    "use_beam_search": NOTHING,
    "vllm_xargs": NOTHING,
}
_SGLANG: Final = {
    "custom_logit_processor": NOTHING,
    "custom_params": NOTHING,
    "input_embeds": NOTHING,
    "input_ids": NOTHING,
    "lora_path": NOTHING,
    "no_stop_trim": NOTHING,
    "return_hidden_states": NOTHING,
    "sampling_params": NOTHING,
    "stop_regex": NOTHING,
}
_TGI: Final = {
    "adapter_id": NOTHING,
    "decoder_input_details": NOTHING,
    "do_sample": (None, True),
    "inputs": NOTHING,
    "max_new_tokens": (None,),
    "parameters": NOTHING,
    "return_full_text": NOTHING,
    "top_n_tokens": _OFF,
    "truncate": (None,),
    "typical_p": _ONE,
    "watermark": NOTHING,
}
_LLAMA_CPP: Final = {
    "dry_multiplier": _OFF,
    "dynatemp_range": _OFF,
    "grammar": NOTHING,
    "mirostat": _OFF,
    "n_predict": (None, -1),
    "repeat_penalty": _ONE,
    "samplers": NOTHING,
    "tfs_z": _ONE,
    "top_a": _OFF,
    "xtc_probability": _OFF,
}
REFUSED: Final[dict[str, tuple[Any, ...]]] = {**_VLLM, **_SGLANG, **_TGI, **_LLAMA_CPP}
# The same of `structured_outputs`.
REFUSED_STRUCTURED: Final[dict[str, tuple[Any, ...]]] = {
    "disable_additional_properties": (None, True),
    "disable_any_whitespace": NOTHING,
    "structural_tag": NOTHING,
    "whitespace_pattern": NOTHING,
}
