"""ASGI middleware before an engine's application: key, sizes, number of requests, and clients that have gone."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mm.tasks.serving.describe import ServeLimits
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.tasks.serving.metrics import CLIENT_GONE, ServeMetrics
from mindspeed_mm.utils.errors import BadSample

Scope = MutableMapping[str, Any]
AsgiEvent = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiEvent]]
Send = Callable[[AsgiEvent], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Check = Callable[[str, Mapping[str, Any]], None]

_BODY_SECONDS = 60.0  # that a client may let the server wait for the next part of a body
_SEND_SECONDS = 60.0  # that a client may let the server wait before it takes the next part of an answer
_DISCARDING = 10.0  # seconds for the rest of a refused body, so that its client is there to read why
_BODIES = 32  # bodies of the largest size that are held at a time
_OPEN = ("/health",)  # paths that need no key


@dataclass
class Response:
    """What has been sent of a response.

    Attributes:
        status: of HTTP; None: nothing has been sent.
        is_complete: whether all of it has been sent.
    """

    status: int | None = None
    is_complete: bool = False


class RequestGuard:
    """Lets requests through to an application.

    Args:
        app: the application; None: it is set when the model is there, and until then every request gets status 503.
        limits: of requests.
        metrics: counts requests.
        api_key: that all requests but those for the server's health must have; None: none is needed.
        check: gets path and body of each POST, and raises RequestError; None: the application checks them.
        paths: that are served, with what is below them; None: the application knows.
    """

    def __init__(
        self,
        app: AsgiApp | None,
        limits: ServeLimits,
        metrics: ServeMetrics,
        api_key: str | None = None,
        check: Check | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        self.app = app
        self.state: Literal["loading", "ready", "draining"] = "loading" if app is None else "ready"
        self.in_flight = 0
        self._limits, self._metrics, self._check, self._paths = limits, metrics, check, paths
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            if self.app is not None:
                await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets: nothing is served by them
            await send({"type": "websocket.close", "code": 1008})
            return
        response, began, asks = Response(), time.monotonic(), scope["method"] == "POST"
        body = _Body(receive, is_read=not asks)
        try:
            await self._guarded(scope, body.receive, _watched(send, response))
        except RequestError as error:
            await body.discard(_BODIES * self._limits.body_bytes)
            await _refuse(_watched(send, response), error)
        except BadSample as error:
            await _refuse(_watched(send, response), RequestError(str(error), "messages"))
        finally:
            status = response.status if response.status is not None and response.is_complete else CLIENT_GONE
            self._metrics.requests.labels(str(status)).inc()
            if asks:
                self._metrics.seconds.observe(time.monotonic() - began)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._key is not None and path not in _OPEN:
            self._check_key(scope)
        if self._paths is not None and not any(path == known or path.startswith(f"{known}/") for known in self._paths):
            raise RequestError(f"there is no {path} here", status=404)
        if self.app is None or (self.state == "draining" and path != "/metrics"):
            raise RequestError(f"the server is {self.state}", status=503, code=self.state)
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if self.in_flight >= self._limits.requests:
            raise RequestError(
                f"{self.in_flight} requests are under way, as many as there may be (the server's --max-requests); "
                "send this one again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self.in_flight += 1
        held: list[int] = []
        try:
            body = await self._read(scope, receive, held)
            if body is not None:
                if self._check is not None:
                    await asyncio.to_thread(_checked, self._check, path, body)
                await self._run(scope, body, receive, send)
        finally:
            self.in_flight -= 1
            self._held -= sum(held)

    def _check_key(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._key or b""):
            raise RequestError(
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    async def _read(self, scope: Scope, receive: Receive, held: list[int]) -> bytes | None:
        """Read the body of a request; None: the client has gone before its end.

        Args:
            held: receives the sizes of its pieces.
        """
        stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if stated.isdigit() and int(stated) > self._limits.body_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        while True:
            try:
                event = await asyncio.wait_for(receive(), _BODY_SECONDS)
            except TimeoutError:
                raise RequestError("the body of the request didn't arrive in time", status=408) from None
            if event["type"] == "http.disconnect":
                return None
            pieces.append(event.get("body", b""))
            held.append(len(pieces[-1]))
            self._held += held[-1]
            if sum(held) > self._limits.body_bytes:
                raise self._too_large()
            if self._held > _BODIES * self._limits.body_bytes:
                raise RequestError("the bodies of other requests fill the server's memory", status=429)
            if not event.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self) -> RequestError:
        most = self._limits.body_bytes // 2**20
        return RequestError(f"the body is larger than {most} MiB (the server's --max-request-mib)", status=413)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application, and cancel it when the client goes away."""
        assert self.app is not None, "the model is loaded"
        response, gone = Response(), asyncio.ensure_future(_disconnected(receive))
        sent = [body]

        async def replay() -> AsgiEvent:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        async def taken(event: AsgiEvent) -> None:
            try:
                await asyncio.wait_for(send(event), _SEND_SECONDS)
            except TimeoutError:  # as good as gone
                gone.cancel()
                await asyncio.Event().wait()

        del body
        task = asyncio.ensure_future(self.app(scope, replay, _watched(taken, response)))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not response.is_complete and not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            task.cancel()
            gone.cancel()


class _Body:
    """The body of a request, of which it is known whether all of it has been received.

    Args:
        receive: what the server gives the application.
        is_read: whether there is none.
    """

    def __init__(self, receive: Receive, is_read: bool) -> None:
        self._receive, self._is_read = receive, is_read

    async def receive(self) -> AsgiEvent:
        """Return the next event."""
        event = await self._receive()
        self._is_read = self._is_read or event["type"] == "http.disconnect" or not event.get("more_body", False)
        return event

    async def discard(self, most: int) -> None:
        """Receive what is left, unless it is more than `most` bytes or takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARDING):
                while not self._is_read and most > 0:
                    most -= len((await self.receive()).get("body", b""))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _watched(send: Send, response: Response) -> Send:
    async def forward(event: AsgiEvent) -> None:
        await send(event)
        if event["type"] == "http.response.start":
            response.status = event["status"]
        elif event["type"] == "http.response.body" and not event.get("more_body", False):
            response.is_complete = True

    return forward


async def _refuse(send: Send, error: RequestError) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _checked(check: Check, path: str, body: bytes) -> None:
    """Let a check see the JSON object that a body holds.

    Raises:
        RequestError: it holds something else, or the check refuses it.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object")
    check(path, content)
