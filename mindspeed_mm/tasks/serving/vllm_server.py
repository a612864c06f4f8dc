"""vLLM in the place of transformers: the export that it reads, its command, and the guard before its application."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_mm.tasks.inference.source import ModelSource
from mindspeed_mm.tasks.serving.body import check_answer_length, check_model
from mindspeed_mm.tasks.serving.describe import ServeLimits, ServeRun
from mindspeed_mm.tasks.serving.errors import RequestError
from mindspeed_mm.tasks.serving.guard import AsgiApp, RequestGuard
from mindspeed_mm.tasks.serving.media import check_media
from mindspeed_mm.tasks.serving.metrics import ServeMetrics
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0, notice

#: environment variable by which the guard gets what the launch says; a command line would show the key
GUARD_VARIABLE = "MM_SERVE_GUARD"
_CHATS = "/v1/chat/completions"
_ROUTES = (_CHATS, "/v1/models", "/health", "/metrics")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DRAWING = ("temperature", "top_p", "top_k", "repetition_penalty")


def serve_with_vllm(run: ServeRun) -> NoReturn:
    """Export the model if vLLM can't read it as it is, and become vLLM's server.

    Raises:
        CheckpointError: the checkpoint doesn't belong to its model, or the export can't be written.
    """
    if run.answers.allow_tf32:
        notice("--allow-tf32 has no effect here: vLLM chooses how it computes; --engine transformers honours it")
    directory = exported(run)
    command = command_of(run, directory)
    info_rank0(f"starting {' '.join(command[1:])}")
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, GUARD_VARIABLE: guard_settings(run)})


def command_of(run: ServeRun, directory: Path) -> list[str]:
    """Return vLLM's command line for a launch.

    Args:
        directory: the HF directory that it serves.
    """
    answers, limits = run.answers, run.limits
    values = answers.settings.values
    generation: dict[str, Any] = {name: values[name] for name in _DRAWING if name in values}
    if not answers.settings.draws_tokens:
        generation["temperature"] = 0.0
    guard = f"{VllmGuard.__module__}.{VllmGuard.__qualname__}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(directory)]
    command += ["--served-model-name", run.name, "--host", run.host, "--port", str(run.port), "--middleware", guard]
    command += ["--dtype", _DTYPES[answers.dtype] if answers.dtype else "auto", "--seed", str(answers.settings.seed)]
    command += ["--override-generation-config", json.dumps(generation), "--disable-fastapi-docs"]
    command += ["--shutdown-timeout", str(max(1, round(run.drain_seconds)))]
    command += ["--default-chat-template-kwargs", json.dumps({"enable_thinking": _thinks(run)})]
    if limits.media_root is not None:
        command += ["--allowed-local-media-path", str(limits.media_root)]
    if limits.media_hosts:
        command += ["--allowed-media-domains", *limits.media_hosts]
    return [*command, "--trust-remote-code"] if answers.trust_remote_code else command


def _thinks(run: ServeRun) -> bool:
    return run.answers.param.basic_parameters.enable_thinking


def exported(run: ServeRun) -> Path:
    """Return the HF directory that vLLM serves: the launch's own, or an export beside its checkpoint or adapter.

    An export is written once, and again when the checkpoint is newer.
    """
    source, answers = run.answers.source, run.answers
    if source.adapter is None:
        return _plain(source, source.weights, averaged=answers.averaged, trusts=answers.trust_remote_code)
    from mindspeed_mm.tools.converters.lora import merge_adapters
    from mindspeed_mm.tools.converters.places import Given

    base = _plain(source, source.weights, averaged=False, trusts=answers.trust_remote_code)
    target = _place_of(source.adapter, "merged")
    if not _is_fresh(target, source.adapter):
        merge_adapters(
            Given(source.named_by, str(base)),
            Given(source.named_by, str(source.adapter)),
            Given("serve", str(target)),
            trust_remote_code=answers.trust_remote_code,
        )
    return target


def _plain(source: ModelSource, weights: Path, *, averaged: bool, trusts: bool) -> Path:
    """A HF directory with a model's weights: its own, or an export of its checkpoint."""
    if (weights / "config.json").is_file():
        if source.processor not in (weights, source.adapter):
            raise ConfigError(
                f"'{weights}' is served as it is, and vLLM reads the processor there, not in '{source.processor}'; "
                "copy its files there, or add --engine transformers"
            )
        return weights
    from mindspeed_mm.tools.converters.generic import checkpoint_to_hf
    from mindspeed_mm.tools.converters.places import Given

    target = _place_of(weights, "averaged" if averaged else "hf")
    if not _is_fresh(target, weights):
        checkpoint_to_hf(
            Given(source.named_by, str(weights)),
            Given("serve", str(target)),
            Given("--processor-path", str(source.config)),
            trust_remote_code=trusts,
            averaged=averaged,
        )
    return target


def _place_of(directory: Path, kind: str) -> Path:
    """Where the export of a checkpoint or an adapter is: beside it."""
    return directory.parent / f"{directory.name}.{kind}"


def _is_fresh(target: Path, origin: Path) -> bool:
    """Whether an export is there and newer than what it was made of; an older one is removed."""
    if (target / "config.json").is_file() and _newest(target) >= _newest(origin):
        return True
    shutil.rmtree(target, ignore_errors=True)
    return False


def _newest(directory: Path) -> float:
    return max(file.stat().st_mtime for file in directory.iterdir() if file.is_file())


def guard_settings(run: ServeRun) -> str:
    """Return what the guard in vLLM's process must know, as JSON."""
    limits = {**asdict(run.limits), "media_root": str(run.limits.media_root) if run.limits.media_root else None}
    return json.dumps({"name": run.name, "api_key": run.api_key, "limits": limits})


class VllmGuard(RequestGuard):
    """The guard as vLLM's `--middleware` makes it; its settings are in the environment.

    It lets through the routes that a launch with transformers has, and checks names, keys, sizes and media. The other
    fields of a request are vLLM's.
    """

    def __init__(self, app: AsgiApp) -> None:
        said = json.loads(os.environ[GUARD_VARIABLE])
        stated = said["limits"]
        root = stated.pop("media_root")
        hosts = tuple(stated.pop("media_hosts"))
        limits = ServeLimits(**stated, media_root=Path(root) if root else None, media_hosts=hosts)
        name: str = said["name"]

        def check(path: str, content: Mapping[str, Any]) -> None:
            if path != _CHATS:
                raise RequestError(f"there is no {path} here", status=404)
            check_model(content, name)
            check_answer_length(content, limits.answer_tokens)
            check_media(content, limits)

        super().__init__(app, limits, ServeMetrics(), said["api_key"], check, _ROUTES)
