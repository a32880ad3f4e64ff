"""GET /health and /metrics, both without a token: what probes and scrapers ask."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.pipeline import Pipeline


class Probes:
    """Both endpoints."""

    def __init__(self, pipeline: Pipeline, registry: CollectorRegistry) -> None:
        self._pipeline = pipeline
        self._registry = registry

    async def health(self, request: Request) -> JSONResponse:
        """200 while requests can be served, as `grpc.health.v1` says SERVING."""
        if self._pipeline.draining:
            return JSONResponse({"status": "draining"}, 503)
        if problem := self._pipeline.problem:
            return JSONResponse({"status": problem}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The process's metrics, as at `--metrics-port`."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})
