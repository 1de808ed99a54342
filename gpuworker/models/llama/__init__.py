"""The Llama family on its own path: packed weights, native forward on CPUs, fused kernels on GPUs."""
