"""How a step is launched: kernel by kernel, or as a captured graph (`gpuworker/runner/cuda_graphs.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import StagedStep, StepInputs
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.adapters import AdaptedModel, StepAdapters
from gpuworker.models.step_model import EmbeddingModel, StepModel
from gpuworker.runner.pooling import StepPooling
from gpuworker.sampling.rows import SampledTokens, SamplePoint
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.sampling.scoring import ScoredTokens, score


@dataclass(frozen=True, slots=True)
class LaidOutStep:
    """A step as arrays: R rows, of which S sample. `inputs` are on the device already where that is free.

    `scored` are the tokens of prompts that the step scores, if any.
    """

    staged: StagedStep
    inputs: StepInputs | None
    point: SamplePoint
    sampling: SamplingBatch
    scored: ScoredTokens | None = None
    pooling: StepPooling | None = None
    """How the step's hidden states are pooled; no row samples then."""
    adapters: StepAdapters | None = None
    """Those of its rows; None where all are of the base."""


class StepLauncher(Protocol):
    """Computes steps in order, each over the K/V and the tokens of those before it, on the runner's thread."""

    def launch(self, step: LaidOutStep) -> SampledTokens:
        """Run the model over all rows, sample, and put the sampled tokens into the token table.

        On CUDA it only launches, and never waits: tensors of the result are valid until the next launch.
        """
        ...


LauncherFactory = Callable[[TokenTable], StepLauncher]


class EagerLauncher:
    """Launches kernel by kernel."""

    def __init__(self, model: StepModel, attention: AttentionBackend, tokens: TokenTable) -> None:
        self._model, self._attention, self._tokens = model, attention, tokens

    def launch(self, step: LaidOutStep) -> SampledTokens:
        inputs = step.inputs or step.staged.on(self._model.device)
        self._attention.begin(inputs.metadata)
        if self._model.states is not None:
            self._model.states.begin(inputs.metadata, step.staged.batch_index)
        use_adapters(self._model, step.adapters)
        token_ids = self._tokens.take(inputs.take)
        logits = self._model.forward(token_ids, inputs.positions, inputs.keep, self._attention)
        sampled = step.sampling.sample(logits[: len(inputs.put)], step.point, self._tokens.tensor)
        self._tokens.put(inputs.put, sampled.tokens)
        if step.scored is None:
            return sampled
        return replace(sampled, scores=score(logits[len(inputs.put) :], step.scored))


class PoolingLauncher:
    """Implements `StepLauncher`: launches kernel by kernel, and pools on the device."""

    def __init__(self, model: EmbeddingModel, attention: AttentionBackend, tokens: TokenTable) -> None:
        self._model, self._attention, self._tokens = model, attention, tokens

    def launch(self, step: LaidOutStep) -> SampledTokens:
        """Run the model over all rows and pool; the token table stays as it is."""
        assert step.pooling is not None, "a runner with a pooler lays out every step so"
        inputs = step.inputs or step.staged.on(self._model.device)
        self._attention.begin(inputs.metadata)
        if self._model.states is not None:
            self._model.states.begin(inputs.metadata, step.staged.batch_index)
        use_adapters(self._model, step.adapters)
        token_ids = self._tokens.take(inputs.take)
        hidden = self._model.hidden_states(token_ids, inputs.positions, inputs.keep, self._attention)
        return SampledTokens(token_ids[:0], pooled=step.pooling.pool(hidden))


def use_adapters(model: object, adapters: StepAdapters | None) -> None:
    """Let the next forward of a model add the products of these adapters; a model that has none takes None alone."""
    if adapters is not None or getattr(model, "adapters", None) is not None:
        cast("AdaptedModel", model).adapters = adapters


def pooling_launcher(model: EmbeddingModel, attention: AttentionBackend) -> LauncherFactory:
    return lambda tokens: PoolingLauncher(model, attention, tokens)
