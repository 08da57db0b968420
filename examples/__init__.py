"""Programs to look at; installed as `commfuse_dp.examples`."""
