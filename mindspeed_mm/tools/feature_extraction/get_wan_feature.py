"""The extraction of features at the path that Wan's launch scripts call: get_sora_feature.py for models of Wan."""

import sys

from mindspeed_mm.tools.feature_extraction.command import main

if __name__ == "__main__":
    sys.exit(main(script="get_wan_feature.py", family="wan"))
