"""`vllm.grpc.engine.VllmEngine`, the service that the Shepherd Model Gateway calls, as router and workers share it.

Its messages end here: `call` reads requests, `answer` writes outputs, `facade` has what all processes answer alike.
"""

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
