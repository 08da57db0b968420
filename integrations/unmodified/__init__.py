"""Unmodified scripts under COMMFUSE=1: what torch itself wraps (FSDP2, FSDP1, DDP, `parallelize_module`) is served when it is
called first. See autohook.register and first_call.py. Nothing is imported from here."""
