"""Kernels for GPUs, each with a reference in torch of the same signature. Triton and CUDA are imported where asked for."""
