"""Run by Python itself at the start of every process of a foreign test suite: this folder stands on PYTHONPATH."""

import contextlib
import os

if os.environ.get("PEERS_SUITE"):
    with contextlib.suppress(ImportError):  # an interpreter of another installation, such as a tool that a test calls
        import commfuse_peers

        commfuse_peers.register(os.environ["PEERS_SUITE"], injected=os.environ["PEERS_MODE"] == "commfuse")
