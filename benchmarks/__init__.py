"""Measurements of commfuse_dp against stock PyTorch; see benchmarks/results/README.md for how records are named and read."""
