"""What the start of a run must not import: it would be paid by every process of every run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = (
    *("av", "diffusers", "jsonargparse", "matplotlib", "megatron.core", "pandas"),
    *("pyarrow", "rich", "sklearn", "tensorboard", "torch", "transformers"),
    *("mindspeed_mm.configs.generation_data", "mindspeed_mm.configs.sora_config", "mindspeed_mm.data.generation"),
)
CODE = """
import sys
import pretrain_transformers
models = [n for n in sys.modules if n.startswith("mindspeed_mm.models.transformers.")]
families = [n for n in models if sys.modules[n].__package__ == n]
print([name for name in {elsewhere} if name in sys.modules], families)
"""


def test_an_entry_script_imports_no_reader_no_other_backend_and_no_family() -> None:
    """Readers of media and tables, generation's library and families come when a run's files name them."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(elsewhere=ELSEWHERE)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == "[] []"
