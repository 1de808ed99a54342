"""What SMG's gateway and vLLM declare of their gRPC services, as serialised descriptors.

.clients/smg/bin/python runs this script, which reads a folder of .proto files as JSON on stdin.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2


def compiled(folder: Path) -> bytes:
    """Return the FileDescriptorSet of all .proto files in a folder. Raises RuntimeError where protoc refuses them."""
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "all.binpb"
        names = sorted(path.name for path in folder.glob("*.proto"))
        command = ["protoc", f"-I{folder}", f"-I{Path(protoc.__file__).parent / '_proto'}", f"-o{out}", *names]
        if protoc.main(command):
            raise RuntimeError(f"protoc does not compile {names}")
        return out.read_bytes()


def main() -> None:
    given = json.load(sys.stdin)
    gateway = [each.DESCRIPTOR.serialized_pb for each in (common_pb2, vllm_engine_pb2)]
    found = {
        "gateway": [base64.b64encode(each).decode() for each in gateway],
        "vllm": base64.b64encode(compiled(Path(given["protos"]))).decode(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
