"""The benchmarks, a module each, and the registry that finds them: a new module is found without a line elsewhere."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from mindspeed_mm.tasks.evaluation.benchmark import Benchmark
from mindspeed_mm.utils.errors import ConfigError, did_you_mean


@functools.cache
def all_benchmarks() -> Mapping[str, Benchmark]:
    """Return the benchmarks by their names: `BENCHMARK` of each module of this package."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").BENCHMARK for name in names}


def find_benchmark(name: str, named_by: str) -> Benchmark:
    """Find a benchmark.

    Args:
        name: its name, or one of its aliases.
        named_by: flag or key that named it, for messages.

    Raises:
        ConfigError: there is none of this name.
    """
    known = {alias: bench for bench in all_benchmarks().values() for alias in (bench.name, *bench.aliases)}
    if name.lower() not in known:
        near = did_you_mean(name, known) or "; for rows of your own give --data-path and --score instead"
        raise ConfigError(f"{named_by} is '{name}'; expected one of {', '.join(sorted(known))}{near}")
    return known[name.lower()]
