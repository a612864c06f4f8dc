"""`mindspeed-mm serve PATH`: an endpoint with OpenAI's interface, for one model."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.configs.serving import ServeFlags
from mindspeed_mm.tasks.command_line import run_command
from mindspeed_mm.tasks.inference.command import model_outline
from mindspeed_mm.tasks.serving.describe import ServeRun, describe_serving


def main(argv: Sequence[str]) -> int:
    """Run the words after `mindspeed-mm serve`; return the exit status.

    Raises:
        MMError: the model can't be served.
    """
    words = list(argv)
    named = ["--load", *words] if words and not words[0].startswith("-") else words
    return run_command(
        named or ["--help"],
        ServeFlags,
        "Answer requests of OpenAI's clients with one model (docs/serving.md): mindspeed-mm serve PATH [--flag …]",
        lambda given: _outline(describe_serving(given, complete=False)),
        lambda given: _serve(describe_serving(given)),
    )


def _serve(run: ServeRun) -> int:
    if run.engine == "vllm":
        from mindspeed_mm.tasks.serving.vllm_server import serve_with_vllm

        serve_with_vllm(run)
    from mindspeed_mm.tasks.serving.server import serve

    return serve(run)


def _outline(run: ServeRun) -> dict[str, object]:
    """The answer of a dry run."""
    return {
        **model_outline(run.answers),
        "server": {"name": run.name, "host": run.host, "port": run.port, "key": run.api_key is not None},
        "engine": run.engine,
    }
