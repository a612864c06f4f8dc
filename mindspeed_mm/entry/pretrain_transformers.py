"""Train a transformers model (Qwen2.5-VL, Qwen3, …) as its launch script, model.json and data.json describe it."""

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.tasks.train.start import start


def main() -> None:
    """Train as the command line says."""
    start(TRANSFORMERS)


if __name__ == "__main__":
    main()
