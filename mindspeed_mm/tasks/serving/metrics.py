"""What a server counts, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: status of a request whose client has gone before the whole answer was sent
CLIENT_GONE = 499


class ServeMetrics:
    """Counts of one server.

    Attributes:
        requests: by status of HTTP; 499: the client has gone.
        seconds: from the beginning of a request for an answer to its end, whatever its status.
        first_seconds: to the first piece of a streamed answer.
        prompt_tokens, answer_tokens: of answers that were generated to their end.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter("mm_requests", "Requests by status", ["status"], registry=self._registry)
        self.seconds = Histogram(
            "mm_request_seconds", "Seconds of a request", buckets=_SECONDS, registry=self._registry
        )
        self.first_seconds = Histogram(
            "mm_first_piece_seconds", "Seconds to the first piece", buckets=_SECONDS, registry=self._registry
        )
        self.prompt_tokens = Counter("mm_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.answer_tokens = Counter("mm_answer_tokens", "Tokens of answers", registry=self._registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a figure that is read when it is asked for."""
        Gauge(name, about, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Return all figures as Prometheus reads them."""
        return generate_latest(self._registry)
