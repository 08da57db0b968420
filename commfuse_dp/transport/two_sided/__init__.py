"""Sends and receives of others (torch.distributed, MPI) behind the one-sided interface."""
