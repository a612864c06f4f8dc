"""`mindspeed-mm serve` as one typed description; nothing here imports torch."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindspeed_mm.configs.serving import ServeFlags
from mindspeed_mm.tasks.inference.describe import AnswerRun, answer_run, read_words
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import is_installed, require_extra
from mindspeed_mm.utils.launch import this_launch

API_KEY_VARIABLE = "MM_API_KEY"
_PARTS_OF_A_RUN = re.compile(r"hf|hf_ema|release|iter_\d+")
#: flags about what our own reading of prompts and generation do, and vLLM doesn't
_NOT_OF_VLLM = (
    *("template", "system", "stop", "use_cache", "num_beams", "batch_size", "max_new_tokens", "max_prompt_tokens"),
    *("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen"),
)
_OF_PROMPTS = ("prompt", "image", "video", "audio", "data_path", "output")


@dataclass(frozen=True)
class ServeLimits:
    """What a request may ask for.

    Attributes:
        requests: requests answered and waiting at a time.
        body_bytes: of a body, and of a medium's file.
        media: media of a request.
        image_pixels: pixels of its images together, as their files have them.
        prompt_tokens, answer_tokens: None: as many as the model has positions.
        media_root: folder of media that file: URLs may name, without symbolic links; None: there is none.
        media_hosts: hosts of media that http: and https: URLs may name.
    """

    requests: int
    body_bytes: int
    media: int
    image_pixels: int
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    media_root: Path | None = None
    media_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeRun:
    """What a launch asks for.

    Attributes:
        answers: how prompts are answered, and with which model.
        name: what requests call the model.
        host, port: where to listen; port 0: a free one.
        api_key: that requests must have; None: none is needed.
        limits: what a request may ask for.
        media_workers: threads that encode prompts.
        drain_seconds: time that running answers have after a signal.
        engine: what generates.
    """

    answers: AnswerRun
    name: str
    host: str
    port: int
    limits: ServeLimits
    media_workers: int
    drain_seconds: float
    engine: Literal["transformers", "vllm"]
    api_key: str | None = field(default=None, repr=False)


def describe_serving(words: Sequence[str], *, complete: bool = True) -> ServeRun:
    """Read the words of a launch command and the files that they name.

    Args:
        words: those after `serve`.
        complete: whether the model's directory must have weights and a tokenizer; False: a configuration is enough.

    Raises:
        ConfigError: unknown flags or keys, wrong values, missing files; a host that others reach, without a key.
        CheckpointError: there is no model where the launch says.
    """
    flags, shared, config = read_words(words, ServeFlags)
    for name in _OF_PROMPTS:
        if getattr(flags, name) is not None:
            spelt = "--" + name.replace("_", "-")
            raise ConfigError(f"{spelt} belongs to inference_vlm.py; a server answers what its clients send")
    engine = _engine(flags)
    answers = answer_run(flags, shared, config, complete=complete, chats=True)
    if this_launch().world_size > 1 or answers.sharding is not None:
        raise ConfigError("serve: a server is one process, and its model isn't sharded; start it by itself")
    api_key = _api_key(flags.api_key_file)
    if api_key is None and not _is_loopback(flags.host):
        raise ConfigError(
            f"--host {flags.host}: other machines can reach this address, so that requests need a key; give "
            f"--api-key-file, or the key in the variable {API_KEY_VARIABLE}"
        )
    limits = ServeLimits(
        flags.max_requests,
        flags.max_request_mib * 2**20,
        flags.max_media,
        flags.max_image_pixels,
        flags.max_prompt_tokens,
        flags.max_answer_tokens,
        Path(flags.media_root).resolve() if flags.media_root else None,
        tuple(host.lower() for host in flags.media_hosts or ()),
    )
    return ServeRun(
        answers,
        flags.served_model_name or _name_of(Path(flags.load or answers.source.weights)),
        flags.host,
        flags.port,
        limits,
        flags.media_workers,
        flags.drain_seconds,
        engine,
        api_key,
    )


def _engine(flags: ServeFlags) -> Literal["transformers", "vllm"]:
    found = is_installed("vllm")
    if flags.engine == "vllm" and not found:
        raise ConfigError("--engine vllm: vllm isn't installed in this environment; leave the flag out, or install it")
    if flags.engine == "transformers" or not found:
        require_extra("serve", "serve")
        return "transformers"
    for name in _NOT_OF_VLLM:
        if getattr(flags, name) is not None:
            spelt = "--" + name.replace("_", "-")
            raise ConfigError(f"{spelt}: vLLM has no such setting; leave it out, or add --engine transformers")
    return "vllm"


def _api_key(path: str | None) -> str | None:
    """The key that a file or the environment has; None: neither is given."""
    if path is None:
        key, where = os.environ.get(API_KEY_VARIABLE), f"the variable {API_KEY_VARIABLE}"
        if key is None:
            return None
    else:
        key, where = Path(path).read_text(encoding="utf-8").rstrip("\r\n"), f"--api-key-file '{path}'"
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"{where}: expected one line of letters, digits and signs without spaces, such as "
            f"{secrets.token_urlsafe(16)}; found {'nothing' if not key else 'something else'}"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _name_of(place: Path) -> str:
    """The name of a run folder, of whatever part of it is named; else the directory's."""
    place = place.absolute()
    while _PARTS_OF_A_RUN.fullmatch(place.name) and place.parent != place:
        place = place.parent
    return place.name
