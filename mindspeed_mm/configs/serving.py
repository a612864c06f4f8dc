"""The options of `mindspeed-mm serve` beside those of inference_vlm.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag
from mindspeed_mm.configs.vlm_inference import AnswerFlags


@dataclass
class ServeFlags(AnswerFlags):
    """Serving answers."""

    host: Annotated[str, flag("address to listen at; any but this machine's own needs an API key")] = "127.0.0.1"
    port: Annotated[int, flag("port to listen at; 0 = a free one", minimum=0, maximum=65535)] = 8000
    served_model_name: Annotated[
        str | None, flag("name that requests state as their model; absent = that of the run folder or directory")
    ] = None
    api_key_file: Annotated[
        str | None, flag("file whose only line is the key of requests; absent = MM_API_KEY's, else no key", path="file")
    ] = None
    media_root: Annotated[
        str | None, flag("requests may name media below this folder by file: URLs; absent = none", path="directory")
    ] = None
    media_hosts: Annotated[
        list[str] | None, flag("requests may name media of these hosts by http: and https: URLs; absent = none")
    ] = None
    max_requests: Annotated[
        int, flag("requests answered and waiting at a time; further ones are refused with status 429", minimum=1)
    ] = 512
    max_request_mib: Annotated[int, flag("largest body of a request, and file of a medium, in MiB", minimum=1)] = 64
    max_media: Annotated[int, flag("most media of a request", minimum=0)] = 16
    max_image_pixels: Annotated[
        int, flag("most pixels of a request's images together, before they are scaled", minimum=1)
    ] = 67_108_864
    max_prompt_tokens: Annotated[
        int | None, flag("longest prompt in tokens; absent = the model's positions", minimum=1)
    ] = None
    max_answer_tokens: Annotated[
        int | None, flag("longest answer that a request may ask for; absent = the model's positions", minimum=1)
    ] = None
    media_workers: Annotated[int, flag("threads that read prompts and their media", minimum=1)] = 2
    drain_seconds: Annotated[
        float, flag("seconds that running answers have for their end after SIGTERM or SIGINT", minimum=0)
    ] = 60.0
    engine: Annotated[
        Literal["auto", "transformers", "vllm"], flag("what generates; auto = vllm where it is installed")
    ] = "auto"
