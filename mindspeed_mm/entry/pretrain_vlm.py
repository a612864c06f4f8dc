"""Train a vision-language or text model (Qwen2.5-VL, Qwen3, …) as its launch script, model.json and data.json say.

Without further flags it is built of Megatron-core's modules (pipeline, tensor and data parallel); with
--use-torch-fsdp2 the transformers model itself is trained.
"""

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tasks.train.language import VLM
from mindspeed_mm.tasks.train.start import start


def main() -> None:
    """Train as the command line says."""
    start(VLM)


if __name__ == "__main__":
    main()
