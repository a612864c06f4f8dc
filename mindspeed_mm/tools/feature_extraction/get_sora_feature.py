"""The place where launch scripts expect the extraction of features: `torchrun … get_sora_feature.py --mm-model … `."""

import sys

from mindspeed_mm.tools.feature_extraction.command import main

if __name__ == "__main__":
    sys.exit(main())
