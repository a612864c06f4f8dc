"""Distances between sets of features, against scipy's matrix root and sums over pairs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import save_file

from mindspeed_mm.tasks.generation import evaluation
from mindspeed_mm.tasks.generation.distances import (
    frechet_distance,
    kernel_distance,
    precision_and_recall,
    read_features,
)
from mindspeed_mm.utils.errors import ConfigError, DataError


def _sets(count_a, count_b, width, seed=0):
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(width, width))
    return random.normal(size=(count_a, width)) @ mixing, random.normal(size=(count_b, width)) * 2 + 0.5


def _by_matrix_root(a, b):
    of_a, of_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(of_a @ of_b).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(of_a) + np.trace(of_b) - 2 * np.trace(root)


@pytest.mark.parametrize(("counts", "width"), [((50, 70), 6), ((40, 30), 20)])
def test_frechet_distance_is_that_of_the_matrix_root(counts, width):
    a, b = _sets(*counts, width)
    assert frechet_distance(a, b) == pytest.approx(_by_matrix_root(a, b), rel=1e-9)
    assert frechet_distance(a, a[::-1]) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_fewer_samples_than_features():
    # 4 samples span 3 dimensions: a rotation into these, and zeros elsewhere, is known exactly
    a, b = _sets(4, 5, 4, seed=1)
    wide_a, wide_b = (np.concatenate([values, np.zeros((len(values), 60))], 1) for values in (a, b))
    turn = scipy.linalg.qr(np.random.default_rng(2).normal(size=(64, 64)))[0]
    assert frechet_distance(wide_a @ turn, wide_b @ turn) == pytest.approx(frechet_distance(a, b), rel=1e-9)


def test_kernel_distance_is_the_mean_over_pairs():
    a, b = _sets(7, 5, 3)
    kernel = lambda x, y: (float(x @ y) / 3 + 1) ** 3  # noqa: E731
    within_a = np.mean([kernel(a[i], a[j]) for i in range(7) for j in range(7) if i != j])
    within_b = np.mean([kernel(b[i], b[j]) for i in range(5) for j in range(5) if i != j])
    between = np.mean([kernel(x, y) for x in a for y in b])
    assert kernel_distance(a, b) == (pytest.approx(within_a + within_b - 2 * between), 0.0)
    mean, deviation = kernel_distance(a, b, subset=4, subsets=400)
    assert deviation > 0
    assert mean == pytest.approx(within_a + within_b - 2 * between, abs=4 * deviation / math.sqrt(400))


def test_precision_and_recall_by_hand():
    real = np.array([[0.0], [1.0], [2.0], [3.0]])  # nearest neighbour of each at distance 1
    made = np.array([[0.5], [10.0], [10.5]])  # 0.5 is among the real ones; its radius is 9.5, so all real ones are near
    assert precision_and_recall(real, made, neighbours=1) == (pytest.approx(1 / 3), 1.0)
    assert precision_and_recall(made, real, neighbours=1) == (1.0, pytest.approx(1 / 3))


def test_files_of_features(tmp_path):
    values = np.arange(6.0).reshape(3, 2)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", features=values, names=np.array(["x"]))
    save_file({"only": torch.tensor(values, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    for name in ("a.npy", "a.npz", "a.safetensors"):
        np.testing.assert_array_equal(read_features(tmp_path / name), values)
    np.savez(tmp_path / "b.npz", one=values, two=values)
    with pytest.raises(DataError, match="holds one, two; expected a tensor named features"):
        read_features(tmp_path / "b.npz")
    np.save(tmp_path / "nan.npy", np.array([[1.0], [np.nan]]))
    with pytest.raises(DataError, match="not finite in row 1"):
        read_features(tmp_path / "nan.npy")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="can't be read"):
        read_features(tmp_path / "objects.npy")
    with pytest.raises(DataError, match=r"ends in \.safetensors"):
        read_features(tmp_path / "a.pt")


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    a, b = _sets(20, 30, 4)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    words = ["--features-a", str(tmp_path / "a.npy"), "--features-b", str(tmp_path / "b.npy")]
    assert evaluation.main([*words, "--output", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["frechet_distance"] == pytest.approx(frechet_distance(a, b))
    assert {"precision", "recall", "kernel_distance"} <= figures.keys()
    assert f"frechet_distance     {figures['frechet_distance']:.6g}" in capsys.readouterr().out
    np.save(tmp_path / "narrow.npy", b[:, :3])
    with pytest.raises(DataError, match="4 and 3 features"):
        evaluation.main([*words[:3], str(tmp_path / "narrow.npy")])
    with pytest.raises(ConfigError, match="--features-b is missing beside --features-a"):
        evaluation.main(words[:2])
    with pytest.raises(ConfigError, match="nothing to do"):
        evaluation.main([])
    with pytest.raises(ConfigError, match="did you mean '--features-a'"):
        evaluation.main(["--feature-a", "x"])
