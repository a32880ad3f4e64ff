"""GET /v1/models and /v1/models/{model}."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse

from router.pipeline import Pipeline
from router.validate import validate_model


class Models:
    """Both endpoints; `created` is when this router began to serve."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._created = int(time.time())

    async def list(self, request: Request) -> JSONResponse:
        pipeline = self._pipeline
        data = [self._model(pipeline.model.name), *map(self._model, sorted(pipeline.adapters))]
        return JSONResponse({"object": "list", "data": data})

    async def retrieve(self, request: Request) -> JSONResponse:
        name = request.path_params["model"]
        validate_model(name, self._pipeline.model, self._pipeline.adapters)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        """An adapter's parent is the model."""
        model = self._pipeline.model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pagewire",
            "root": model.name,
            "parent": None if name == model.name else model.name,
            "max_model_len": self._pipeline.max_model_len,
        }
