"""Calls of the Open Inference Protocol's own stubs.

.clients/light/bin/python runs this script, which reads the address as JSON on stdin.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import grpc
from open_inference.grpc import protocol as pb
from open_inference.grpc.service import GRPCInferenceServiceStub

PATIENCE_S = 120.0


def answers(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a server says of itself, to a request in typed contents, and to one that is wrong."""
    with grpc.insecure_channel(given["address"]) as channel:
        stub, model = GRPCInferenceServiceStub(channel), given["model"]
        metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name=model), timeout=PATIENCE_S)
        answer = stub.ModelInfer(request(given, n=1), timeout=PATIENCE_S)
        outputs = {output.name: output.contents for output in answer.outputs}
        return {
            "ready": [
                stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live,
                stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE_S).ready,
                stub.ModelReady(pb.ModelReadyRequest(name=model), timeout=PATIENCE_S).ready,
            ],
            "inputs": {each.name: [each.datatype, list(each.shape)] for each in metadata.inputs},
            "id": answer.id,
            "text": [text.decode() for text in outputs["text_output"].bytes_contents],
            "ids": list(outputs["output_ids"].int_contents),
            "error": error(stub, request(given, n=0)),
        }


def request(given: dict[str, Any], n: int) -> Any:
    """Return a request for six greedy tokens of each of n sequences."""
    sampling = json.dumps({"temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": n})
    made = pb.ModelInferRequest(model_name=given["model"], id="7")
    made.inputs.add(name="input_ids", datatype="INT32", shape=[3]).contents.int_contents.extend(given["prompt"])
    made.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        sampling.encode()
    )
    for name in ("text_output", "output_ids"):
        made.outputs.add(name=name)
    return made


def error(stub: Any, wrong: Any) -> list[str]:
    try:
        stub.ModelInfer(wrong, timeout=PATIENCE_S)
    except grpc.RpcError as refused:
        return [refused.code().name, refused.details() or ""]
    return ["no error", ""]


def main() -> None:
    """Make the calls, or print the protocol as these stubs have it, as a serialised FileDescriptorProto."""
    given = json.load(sys.stdin)
    wire = [base64.b64encode(pb.DESCRIPTOR.serialized_pb).decode()]
    json.dump({"wire": wire} if given.get("wire") else answers(given), sys.stdout)


if __name__ == "__main__":
    main()
