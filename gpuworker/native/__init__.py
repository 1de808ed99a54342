"""C++ kernels for CPUs, what builds them, and their ctypes interface."""
