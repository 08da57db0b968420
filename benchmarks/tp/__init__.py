"""The parts of benchmarks/tensor_parallel.py: how layers communicate (variants, stock), what is computed (models), one rank."""
