"""Thin layers between CommFuse and the frameworks people train with; the only place that knows their private names."""
