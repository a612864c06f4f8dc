"""One rank of a machine says in full why a launch ends, the others in short or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.launch import errors_as_sentences
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.first_failure import claim, first_report, report_failure


@pytest.fixture
def as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Become a rank of one launch."""

    def become(rank: int) -> Path:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        return tmp_path / str(rank) / "error.json"

    return become


def test_the_first_rank_tells_all_the_others_point(as_rank, capfd: pytest.CaptureFixture[str]) -> None:
    report = as_rank(2)
    assert first_report() is None and report_failure("DataError: row 3 \udc80")
    assert json.loads(report.read_text())["message"]["message"] == "DataError: row 3 \\udc80"
    as_rank(0)
    assert not report_failure("DataError: row 3 \udc80")
    report = as_rank(1)
    assert not report_failure("RuntimeError: Connection\nclosed by peer" + "." * 900)
    assert json.loads(report.read_text())["message"]["message"] == "rank 2: DataError: row 3 \\udc80"
    errors = capfd.readouterr().err
    assert errors.startswith(
        "\nDataError: row 3 \\udc80\nrank 1 ended after rank 2 had: RuntimeError: Connection closed by peer..."
    )
    assert errors.count("\n") == 3 and len(errors) < 450


def test_without_a_launcher_or_its_folder_each_tells(
    as_rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert claim("a") is None and claim("b") is None
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert report_failure("a") and report_failure("b")
    assert capfd.readouterr().err == "\na\n\nb\n"


def test_other_exceptions_keep_their_traceback_on_the_first_rank_only(
    as_rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    as_rank(1)
    with pytest.raises(ZeroDivisionError), errors_as_sentences():
        raise ZeroDivisionError("mine")
    as_rank(0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="1"), errors_as_sentences():
        raise RuntimeError("Connection closed by peer\nat some length")
    assert capfd.readouterr().err == "rank 0 ended after rank 1 had: RuntimeError: Connection closed by peer\n"


def test_one_rank_alone_says_what_followed(as_rank, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(5):
        as_rank(rank)
        report_failure(f"DataError: row {rank}")
    assert capfd.readouterr().err == "\nDataError: row 0\nrank 1 ended after rank 0 had: DataError: row 1\n"


def test_a_lost_rank_says_nothing_after_the_failure(
    as_rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(number: int) -> None:
        raise SystemExit(number)

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("mindspeed_mm.launch._outlive_peers", lambda: None)
    as_rank(1)
    report_failure("DataError: row 3")
    report = as_rank(0)
    with pytest.raises(SystemExit, match="1"), errors_as_sentences():
        raise DistNetworkError("closed")
    assert capfd.readouterr().err == "\nDataError: row 3\n"
    assert json.loads(report.read_text())["message"]["message"] == "rank 1: DataError: row 3"


class DistNetworkError(RuntimeError):
    """By its name one of torch's, which nothing here imports."""


GLOO = "[/w/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:6: Connection reset by peer. This is typically …"
LOST = "this rank lost another one, which has ended, or answers no more"
ABOVE = "what ended it is above, or in the log of its machine"


@pytest.mark.parametrize(
    "error, status, line",
    [
        (DataError("row 3"), 1, "DataError: row 3"),
        (
            RuntimeError(GLOO),
            1,
            f"{LOST} (RuntimeError: Read error [127.0.0.1]:6: Connection reset by peer); {ABOVE}",
        ),
        (DistNetworkError("closed"), 1, f"{LOST} (DistNetworkError: closed); {ABOVE}"),
        (KeyboardInterrupt(), 130, "interrupted by SIGINT (Ctrl-C)"),
    ],
    ids=["a sentence", "gloo", "torch.distributed", "Ctrl-C"],
)
def test_exit_status(
    error: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def leave(number: int) -> None:
        raise SystemExit(number)

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("mindspeed_mm.launch._outlive_peers", lambda: None)
    with pytest.raises(SystemExit, match=str(status)), errors_as_sentences():
        raise error
    assert capfd.readouterr().err == f"\n{line}\n"
