"""Train a transformers model as one YAML file describes it: `trainer.py run.yaml [section.key=value …]`."""

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.tasks.train.start import start


def main() -> None:
    """Train as the command line says."""
    start(TRANSFORMERS)


if __name__ == "__main__":
    main()
