"""GPUs of several hosts: grouped NCCL exchanges that all ranks take in lockstep."""
