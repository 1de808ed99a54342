"""Kinds of models that cannot be served: the reason follows from config.json, in words, without an import of torch."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from gpuworker.models.kinds import KnownKinds, known_kinds, why_not_served
from tests.support.checkpoints import SERVED

VERSION = transformers.__version__
ONLY = "only decoder-only language models are served"
ELSEWHERE = "take text-embeddings-inference or infinity for it; Quire embeds with decoders, such as Qwen3-Embedding"
ENCODER = f"is an encoder, for embeddings or reranking, and continues no text: {ELSEWHERE}"
# Kinds of the encoders that people serve most, and one of each older kind.
ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "albert", "electra", "camembert", "modernbert"),
    *("nomic_bert", "deberta-v2", "eurobert", "gte", "jina_embeddings_v3", "mobilebert", "longformer", "canine"),
)
SCORES = f"ForSequenceClassification gives scores, as for reranking, and continues no text: {ELSEWHERE}"
SCORES_OF_TOKENS = f"Gemma2ForTokenClassification gives scores, as for reranking, and continues no text: {ELSEWHERE}"
OWN_CACHE = "its layers keep states in a cache of their own, and steps mix sequences"


@pytest.fixture(scope="module")
def known() -> KnownKinds:
    found = known_kinds()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, 'config.json names no "model_type"; expected a checkpoint in Hugging Face format'),
        ({"model_type": "lama"}, f"'lama' is not a model type of transformers {VERSION}; did you mean llama?"),
        (
            {"model_type": "0123456789"},
            f"'0123456789' is not a model type of transformers {VERSION}; a newer transformers may know it",
        ),
        (
            {"model_type": "own_kind", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
            (
                f"own_kind brings its own code (auto_map), which is never run; {ONLY} whose code transformers {VERSION}"
                " has"
            ),
        ),
        ({"model_type": "blip-2"}, f"blip-2 takes images or sound beside text; {ONLY}"),
        (
            {"model_type": "florence2", "vision_config": {"depth": 1}, "text_config": {"model_type": "bart"}},
            (
                f"florence2 takes images or sound beside text; {ONLY}. Its language model is a bart: save that as a"
                " checkpoint of its own"
            ),
        ),
        (
            {"model_type": "aya_vision", "vision_config": {"depth": 1}, "text_config": {"model_type": "cohere2"}},
            (
                "aya_vision takes images or sound beside text, and its language model cannot be served alone: its"
                " language model scales logits, and the whole model does not"
            ),
        ),
        (
            {"model_type": "paligemma", "text_config": {"model_type": "gemma"}},
            (
                "paligemma takes images or sound beside text, and its language model cannot be served alone: the whole"
                " model reads its prompt in both directions"
            ),
        ),
        (
            {"model_type": "llava_next", "text_config": {"model_type": "granite", "logits_scaling": 8.0}},
            (
                "llava_next takes images or sound beside text, and its language model cannot be served alone:"
                " logits_scaling is 8.0, which its language model applies to logits and the whole model does not"
            ),
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "rwkv"}},
            f"the language model of llava cannot be served: rwkv cannot be served: {OWN_CACHE}",
        ),
        ({"model_type": "t5"}, f"t5 is an encoder-decoder; {ONLY}"),
        ({"model_type": "bart"}, f"bart is an encoder-decoder; {ONLY}"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, f"whisper is an encoder-decoder; {ONLY}"),
        *(({"model_type": kind}, f"{kind} {ENCODER}") for kind in ENCODERS),
        (
            {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]},
            f"xlm-roberta {ENCODER}",
        ),
        (
            {
                "model_type": "new",
                "architectures": ["NewModel"],
                "auto_map": {"AutoModel": "modeling.NewModel", "AutoModelForMaskedLM": "modeling.NewForMaskedLM"},
            },
            f"new {ENCODER}",
        ),
        (
            {"model_type": "own", "auto_map": {}, "architectures": ["OwnForMaskedLM"]},
            f"own {ENCODER}",
        ),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, f"Qwen3{SCORES}"),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForTokenClassification"]}, SCORES_OF_TOKENS),
        (
            {"model_type": "big_bird", "is_decoder": True},
            (
                f"big_bird cannot be served: its code in transformers {VERSION} computes attention itself, and"
                " the paged"
                " cache cannot take part"
            ),
        ),
        ({"model_type": "vit"}, f"vit is not a language model that continues text; {ONLY}"),
        (
            {"model_type": "gemma4_unified_assistant"},
            (
                "gemma4_unified_assistant cannot be served: it drafts for another model, and attends on the keys and"
                " values of that one"
            ),
        ),
        ({"model_type": "rwkv"}, f"rwkv cannot be served: {OWN_CACHE}"),
        (
            {"model_type": "diffllama"},
            (
                "diffllama cannot be served: each of its layers attends twice (differential attention), and the"
                " paged cache"
                " has one call a layer"
            ),
        ),
        (
            {"model_type": "hrm_text"},
            (
                "hrm_text cannot be served: it runs the same layers several times for each token, and the paged"
                " cache holds"
                " one K and V a layer"
            ),
        ),
    ],
    ids=lambda value: str(value.get("model_type", "none")) if isinstance(value, dict) else "",
)
def test_the_reason_of_a_refusal_is_in_plain_words(config: dict[str, Any], reason: str, known: KnownKinds) -> None:
    assert why_not_served(config, known) == reason
    assert len(reason) < 250


@pytest.mark.parametrize("kind", [*SERVED, "gemma3", "gemma3_text", "phi3", "opt", "granitemoehybrid"])
def test_nothing_speaks_against_kinds_that_are_served(kind: str, known: KnownKinds) -> None:
    assert why_not_served({"model_type": kind}, known) is None


def test_a_bert_that_is_a_decoder_is_left_to_the_self_test(known: KnownKinds) -> None:
    assert why_not_served({"model_type": "bert", "is_decoder": True}, known) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {"depth": 1}},
        {"model_type": "llava", "text_config": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}},
        {"model_type": "llava_next", "text_config": {"model_type": "granite", "logits_scaling": 1.0}},
        {"model_type": "idefics3", "text_config": {}},
        {"model_type": "qwen2_vl", "hidden_size": 64, "vision_config": {"depth": 1}},
    ],
)
def test_nothing_speaks_against_a_language_model_in_a_wrapper(config: dict[str, Any], known: KnownKinds) -> None:
    assert why_not_served(config, known) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM", "LlamaForSequenceClassification"]},
        {"model_type": "mistral", "architectures": None},
    ],
)
def test_a_decoder_with_another_head_beside_its_own_or_with_none_is_served(
    config: dict[str, Any], known: KnownKinds
) -> None:
    assert why_not_served(config, known) is None


def test_the_tables_are_those_that_transformers_has_when_it_is_imported(known: KnownKinds) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    assert known.kinds >= set(CONFIG_MAPPING.keys())
    assert known.causal == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert known.several_media >= set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert (
        known.encoders >= set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - known.causal - known.encoder_decoders
    )
    assert known.encoders.isdisjoint(known.causal | known.several_media | known.encoder_decoders)
    assert known.encoder_decoders >= set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


def test_without_transformers_what_config_json_says_still_counts() -> None:
    assert why_not_served({"model_type": "rwkv"}, None) == f"rwkv cannot be served: {OWN_CACHE}"
    assert why_not_served({"model_type": "llama"}, None) is None
    assert why_not_served({"model_type": "bert"}, None) == f"bert {ENCODER}"
