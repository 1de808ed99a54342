"""The Llama family on the native path: packed weights, a C++ forward on CPUs, fused kernels on GPUs."""
