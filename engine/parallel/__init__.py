"""Tensor parallelism: the model's weights and KV heads in shards, one for each rank; rank 0 is the worker itself."""
