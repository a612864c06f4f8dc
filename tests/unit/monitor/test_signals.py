"""What a signal does to a run, before its first step and after it, and what the end of torchrun does.

Each case is a process of its own that needs no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_mm.monitor.endings import ended_early, nothing_is_left
from tests.support.runs import run_of

BEGIN = """
import os, signal, sys, threading, time
from mindspeed_mm.monitor.signals import Interrupted, StopSignal

def send(name, pause=0.0):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(pause)

with StopSignal(same_seconds=0.2, patience_seconds=0.3, look_seconds=0.05) as stop:
    stop.begin("run")
"""
#: the main thread is where Python runs no handlers; a signal finds another thread
STUCK = """
    import ctypes
    signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)
    threading.Timer(0.1, send, [{name!r}]).start()
    ctypes.CDLL(None).sleep(10)
    print("too late")
"""
#: starts two ranks
LAUNCHER = """
import os, subprocess, sys, time
for number in (0, 1):
    os.environ.update(RANK=str(number), TORCHELASTIC_ERROR_FILE=os.path.join(sys.argv[1], str(number), "error.json"))
    subprocess.Popen([sys.executable, "-c", sys.argv[2]])
time.sleep(20)
"""


def run(body: str, folder: Path | None = None, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, as a rank of a launch if there is a folder of one."""
    return subprocess.run(
        [sys.executable, "-c", body], env=environment(folder, rank), capture_output=True, text=True, timeout=20
    )


def environment(folder: Path | None, rank: int) -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    found |= {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "RANK": str(rank)}
    found["LOCAL_RANK"] = str(rank)
    if folder is not None:
        mine = folder / str(rank)
        mine.mkdir(exist_ok=True)
        found |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(mine / "error.json")}
    return found


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_the_first_signal_asks_for_a_checkpoint(name: str) -> None:
    """What comes at the same time is the same request: torchrun sends on what a scheduler has sent to every process."""
    done = run(f"{BEGIN}    send('{name}'); send('SIGTERM', 0.1)\n    print(signal.Signals(stop.received).name)\n")
    assert (done.returncode, done.stdout) == (0, f"{name}\n")
    assert done.stderr.count("\n") == 2 and f"{name}" in done.stderr and "checkpoint is saved" in done.stderr


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_the_second_one_quits_though_the_main_thread_waits(second: str) -> None:
    """A thread that is stuck outside of Python runs no handlers."""
    done = run(f"{BEGIN}    send('SIGINT', 0.4)\n{STUCK.format(name=second)}")
    assert done.returncode == 128 + getattr(signal, second) and done.stdout == ""
    assert "once more: ended at once" in done.stderr and "--load 'run' goes on" in done.stderr


def test_warnings_of_a_scheduler_never_quit() -> None:
    done = run(f"{BEGIN}    send('SIGUSR1', 0.3); send('SIGUSR1', 0.1); send('SIGTERM', 0.1); print('saves')\n")
    assert (done.returncode, done.stdout) == (0, "saves\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_before_the_first_step_a_signal_unwinds(name: str) -> None:
    begin = BEGIN.replace('    stop.begin("run")\n', "")
    tried = f"    try: send('{name}', 5)\n    except Interrupted as error: print(error.number); raise SystemExit(7)\n"
    done = run(begin + tried)
    assert (done.returncode, done.stdout) == (7, f"{getattr(signal, name):d}\n")
    done = run(begin + STUCK.format(name=name))
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr.strip().endswith("ended before the first step; there is nothing to save")


def test_handlers_and_what_was_ignored_are_left_as_they_were() -> None:
    body = BEGIN.replace("with Stop", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith Stop")
    body += "    send('SIGHUP', 0.1); assert not stop.requested\n"
    body += "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.set_wakeup_fd(-1) == -1\n"
    assert run(body).returncode == 0


def test_a_forked_child_has_signals_of_its_own() -> None:
    """A signal to it is none to the run; the pipe that its parent hears with is shared."""
    body = f"{BEGIN}    pid = os.fork()\n    if not pid: send('SIGTERM', 0.1); os._exit(0)\n"
    done = run(body + "    os.waitpid(pid, 0); time.sleep(0.1); print(stop.requested, stop._first)\n")
    assert done.stdout == "False None\n" and done.stderr == ""
    body = body.replace('    stop.begin("run")\n', "") + "    print(os.waitpid(pid, 0)[1], stop.requested)\n"
    assert run(body).stdout == f"{int(signal.SIGTERM)} False\n"


def test_a_forked_child_doesnt_hold_up_the_end() -> None:
    """A loader's workers may still run when an error ends the run."""
    body = f"{BEGIN}    pid = os.fork()\n    if not pid: time.sleep(9)\n    began = time.monotonic()\n"
    done = run(body + "print(time.monotonic() - began < 1)\nos.kill(pid, signal.SIGKILL)\n")
    assert done.stdout == "True\n"


def test_a_rank_whose_launcher_is_gone_ends(tmp_path: Path) -> None:
    """The launcher is killed; one rank of two says so, long before they would end."""
    rank = BEGIN + "    print(os.getpid(), flush=True); time.sleep(15); print('trained on', flush=True)\n"
    env = environment(tmp_path, 0)
    environment(tmp_path, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), rank],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    began = time.monotonic()
    output, errors = process.stdout.read(), process.stderr.read()  # until nobody has them open any more
    process.wait()
    assert time.monotonic() - began < 12 and output == ""
    assert errors.count("torchrun") == 1 and f"process {process.pid}" in errors
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


def test_a_rank_that_is_about_to_save_may_do_so_without_its_launcher(tmp_path: Path) -> None:
    """A scheduler's SIGUSR1 ends torchrun, which doesn't know it, and asks its ranks to save."""
    body = BEGIN.replace("look_seconds=0.05", "look_seconds=0.05, orphan_seconds=0.5").replace(
        '    stop.begin("run")\n', '    stop.begin("run"); send("SIGUSR1"); stop._parent = 0\n'
    )
    done = run(f"{body}    time.sleep(0.3); print('saved', flush=True); time.sleep(5)\n", tmp_path)
    assert (done.returncode, done.stdout) == (1, "saved\n") and "has ended without ending it" in done.stderr


def test_torchrun_ends_the_peers_of_a_failed_rank_without_a_word(tmp_path: Path) -> None:
    """A step can't end any more where a rank is missing: nothing is waited for, and nothing said."""
    (tmp_path / "first_failure").write_text("rank 1: DataError: row 3")
    done = run(f"{BEGIN}    send('SIGTERM', 5); print('too late')\n", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


def test_ctrl_c_while_modules_are_imported_is_one_line() -> None:
    done = run("import mindspeed_mm.utils.interrupted\nraise KeyboardInterrupt")
    assert done.returncode == -signal.SIGINT  # a shell says 130
    assert done.stderr.strip() == "interrupted by SIGINT (Ctrl-C)"


def test_last_lines_say_how_to_go_on(tmp_path: Path) -> None:
    run_folder = str(tmp_path)
    run = run_of(train_iters=9, save=run_folder, load=run_folder)
    line = f"SIGTERM: ended after iteration 4 of 9; its checkpoint is in '{tmp_path}', and the same command"
    assert ended_early("SIGTERM", 4, run) == f"{line} goes on from it"
    run = run_of(train_iters=9, save=run_folder)
    assert ended_early("SIGTERM", 4, run).endswith(f"the same command with --load '{tmp_path}' goes on from it")
    run = run_of(train_iters=9)
    assert ended_early("SIGTERM", 4, run).endswith("nothing was saved, as there is no --save")
    assert "has done 9 iterations, and --train-iters 9 counts them too; raise --train-iters above 9 to" in (
        nothing_is_left(run, 9, None)
    )
    epochs = run_of(train_epochs=3.0).with_train_iters(9)
    assert "--train-epochs 3 (9 iterations) counts them too; raise --train-epochs above 3 to" in (
        nothing_is_left(epochs, 9, 3.0)
    )
    samples = run_of(train_samples=38, global_batch_size=4)
    assert "--train-samples 38 (9 iterations) counts them too; raise --train-samples to 40 or more" in (
        nothing_is_left(samples, 9, None)
    )
