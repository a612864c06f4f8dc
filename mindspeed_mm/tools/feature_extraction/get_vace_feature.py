"""The place where VACE's launch scripts expect the extraction of features; their kind of data is refused so far."""

import sys

from mindspeed_mm.tools.feature_extraction.command import main

if __name__ == "__main__":
    sys.exit(main(script="get_vace_feature.py", family="wan"))
