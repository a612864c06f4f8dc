"""Refusals of requests, in the form of OpenAI's API."""

from __future__ import annotations

from mindspeed_mm.utils.errors import MMError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(MMError):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        param: the field that is at fault; None: it isn't one field.
        code: for programs; None: the sentence says it all.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, object]:
        """The JSON body of the response."""
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return the JSON body of a response with an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
