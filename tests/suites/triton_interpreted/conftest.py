"""The kernels run in Triton's interpreter, which must be asked for before the first of them is defined."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "run these tests in a process of their own: TRITON_INTERPRET=1 pytest tests/suites/triton_interpreted"
    )
