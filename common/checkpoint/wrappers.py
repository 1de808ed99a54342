"""Models of several media whose language model is served alone: which they are, and where it lies in their files.

Such a wrapper has encoders of pictures or sound beside a decoder. For text alone it computes what the decoder computes:
tests compare each kind below with transformers. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from common.checkpoint.completed import TEXT

WRAPPERS: Final = frozenset(
    {
        *("aria", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "glm4v", "glm4v_moe", "granite_speech"),
        *(
            "hyperclovax_vision_v2",
            "idefics2",
            "idefics3",
            "internvl",
            "janus",
            "llava",
            "llava_next",
            "llava_next_video",
        ),
        *("llava_onevision", "mistral3", "ovis2", "qwen2_audio", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("dots3_note", "gemma4", "lfm2_vl", "llama4", "qwen3_5", "qwen3_5_moe"),
        *("smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral"),
    }
)
"""The model types whose language model is served."""
# Language models that differ from another kind in the positions of pictures alone. Their older configurations name no
# kind, and have the entries of the language model beside the others.
SAME_FOR_TEXT: Final[Mapping[str, str]] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
_UNNAMED: Final[Mapping[str, str]] = {kind.removesuffix("_text"): plain for kind, plain in SAME_FOR_TEXT.items()}
# Entries by which a language model changes its logits, and which transformers' wrappers do not read, but these do.
_OF_LOGITS: Final = ("logits_scaling", "logit_scale", "final_logit_softcapping", "lm_head_multiplier")
_READING: Final = frozenset({"gemma4"})
_IDLE: Final = (None, 0, 1)
# Wrappers whose text differs from that of their language model whatever the configuration says.
_DIFFERENT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "its language model scales logits, and the whole model does not"),
    "paligemma": "the whole model reads its prompt in both directions",
}
_PART: Final = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<rest>.+)")
_HEAD: Final = "lm_head."
_WITHOUT_PART: Final = (_HEAD, "model.layers.", "model.embed_tokens.", "model.norm.")


def language_model(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entries of a wrapper's language model, as those of a checkpoint of its own; None for other models.

    The kind is left out where neither the configuration nor the kind of the wrapper tells it.
    """
    kind = config.get("model_type")
    if kind not in WRAPPERS:
        return None
    text = config.get(TEXT)
    entries = dict(text) if isinstance(text, dict) else dict(config)
    named = entries.pop("model_type", None)
    plain = SAME_FOR_TEXT.get(str(named), named) if isinstance(text, dict) and named else _UNNAMED.get(str(kind))
    return entries | ({"model_type": plain} if plain else {})


def why_not_alone(config: Mapping[str, Any]) -> str | None:
    """Return why the language model of a wrapper does not compute what the wrapper does for text; None for others."""
    read = config.get("model_type") in _READING
    for name, value in () if read else (language_model(config) or {}).items():
        if name in _OF_LOGITS and value not in _IDLE:
            return f"{name} is {value!r}, which its language model applies to logits and the whole model does not"
    return _DIFFERENT.get(str(config.get("model_type")))


def language_tensor(name: str) -> str | None:
    """Return the name of a wrapper's tensor in its language model; None for a tensor of another part."""
    found = _PART.fullmatch(name)
    if found is not None:
        return found["rest"] if found["rest"].startswith(_HEAD) else f"model.{found['rest']}"
    return name if name.startswith(_WITHOUT_PART) else None
