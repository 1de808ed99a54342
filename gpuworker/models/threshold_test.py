"""The start-up test beyond the thresholds of a configuration: windows, chunks of attention, lengths of rope.

The self-test runs a few tokens, and a window of 4,096 positions does not show in them. Running more on the model itself
takes minutes, so the test runs a tiny model of the same kind and options, with small thresholds, beyond all of them. A
model is refused when its tiny one computes something else there, or when no tiny one can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from common.contracts.errors import Unsupported
from gpuworker.models.hf.loader import context_limit, random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import thresholds, tiny_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tokens of a sequence: twice the largest threshold of a tiny configuration.
_LENGTH: Final = 48
_GRAIN: Final = 4

Test = Callable[["PretrainedConfig", int], object]
"""Tests a model of a tiny configuration on sequences of so many tokens. Raises Unsupported."""


def beyond_thresholds(config: PretrainedConfig, test: Test) -> None:
    """Run the test on a tiny model if the configuration names thresholds that a sequence can pass.

    Raises Unsupported, with the thresholds, when the test fails or there is no such model.
    """
    named = thresholds(config, context_limit(config))
    if not named:
        return
    words = " and ".join(f"{name} {value}" for name, value in named.items())
    try:
        with _without_advice():
            tiny = tiny_config(_causal_part(config))
            test(tiny, min(_LENGTH, context_limit(tiny)) // _GRAIN * _GRAIN)
    except Unsupported as error:
        raise Unsupported(f"{config.model_type} cannot be served beyond {words}: tested tiny, {error}") from error
    # What configurations and models of transformers raise for sizes that do not fit each other.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{config.model_type} cannot be tested beyond {words}, so it is not served: no tiny model of its kind"
        raise Unsupported(f"{what} can be made: {error!r}") from error


def tiny_model(config: PretrainedConfig, device: torch.device) -> TransformersModel:
    """Return a model with random weights in float32, as transformers runs it."""
    return TransformersModel(random_module(config, torch.float32, 0, device))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence the advice of transformers on the tiny model's sizes."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _causal_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text model's configuration where it can be built alone, else the whole."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    return text if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else config
