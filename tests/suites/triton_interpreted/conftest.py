"""The kernels run in Triton's interpreter, which must be enabled before the first kernel is defined."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "run these tests in a process of their own: TRITON_INTERPRET=1 pytest tests/suites/triton_interpreted"
    )
