"""The extraction of features at the path of published launch scripts: `torchrun … get_sora_feature.py --mm-model …`."""

import sys

from mindspeed_mm.tools.feature_extraction.command import main

if __name__ == "__main__":
    sys.exit(main())
