"""Memory that a step frees serves the next one: the system is asked for no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's limits are set")
#: buffers that are alive at once, and freed, in each of some steps: 96 MiB, as of a step's activations
_STEPS = """
import resource, torch
from mindspeed_mm.accelerator.host_memory import keep_freed_memory
print(keep_freed_memory())
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**20) for _ in range(24)]
    del held
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() // 2**20)
"""


def steps(**environment: str) -> list[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    variables.pop("LD_PRELOAD", None)
    words = [sys.executable, "-c", _STEPS]
    given = {**variables, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(words, env=given, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def test_a_step_asks_for_no_pages() -> None:
    assert steps() == ["True", "0"]


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_states_counts(variable: str) -> None:
    value = "glibc.malloc.trim_threshold=131072" if variable == "GLIBC_TUNABLES" else "131072"
    said, mebibytes = steps(**{variable: value})
    assert said == "False" and int(mebibytes) > 48
