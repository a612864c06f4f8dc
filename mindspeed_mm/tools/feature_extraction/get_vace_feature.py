"""The extraction of features at the path that VACE's launch scripts call; their kind of data is refused so far."""

import sys

from mindspeed_mm.tools.feature_extraction.command import main

if __name__ == "__main__":
    sys.exit(main(script="get_vace_feature.py", family="wan"))
