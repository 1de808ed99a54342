"""Numbers of client requests in JSON, bounded to the ranges of the protobuf fields that receive them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# The range of protobuf's float; router/requests/validate.py checks the narrower range of each field.
Float32 = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]
