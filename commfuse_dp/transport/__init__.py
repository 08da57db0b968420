"""Moves bytes between ranks; knows nothing of models or schedules. See `base` for the interface."""
