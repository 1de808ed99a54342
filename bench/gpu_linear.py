"""The matrix products of a decode step on a GPU: torch's time against a copy of the weights.

A loss here is a loss in every engine figure, however fast attention is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.measure import Figure, checked, copy_bandwidth, graph_seconds, parser, report, rotation, the_device
from bench.gpu.models import MODELS, spec_of
from gpuworker.models.llama.spec import LlamaSpec

_BATCHES = (1, 8, 32, 128)


def main() -> None:
    args = parser(__doc__).parse_args()
    device = the_device("gpu_linear")
    check(device)
    copied = copy_bandwidth(device)
    figures = [Figure("copy_gb_s", copied / 1e9, "copy of 1 GiB on the device, bytes read and written")]
    for name, model in MODELS.items():
        for batch in _BATCHES[: 1 if args.quick else None]:
            figures += products(name, spec_of(model), batch, copied, device)
    report("gpu_linear", device, figures)


def shapes(spec: LlamaSpec) -> dict[str, tuple[int, int]]:
    """Return the matrices of a layer, and the last one, as [out, in]."""
    width = spec.num_heads * spec.head_dim
    return {
        "qkv": (width + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        "out": (spec.hidden_size, width),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }


def check(device: torch.device) -> None:
    """Compare a product with float64."""
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((8, 1024), (3072, 1024)))
    exact = x.double() @ weight.double().t()
    checked("torch.mm in bf16", float((torch.mm(x, weight.t()).double() - exact).norm() / exact.norm()), 1e-2)


def products(model: str, spec: LlamaSpec, batch: int, copied: float, device: torch.device) -> Iterator[Figure]:
    """Yield the bandwidth of each product over a copy's, and of all products of a step together."""
    seconds, read = 0.0, 0
    for name, (rows, columns) in shapes(spec).items():
        each, times = _product_seconds(rows, columns, batch, device), 1 if name == "head" else spec.num_layers
        seconds += times * each
        read += times * 2 * rows * columns
        share = 2 * rows * columns / each / copied
        yield Figure(
            f"{model}_{name}_{batch}_over_copy", share, f"{batch} rows by [{rows}, {columns}], weights read once"
        )
    yield Figure(f"{model}_step_{batch}_over_copy", read / seconds / copied, f"all products of a step of {batch} rows")


def _product_seconds(rows: int, columns: int, batch: int, device: torch.device) -> float:
    count = rotation(2 * rows * columns, device)
    weights = [torch.empty((rows, columns), dtype=torch.bfloat16, device=device).normal_() for _ in range(count)]
    x = torch.randn((batch, columns), device=device).bfloat16()

    def work() -> None:
        for weight in weights:
            torch.mm(x, weight.t())

    return graph_seconds(work) / count


if __name__ == "__main__":
    main()
