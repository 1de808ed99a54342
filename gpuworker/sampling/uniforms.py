"""The random numbers of samples: each depends on the seed and the position of its token alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuworker.scheduling.splitmix64 import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, position): splitmix64, keyed twice."""
    with np.errstate(over="ignore"):
        hashed = _mix(_mix(seeds + _GOLDEN) ^ _mix(positions.astype(np.uint64) * _GOLDEN + _MIX_1))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `gpuworker.scheduling.splitmix64` of each word."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
