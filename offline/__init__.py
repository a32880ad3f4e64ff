"""Offline and embedded use: the router's text and checks around an engine in the same process, or around a client.

`llm.py` is the face (`from pagewire import LLM`), `run_batch.py` answers files of requests. Both ask a `Backend`
(router/pipeline.py): the pipeline over an engine here (`local.py`), or a running system (`remote.py`).
"""
