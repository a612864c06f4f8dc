"""Saving: in the background as at once, bit for bit; and a save that fails, on any rank and at any stage.

Most tests drive `CheckpointSaver` with a small sharded model, many saves in one job; a few run the entry script.
"""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.dcp_reader import DcpReader, ReadRequest
from mindspeed_mm.checkpoint.lazy import whole
from mindspeed_mm.checkpoint.manifest import manifest_problems
from mindspeed_mm.checkpoint.run_folder import find_checkpoint
from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankError, RankPool


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = DcpReader(directory)
    found = {name: torch.empty(reader.shape(name), dtype=reader.dtype(name)) for name in reader.tensors}
    reader.read_into(ReadRequest(name, whole(tensor.shape), tensor) for name, tensor in found.items())
    return found


def assert_same_checkpoint(one: Path, other: Path, more_random_states: frozenset[str] = frozenset()) -> None:
    """Bit-equal contents, whatever file they are in.

    Args:
        more_random_states: that only the other one has, of a further device.
    """
    assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys() and len(first) > 5
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert json.loads((one / "state.json").read_text()) == json.loads((other / "state.json").read_text())
    for path in one.glob("rng_*"):
        first, second = load_file(path), load_file(other / path.name)
        assert first.keys() | more_random_states == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first)


class Trained:
    """A sharded model, its optimizer and a saver, on this rank."""

    def __init__(self, root: str, *, in_background: bool, sharding_size: int | str = "auto", **saver: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        from mindspeed_mm.checkpoint.saver import CheckpointSaver
        from mindspeed_mm.checkpoint.snapshot import Snapshots
        from mindspeed_mm.configs.dims import Dims
        from mindspeed_mm.optimizer.elementwise import AdamW
        from mindspeed_mm.parallel.meshes import parameter_mesh
        from mindspeed_mm.parallel.world import start_world

        self.world = start_world("gloo")
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 7))
        mesh = parameter_mesh(Dims.of(self.world.size, sharding_size=sharding_size))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.saver = CheckpointSaver(root, in_background=in_background, **saver)
        self.snapshots = Snapshots(self.model, self.optimizer, save_rng=True, world=self.world)
        self.iteration = 0

    def step(self) -> None:
        self.model(torch.randn(4, 33)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1

    def take(self, detached: bool) -> Any:
        return self.snapshots.take({"iteration": self.iteration}, detached=detached)

    def save(self, **how: Any) -> Any:
        """Save, and wait for the end of it."""
        outcome = self.saver.save(self.iteration, self.take, **how)
        return outcome or self.saver.wait()

    def load(self, directory: Path) -> None:
        from mindspeed_mm.checkpoint.dcp import load

        load(directory, model=self.model, optimizer=self.optimizer, load_rng=True, world=self.world)


def save_while_training(sync_root: str, async_root: str) -> list[bool]:
    """Save the same moments at once, and in the background while the model is changed; twice, as memory is reused."""
    from mindspeed_mm.checkpoint import snapshot

    at_once = Trained(sync_root, in_background=False)
    trained = Trained(async_root, in_background=True)
    alive = []
    for _ in range(2):
        go_on = threading.Event()
        write_data = snapshot._Writer.write_data

        def held(*args: Any, go_on: threading.Event = go_on, write_data: Any = write_data) -> Any:
            assert go_on.wait(30)
            return write_data(*args)

        random_state = torch.get_rng_state()
        at_once.step()
        at_once.save()
        torch.set_rng_state(random_state)
        trained.step()
        with mock.patch.object(snapshot._Writer, "write_data", held):
            trained.saver.save(trained.iteration, trained.take)
            kept = [p.to_local().clone() for p in trained.model.parameters()]
            random_state = torch.get_rng_state()
            trained.step()
            with torch.no_grad():
                for parameter in trained.model.parameters():
                    parameter.to_local().fill_(7)
                for state in trained.optimizer.state.values():
                    state["exp_avg"].to_local().fill_(7)
            alive.append(trained.saver.poll() is None)
            go_on.set()
            trained.saver.wait()
        alive.append(trained.saver.last_saved == at_once.iteration)
        # back to where the other one is
        trained.load(Path(async_root) / f"iter_{at_once.iteration:07d}")
        trained.iteration = at_once.iteration
        alive.append(all(torch.equal(p.to_local(), k) for p, k in zip(trained.model.parameters(), kept)))
        torch.set_rng_state(random_state)
    at_once.saver.close()
    trained.saver.close()
    return alive


def test_in_the_background_as_at_once(ranks2: RankPool, tmp_path: Path) -> None:
    """Weights and moments are overwritten while the save is held up: the checkpoint must not see it."""
    roots = tmp_path / "sync", tmp_path / "async"
    assert ranks2.run(save_while_training, *map(str, roots)) == [[True] * 6] * 2
    for iteration in (1, 2):
        folders = [root / f"iter_{iteration:07d}" for root in roots]
        assert_same_checkpoint(*folders)
        assert manifest_problems(folders[1]) == []
        files = json.loads((folders[1] / "manifest.json").read_text())["files"]
        assert {*files, "manifest.json"} == {p.name for p in folders[1].iterdir()}
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "state.json", "rng_00001.safetensors"} <= files.keys()


def copies_made(root: str) -> list[int]:
    """Addresses of the host memory after each of three saves."""
    trained = Trained(root, in_background=True)
    addresses = []
    for _ in range(3):
        trained.step()
        trained.save()
        addresses.append(sum(buffer.data_ptr() for buffer in trained.snapshots._buffers.values()))
    trained.saver.close()
    return addresses


def test_memory_for_copies_is_reused(ranks2: RankPool, tmp_path: Path) -> None:
    for addresses in ranks2.run(copies_made, str(tmp_path)):
        assert len(set(addresses)) == 1


def plans_made(root: str, sharding_size: int | str) -> int:
    """How often torch made a global plan for three saves."""
    from mindspeed_mm.checkpoint import snapshot

    trained = Trained(root, in_background=False, sharding_size=sharding_size)
    plan = snapshot._Planner._create_global_plan
    with mock.patch.object(snapshot._Planner, "_create_global_plan", autospec=True, side_effect=plan) as made:
        for _ in range(3):
            trained.step()
            assert trained.save().failure is None
    trained.saver.close()
    return made.call_count


def test_replicas_share_the_writing_and_the_plan_is_made_once(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(plans_made, str(tmp_path), 1) == [1, 0]
    folder = find_checkpoint(tmp_path).directory
    assert manifest_problems(folder) == []
    reader = DcpReader(folder)
    sizes = dict.fromkeys(("__0_0.distcp", "__1_0.distcp"), 0)
    for index, where in reader.metadata.storage_data.items():
        sizes[where.relative_path] += 4 * math.prod(reader.shape(index.fqn))
    assert max(sizes.values()) - min(sizes.values()) <= 4 * 33 * 40  # the largest tensor


@contextmanager
def failing(stage: str, rank: int) -> Iterator[None]:
    """Let a stage of a save fail on one rank."""
    from mindspeed_mm.checkpoint import run_folder, saver, snapshot

    full = OSError(errno.ENOSPC, "No space left on device")
    with ExitStack() as stack:

        def patch(target: Any, name: str, **how: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, **how))

        if int(os.environ["RANK"]) == rank:
            if stage == "copy":
                patch(snapshot, "model_tensors", side_effect=MemoryError("no memory"))
            elif stage == "folder":
                patch(saver.RunFolder, "open", side_effect=PermissionError(errno.EACCES, "Permission denied"))
            elif stage == "plan":
                patch(snapshot._Planner, "create_local_plan", side_effect=ValueError("no plan"))
            elif stage == "tensors":
                patch(torch, "save", side_effect=full)
            elif stage == "metadata":
                patch(snapshot.dcp.FileSystemWriter, "finish", side_effect=full)
            elif stage == "rng":
                patch(snapshot, "save_file", side_effect=full)
            elif stage == "state":
                patch(snapshot, "write_json", side_effect=full)
            elif stage == "sums":
                patch(saver, "sum_files", side_effect=OSError(errno.EIO, "Input/output error"))
            elif stage == "manifest":
                patch(saver, "write_manifest", side_effect=full)
            elif stage == "rename":
                denied = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
                patch(run_folder, "os", new=mock.Mock(wraps=os, rename=denied))
            elif stage == "tracker":
                patch(run_folder, "replace_file", side_effect=full)
        yield


STAGES = {
    "copy": (1, "preparing the save failed on rank 1: MemoryError: no memory"),
    "folder": (0, "preparing the save failed on rank 0: Permission denied"),
    "plan": (1, "writing the files failed on rank 1: ValueError: no plan"),
    "tensors": (1, "writing the files failed on rank 1: No space left on device ("),
    "metadata": (0, "writing the files failed on rank 0: No space left on device ("),
    "rng": (1, "writing the files failed on rank 1: No space left on device ("),
    "state": (0, "writing the files failed on rank 0: No space left on device ("),
    "sums": (1, "summing the files failed on rank 1: Input/output error"),
    "manifest": (0, "making the checkpoint visible failed on rank 0: No space left on device ("),
    "rename": (0, "making the checkpoint visible failed on rank 0: Permission denied"),
    "tracker": (0, "making the checkpoint visible failed on rank 0: No space left on device ("),
}


def fail_at_every_stage(root: str, in_background: bool) -> dict[str, tuple[str, list[str], bool]]:
    """Let each stage fail once; between them a save must work.

    Returns:
        stage → (what failed, what the run folder holds then, whether the last good checkpoint loads).
    """
    import torch.distributed as dist

    trained = Trained(root, in_background=in_background, keep=1)
    found = {}
    for stage, (rank, _) in STAGES.items():
        trained.step()
        assert trained.save().failure is None
        good = trained.iteration
        kept = [p.to_local().clone() for p in trained.model.parameters()]
        trained.step()
        with failing(stage, rank):
            outcome = trained.save()
        dist.barrier()
        names = sorted(p.name for p in Path(root).iterdir())
        assert find_checkpoint(root).iteration == good == trained.saver.last_saved
        trained.load(find_checkpoint(root).directory)
        loads = all(torch.equal(p.to_local(), k) for p, k in zip(trained.model.parameters(), kept))
        found[stage] = (str(outcome.failure), names, loads and outcome.iteration == trained.iteration == good + 1)
    trained.saver.close()
    return found


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_the_background"])
def test_a_rank_that_fails_fails_for_all(ranks2: RankPool, tmp_path: Path, in_background: bool) -> None:
    """No rank is left waiting, nothing becomes visible or is left behind, and the next save works."""
    answers = ranks2.run(fail_at_every_stage, str(tmp_path), in_background)
    assert answers[0] == answers[1]
    for number, (stage, (_, words)) in enumerate(STAGES.items()):
        sentence, names, loads = answers[0][stage]
        assert sentence.startswith(words), stage
        assert names == [f"iter_{2 * number + 1:07d}", "latest_checkpointed_iteration.txt"], stage
        assert loads, stage
        assert ("MB free in" in sentence or "GB free in" in sentence) == ("No space" in words)


def consequences(root: str, in_background: bool, exit_on_failure: bool) -> list[str]:
    """What a failed save does, one in the middle of a run and one at its end."""
    from mindspeed_mm.utils.errors import CheckpointError

    trained = Trained(root, in_background=in_background, exit_on_failure=exit_on_failure)
    said: list[str] = []
    for is_last in (False, True):
        trained.step()
        try:
            with failing("tensors", 1):
                outcome = trained.saver.save(trained.iteration, trained.take, is_last=is_last)
                if outcome is None:
                    trained.saver._running.thread.join()  # type: ignore[union-attr]
                    trained.saver.poll()
            said.append(f"asks to stop: {trained.saver.asks_to_stop}")
            trained.saver.wait()
        except CheckpointError as error:
            said.append(str(error))
    trained.saver.close()
    return said


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_the_background"])
def test_what_follows_from_a_failure(ranks2: RankPool, tmp_path: Path, in_background: bool) -> None:
    sentence = "the checkpoint of iteration {} could not be saved: writing the files failed on rank 1"
    for answer in ranks2.run(consequences, str(tmp_path / "a"), in_background, False):
        assert answer[0] == "asks to stop: False" and len(answer) == 2
        assert answer[1].startswith(sentence.format(2)) and "holds no checkpoint yet" in answer[1]
    for answer in ranks2.run(consequences, str(tmp_path / "b"), in_background, True):
        assert answer[0] == "asks to stop: True" if in_background else answer[0].startswith(sentence.format(1))
        # in the background: the first failure ends the run before a last save is tried
        assert answer[1].startswith(sentence.format(1 if in_background else 2))
        assert f"--load '{tmp_path / 'b'}'" in answer[1]


def words_of(folder: Path, hf_dir: Path, run: Path, **flags: Any) -> list[str]:
    data = folder / "data" / "data.json"
    if not data.exists():
        write_mixed_dataset(folder / "data", rows=12, seed=1, images=False)
    files = write_run_files(folder / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 7, "save": run, "save_interval": 2}
    return launch_flags(files, **{**settings, **flags})


def test_a_run_is_the_same_with_async_save(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    plain, background = tmp_path / "plain", tmp_path / "background"
    ranks2.run(run_entry, words_of(tmp_path, qwen3_dir, plain), timeout=120)
    ranks2.run(run_entry, words_of(tmp_path, qwen3_dir, background, async_save=True), timeout=120)
    assert metrics_of(background) == metrics_of(plain)
    assert len(metrics_of(plain)[0]) == 7
    for iteration in (2, 4, 6, 7):
        folders = [run / f"iter_{iteration:07d}" for run in (plain, background)]
        assert_same_checkpoint(*folders)


def test_save_epochs(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """12 rows, 4 a step: an epoch is 3 steps."""
    run = tmp_path / "run"
    words = words_of(tmp_path, qwen3_dir, run, save_interval=None, save_epochs=2, train_iters=13)
    ranks2.run(run_entry, words, timeout=120)
    assert sorted(p.name for p in run.glob("iter_*")) == [f"iter_{n:07d}" for n in (6, 12, 13)]


def run_and_fail(words: list[str], rank: int, iterations: list[int]) -> None:
    """Run; saves of the given iterations fail on a rank."""
    from mindspeed_mm.checkpoint import snapshot

    write = snapshot.TensorSnapshot.write

    def sometimes(self: Any, directory: Path, group: Any) -> list[str]:
        names = write(self, directory, group)
        if int(os.environ["RANK"]) == rank and int(directory.name.split("_")[1].split(".")[0]) in iterations:
            raise OSError(errno.ENOSPC, "No space left on device")
        return names

    with mock.patch.object(snapshot.TensorSnapshot, "write", sometimes):
        run_entry(words)


@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "in_the_background"])
def test_a_run_goes_on_after_a_failed_save(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path, async_save: bool) -> None:
    run = tmp_path / "run"
    words = words_of(tmp_path, qwen3_dir, run, async_save=async_save)
    ranks2.run(run_and_fail, words, 1, [4], timeout=120)
    assert len(metrics_of(run)[0]) == 7
    assert sorted(p.name for p in run.glob("*iter_*")) == [f"iter_{n:07d}" for n in (2, 6, 7)]
    assert find_checkpoint(run).iteration == 7


@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "in_the_background"])
def test_a_run_ends_after_a_failed_save_if_asked_to(
    ranks2: RankPool, qwen3_dir: Path, tmp_path: Path, async_save: bool
) -> None:
    run = tmp_path / "run"
    words = words_of(tmp_path, qwen3_dir, run, async_save=async_save, on_save_failure="exit", train_iters=100_000)
    words[words.index("--save-interval") + 1] = "40"
    with pytest.raises(RankError, match="exit code 1") as caught:
        ranks2.run(run_and_fail, words, 1, [80], timeout=120)
    text = str(caught.value)
    assert (
        "CheckpointError: the checkpoint of iteration 80 could not be saved: writing the files failed on rank 1" in text
    )
    assert f"the last good checkpoint is '{run / 'iter_0000040'}'" in text
    assert "Traceback" not in text
    assert [p.name for p in run.glob("*iter_*")] == ["iter_0000040"]
    done = len(metrics_of(run)[0])
    assert done == 80 if not async_save else 80 < done < 120  # at the next step, not at the next save


def test_a_last_save_that_fails_is_an_error(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RankError, match="exit code 1") as caught:
        ranks2.run(run_and_fail, words_of(tmp_path, qwen3_dir, run, async_save=True), 0, [7], timeout=120)
    assert "CheckpointError: the checkpoint of iteration 7 could not be saved" in str(caught.value)
    assert find_checkpoint(run).iteration == 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own, which is enough for one checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"can't mount a file system here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "in_the_background"])
@pytest.mark.parametrize("then", ["continue", "exit"])
def test_a_full_disk(
    ranks2: RankPool, qwen3_dir: Path, tmp_path: Path, small_disk: Path, async_save: bool, then: str
) -> None:
    run = small_disk / "run"
    words = words_of(tmp_path, qwen3_dir, run, async_save=async_save, on_save_failure=then)
    with pytest.raises(RankError, match="exit code 1") as caught:
        ranks2.run(run_entry, words, timeout=120)
    text = str(caught.value)
    assert "No space left on device" in text and f"MB free in '{run}'" in text, text
    assert (f"'{run / 'iter_0000002'}'; training goes on" in text) == (then == "continue")
    assert "Traceback" not in text
    saved = find_checkpoint(run)
    assert manifest_problems(saved.directory) == []
    assert saved.iteration == 2
    assert [p.name for p in run.glob(".*")] == []
    done = len([record for record in read_metrics(run / "metrics.jsonl") if "loss" in record])
    last = done + (async_save and done == 6)  # the disk may be full when the last line is written, too, and tear it
    assert last == 7 if then == "continue" else done == 4 if not async_save else 4 <= done <= 7
