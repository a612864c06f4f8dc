"""What a launch script's `torchrun` is, if `mindspeed-mm train` runs the script."""

import sys

from mindspeed_mm.launch import errors_as_sentences
from mindspeed_mm.tools.train.command import stand_in

if __name__ == "__main__":
    with errors_as_sentences():
        sys.exit(stand_in(sys.argv[1:]))
