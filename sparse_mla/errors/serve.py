"""The error reference over HTTP: the built site, and the JSON with a search by message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .explain import SCHEMA_VERSION, explanation, find, suggest
from .records import RECORDS
from .site import Release, index, published

LONGEST_MESSAGE = 50_000
"""Characters of a message in an address; a server reads no longer ones."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def application(site: Path, release: Release) -> Starlette:
    """The site in folder ``site``, and the interface for programs below ``/api/errors``."""

    def all_errors(request: Request) -> Response:
        unknown = request.query_params.keys() - {"message"}
        if unknown:
            name = sorted(unknown)[0]
            return _refusal(400, "unknown-parameter", f"no parameter {name[:80]!r}; use message")
        messages = request.query_params.getlist("message")
        if not messages:
            return JSONResponse(index(release))
        return _explained(messages, release)

    def one_error(request: Request) -> Response:
        id = request.path_params["id"].removesuffix(".json")
        if id == "index":
            return JSONResponse(index(release))
        if id not in RECORDS:
            nearest = [record.id for record in suggest(id)]
            text = f"no error has the id {id[:80]!r}"
            return _refusal(404, "unknown-id", text, suggestions=nearest)
        return JSONResponse(published(RECORDS[id], release))

    def nothing(request: Request) -> Response:
        raise HTTPException(404)

    routes = [
        Route("/api", nothing),
        Route("/api/errors", all_errors),
        Route("/api/errors/", all_errors),
        Route("/api/errors/{id}", one_error),
        Mount("/api", StaticFiles(directory=site / "api")),  # without pages: a miss is JSON
        Mount("/", StaticFiles(directory=site, html=True)),
    ]

    async def failed(request: Request, fault: Exception) -> Response:
        status = fault.status_code if isinstance(fault, HTTPException) else 500
        headers = dict(getattr(fault, "headers", None) or {})
        if request.url.path.startswith("/api"):
            text = {
                404: "there is no such address; see /api/errors",
                405: f"{request.method} is not answered here; use GET",
            }.get(status, "the request could not be answered")
            code = {404: "not-found", 405: "method-not-allowed"}.get(status, "failed")
            return _refusal(status, code, text, headers=headers)
        if status == 404:
            return FileResponse(site / "404.html", status_code=404)
        return Response(status_code=status, headers=headers)

    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})
    app.add_middleware(_Headers)
    return app


def _explained(messages: list[str], release: Release) -> Response:
    message = messages[0]
    if len(messages) > 1:
        return _refusal(400, "repeated-parameter", "give message once")
    if not message.strip():
        return _refusal(400, "empty-message", "message is empty")
    if len(message) > LONGEST_MESSAGE:
        text = f"message has {len(message)} characters, more than {LONGEST_MESSAGE}"
        return _refusal(413, "message-too-long", text)
    matches = find(message)
    if not matches:
        nearest = [record.id for record in suggest(message)]
        return JSONResponse(
            {"schema_version": SCHEMA_VERSION, "found": False, "suggestions": nearest}
        )
    page = explanation(matches[0])
    return JSONResponse(
        {
            "schema_version": SCHEMA_VERSION,
            "found": True,
            **page,
            "record": published(matches[0].record, release),
            "others": [{"id": match.record.id, "score": match.score} for match in matches[1:4]],
        }
    )


def _refusal(
    status: int, code: str, message: str, *, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    error = {"code": code, "message": message, **more}
    body = {"schema_version": SCHEMA_VERSION, "error": error}
    return JSONResponse(body, status_code=status, headers=headers)


_Message = dict[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


class _Headers:
    """Adds to each answer what keeps a browser from fetching or guessing anything."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        async def with_headers(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)
