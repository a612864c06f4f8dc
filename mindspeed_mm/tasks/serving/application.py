"""transformers' serving application over one model: the routes that are ours, and errors in OpenAI's form."""

from __future__ import annotations

import inspect

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from transformers.cli.serving.server import build_server

from mindspeed_mm.tasks.serving.chat_completions import ChatHandler
from mindspeed_mm.tasks.serving.errors import RequestError, error_body
from mindspeed_mm.tasks.serving.metrics import ServeMetrics
from mindspeed_mm.utils.errors import BadSample, MMError

#: routes of transformers' application that are served; others load models, forget them, or are answered otherwise
ROUTES = ("/v1/chat/completions", "/v1/models", "/health")
_OURS = {"model_manager", "chat_handler", "generation_state", "enable_cors"}


def build_application(handler: ChatHandler, metrics: ServeMetrics) -> FastAPI:
    """Return the application.

    Args:
        handler: answers chat completions.
        metrics: what the route /metrics shows.

    Raises:
        MMError: transformers' application has other routes than are known here.
    """
    others = dict.fromkeys(inspect.signature(build_server).parameters.keys() - _OURS)
    app = build_server(
        model_manager=handler.model_manager,
        chat_handler=handler,
        generation_state=handler.generation_state,
        **others,
    )
    app.router.routes[:] = [route for route in app.router.routes if _path_of(route) in ROUTES]
    if missing := set(ROUTES) - {_path_of(route) for route in app.router.routes}:
        raise MMError(f"the serving application of this transformers has no route {', '.join(sorted(missing))}")

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> Response:
        for entry in handler.model_manager.list_models():
            if entry["id"] == name:
                return JSONResponse(entry)
        return _refused(404, f"there is no model '{name}' here", "model", "model_not_found")

    @app.get("/metrics")
    def figures() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    _answer_errors(app)
    return app


def _path_of(route: BaseRoute) -> str | None:
    return getattr(route, "path", None)


def _answer_errors(app: FastAPI) -> None:
    """Give errors the form of OpenAI's."""

    @app.exception_handler(RequestError)
    def refuse(_: Request, error: RequestError) -> Response:
        return _refused(error.status, str(error), error.param, error.code)

    @app.exception_handler(BadSample)
    def unusable(_: Request, error: BadSample) -> Response:
        return _refused(400, str(error), "messages")

    @app.exception_handler(MMError)
    def not_possible(_: Request, error: MMError) -> Response:
        return _refused(500, str(error))

    @app.exception_handler(RequestValidationError)
    def no_object(_: Request, error: RequestValidationError) -> Response:
        fault = error.errors()[0]
        return _refused(400, f"the body must be a JSON object with Content-Type application/json: {fault['msg']}")

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        return _refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    @app.exception_handler(Exception)
    def unforeseen(_: Request, error: Exception) -> Response:
        return _refused(500, f"the server failed: {type(error).__name__}")


def _refused(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, param, code), status)
