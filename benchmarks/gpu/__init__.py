"""The parts of benchmarks/gpu_check.py: each is a program of its own, `python -m benchmarks.gpu.<part>`."""
