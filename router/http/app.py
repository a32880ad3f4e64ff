"""The routes, as one ASGI app."""

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewire.interceptor import RpcObserver
from pagewire.security import Security
from router.http.chat import ChatCompletions
from router.http.completions import Completions
from router.http.endpoint import Endpoint, Handler
from router.http.errors import Refusal, error_response
from router.http.models import Models
from router.http.probes import Probes
from router.pipeline import Pipeline


def build_app(
    pipeline: Pipeline, security: Security, registry: CollectorRegistry, observe: RpcObserver | None = None
) -> Starlette:
    """On a pipeline that others may use too. Everything under /v1 wants a token if `security` has any."""

    def route(method: str, path: str, handler: Handler, *, is_open: bool = False) -> Route:
        endpoint = Endpoint(f"{method} {path}", handler, None if is_open else security, None if is_open else observe)
        return Route(path, endpoint, methods=[method])

    models, probes = Models(pipeline), Probes(pipeline, registry)
    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", ChatCompletions(pipeline)),
            route("POST", "/v1/completions", Completions(pipeline)),
            route("GET", "/v1/models", models.list),
            route("GET", "/v1/models/{model:path}", models.retrieve),
            route("GET", "/health", probes.health, is_open=True),
            route("GET", "/metrics", probes.metrics, is_open=True),
        ],
        exception_handlers={HTTPException: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    name = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException) and error.status_code == 405:
        refusal = Refusal(405, f"{name}: this path has another method", code="method_not_allowed")
    else:
        refusal = Refusal(404, f"{name}: there is no such path", code="not_found")
    response = error_response(refusal)
    response.headers.update(getattr(error, "headers", None) or {})
    return response
