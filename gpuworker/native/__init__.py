"""C++ kernels for CPUs, their build, and their ctypes interface."""
