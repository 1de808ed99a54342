"""Launches the steps of a model whose hidden states are pooled."""

from __future__ import annotations

from gpuworker.attention.interface import AttentionBackend
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.step_model import EmbeddingModel
from gpuworker.runner.launcher import LaidOutStep, LauncherFactory
from gpuworker.sampling.rows import SampledTokens


class PoolingLauncher:
    """Implements `StepLauncher`: launches kernel by kernel, and pools on the device."""

    def __init__(self, model: EmbeddingModel, attention: AttentionBackend, tokens: TokenTable) -> None:
        self._model, self._attention, self._tokens = model, attention, tokens

    def launch(self, step: LaidOutStep) -> SampledTokens:
        """Run the model over all rows and pool; the token table stays as it is."""
        assert step.pooling is not None, "a runner with a pooler lays out every step so"
        inputs = step.inputs or step.staged.on(self._model.device)
        self._attention.begin(inputs.metadata)
        token_ids = self._tokens.take(inputs.take)
        hidden = self._model.hidden_states(token_ids, inputs.positions, inputs.keep, self._attention)
        return SampledTokens(token_ids[:0], pooled=step.pooling.pool(hidden))


def pooling_launcher(model: EmbeddingModel, attention: AttentionBackend) -> LauncherFactory:
    return lambda tokens: PoolingLauncher(model, attention, tokens)
