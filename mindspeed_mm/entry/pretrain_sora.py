"""Train a model that makes images or videos (Wan, HunyuanVideo, Flux, …) as its launch script and files say."""

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.tasks.train.start import start


def main() -> None:
    """Train as the command line says."""
    start(SORA)


if __name__ == "__main__":
    main()
