"""Hugging Face transformers' own tensor parallelism (`from_pretrained(..., distributed_config=DistributedConfig(tp_size=N))`),
run with sequence parallelism in place of its all-reduces. `commfuse_dp.apply(model)` and COMMFUSE=1 lead here through
`integrations.tensor_parallel.serving`.

Nothing here imports transformers: what it has left on a model is read from the model (compat.py)."""
