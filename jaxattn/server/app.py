"""The ASGI application: its routes, and the middleware that every request passes before a route.

The middleware is plain ASGI, because Starlette's BaseHTTPMiddleware would hide a client's
disconnect from the handlers.
"""

import functools
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxattn.server import status
from jaxattn.server.anthropic.messages import count_tokens, create_message
from jaxattn.server.chat_page import page_file, page_files
from jaxattn.server.http.access_log import AccessLog
from jaxattn.server.http.allowed_origins import AllowedOrigins
from jaxattn.server.http.api_keys import ApiKeyAuth
from jaxattn.server.http.error_responses import response
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.request import Endpoint, HttpRequest
from jaxattn.server.openai.chat_completions import chat_completions
from jaxattn.server.openai.completions import completions
from jaxattn.server.openai.embeddings import embeddings
from jaxattn.server.openai.responses.endpoint import (
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
)
from jaxattn.server.openai.tokenization import detokenize, tokenize, tokenizer_info
from jaxattn.server.runtime.service import Service

Call = Callable[[Service, HttpRequest], Awaitable[None]]
GET: dict[str, Call] = {
    "/v1/models": status.models,
    "/v1/models/{model_id:path}": status.model,
    "/v1/responses/{response_id}": get_response,
    "/health": status.health,
    "/ping": status.ping,
    "/version": status.version,
    "/load": status.load,
    "/tokenizer_info": tokenizer_info,
    "/metrics": status.metrics,
    "/stats": status.stats,
}
POST: dict[str, Call] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/embeddings": embeddings,
    "/v1/responses": create_response,
    "/v1/responses/input_tokens": count_input_tokens,
    "/v1/messages": create_message,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
DELETE: dict[str, Call] = {"/v1/responses/{response_id}": delete_response}


def build(service: Service) -> ASGIApp:
    """Returns the ASGI application of a service, with its routes and middleware."""
    settings = service.settings

    def route(path: str, handler: Callable[[HttpRequest], Awaitable[None]], method: str) -> Route:
        endpoint = Endpoint(handler, settings, service.metrics.refused)
        return Route(path, endpoint, methods=[method])

    routes = [
        route(path, functools.partial(call, service), method)
        for method, calls in (("GET", GET), ("POST", POST), ("DELETE", DELETE))
        for path, call in calls.items()
    ]
    for path, file in page_files().items():
        routes.append(route(path, functools.partial(page_file, file), "GET"))
    app: ASGIApp = Starlette(routes=routes, exception_handlers={HTTPException: _of_starlette})
    app = ApiKeyAuth(app, settings.keys)
    if settings.origins:
        app = CORSMiddleware(
            app,
            settings.origins,
            ("GET", "POST", "DELETE"),
            ("*",),
            expose_headers=("x-request-id",),
        )
    app = AllowedOrigins(app, settings.origins, local=settings.local)
    return AccessLog(app, enabled=settings.access_log)


def _of_starlette(request: Request, error: Exception) -> Response:
    """Returns Starlette's 404 or 405 error in OpenAI's format."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"this server has no path {request.url.path[:200]!r}"
    else:
        message = f"{request.method} {request.url.path[:200]!r}: {error.detail}"
    return response(ApiError(error.status_code, message, headers=error.headers), request.url.path)
