"""Distances between the features of two sets of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.utils.errors import DataError

_BLOCK = 1024  # rows whose distances to all others are in memory at a time


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Fréchet distance between the normal distributions that fit two sets of features (Heusel et al. 2017: FID).

    |mean_a - mean_b|² + tr(Σa) + tr(Σb) - 2 tr((Σa Σb)^½). With centred features A and B, Σ = AᵀA / (n - 1), and
    the last trace is the sum of the singular values of A Bᵀ / √((n_a - 1)(n_b - 1)), whose squares are the eigenvalues
    of Σa Σb: no matrix root is taken and no covariance formed, so that sets with fewer samples than features are as
    exact.

    Args:
        a, b: [samples, features], at least two samples each; computed in float64.
    """
    a, b = _checked(a, b, least=2)
    difference = a.mean(0) - b.mean(0)
    left, right = (_root(values) for values in (a, b))
    roots = np.linalg.svd(left @ right.T, compute_uv=False).sum()
    distance = difference @ difference + (left**2).sum() + (right**2).sum() - 2 * roots
    return max(float(distance), 0.0)


def kernel_distance(
    a: np.ndarray, b: np.ndarray, *, subset: int = 1000, subsets: int = 100, seed: int = 0
) -> tuple[float, float]:
    """Kernel distance: squared maximum mean discrepancy, unbiased, with the kernel (x·y / features + 1)³ (KID,
    Bińkowski et al. 2018).

    Args:
        a, b: [samples, features], at least two samples each.
        subset, subsets: samples per draw, and number of draws; sets of at most `subset` samples are used whole, once.
        seed: seed of the draws.

    Returns:
        mean and standard deviation over the draws.
    """
    a, b = _checked(a, b, least=2)
    if max(len(a), len(b)) <= subset:
        return _discrepancy(a, b), 0.0
    random = np.random.default_rng(seed)
    count = min(subset, len(a), len(b))
    drawn = [
        _discrepancy(a[random.choice(len(a), count, False)], b[random.choice(len(b), count, False)])
        for _ in range(subsets)
    ]
    return float(np.mean(drawn)), float(np.std(drawn))


def precision_and_recall(real: np.ndarray, generated: np.ndarray, *, neighbours: int = 3) -> tuple[float, float]:
    """Share of generated samples among the real ones, and of real ones among the generated (Kynkäänniemi et al. 2019).

    A sample is among a set if it is no further from one of its members than that one's `neighbours`-th nearest is.

    Args:
        real, generated: [samples, features], more than `neighbours` samples each.
    """
    real, generated = _checked(real, generated, least=neighbours + 1)
    return _share_among(generated, real, neighbours), _share_among(real, generated, neighbours)


def read_features(path: str | Path) -> np.ndarray:
    """Read [samples, features] from .npy, .npz or .safetensors (the tensor `features`, or the only one).

    Raises:
        DataError: another format, several tensors and none of that name, another shape, values that are not finite.
    """
    path = Path(path)
    tensors = _tensors(path)
    name = "features" if "features" in tensors else next(iter(tensors), None)
    if name is None or (name != "features" and len(tensors) > 1):
        raise DataError(f"'{path}' holds {', '.join(tensors) or 'nothing'}; expected a tensor named features")
    values = tensors[name]
    if values.ndim != 2:
        raise DataError(f"'{path}': {name} has shape {values.shape}; expected (samples, features)")
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise DataError(f"'{path}': {name} holds a value that is not finite in row {row}")
    return values.astype(np.float64)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {name: value.double().numpy() for name, value in load_file(path).items()}
        if path.suffix in (".npy", ".npz"):
            loaded = np.load(path, allow_pickle=False)
            return {"features": loaded} if isinstance(loaded, np.ndarray) else {n: loaded[n] for n in loaded.files}
    except Exception as error:  # damaged files raise almost anything
        raise DataError(f"features '{path}' can't be read: {error or type(error).__name__}") from error
    raise DataError(f"features '{path}': expected a file that ends in .safetensors, .npz or .npy")


def _checked(a: np.ndarray, b: np.ndarray, *, least: int) -> tuple[np.ndarray, np.ndarray]:
    for name, values in (("first", a), ("second", b)):
        if values.ndim != 2 or len(values) < least:
            raise DataError(
                f"the {name} set of features has shape {values.shape}; expected (samples, features) with at least "
                f"{least} samples"
            )
    if a.shape[1] != b.shape[1]:
        raise DataError(f"the sets have {a.shape[1]} and {b.shape[1]} features; both have to be made by the same model")
    return a.astype(np.float64), b.astype(np.float64)


def _root(values: np.ndarray) -> np.ndarray:
    """R of at most [features, features] with RᵀR the covariance."""
    centred = (values - values.mean(0)) / np.sqrt(len(values) - 1)
    return np.linalg.qr(centred, mode="r") if len(centred) > centred.shape[1] else centred


def _discrepancy(a: np.ndarray, b: np.ndarray) -> float:
    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x @ y.T / x.shape[1] + 1) ** 3

    within = 0.0
    for values in (a, b):
        alike, count = kernel(values, values), len(values)
        within += (alike.sum() - np.trace(alike)) / (count * (count - 1))
    return float(within - 2 * kernel(a, b).mean())


def _share_among(samples: np.ndarray, members: np.ndarray, neighbours: int) -> float:
    radii = np.concatenate(
        [np.partition(_distances(part, members), neighbours, 1)[:, neighbours] for part in _parts(members)]
    )
    among = [(_distances(part, members) <= radii).any(1) for part in _parts(samples)]
    return float(np.concatenate(among).mean())


def _parts(values: np.ndarray) -> list[np.ndarray]:
    return [values[first : first + _BLOCK] for first in range(0, len(values), _BLOCK)]


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # by differences: computed from products, small distances are inexact
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(torch.from_numpy(a), torch.from_numpy(b), compute_mode=exact).numpy()
