"""C++ kernels for CPUs, and what builds them."""
