"""`pagewire bench serve`: load on a running system and what a client sees of it, in vLLM's names.

Pure and tested with plain data: `arrivals`, `datasets`, `outcome`, `statistics`, `goodput`, `result`, `table`. With the
outside world: `grpc_backend`, `http_backend`, `load` (sends), `report` (draws), `serve` (all of it in order).
"""
