"""The parts of the GPU benchmarks."""
