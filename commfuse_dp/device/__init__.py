"""Streams, events, copies and stream memory operations of one accelerator, behind an interface that a test can simulate.

`base` is the interface and imports nothing of any accelerator; `cuda` is imported by name, only where it is asked for.
"""
