"""Answer requests into a file: the processes share them, and an interrupted launch is continued."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed_mm.data.conversation.encode import TokenSample
from mindspeed_mm.tasks.inference.answers_file import AnswersFile, Line
from mindspeed_mm.tasks.inference.describe import AnswerRun
from mindspeed_mm.tasks.inference.generation import Answer, AnswerGenerator
from mindspeed_mm.tasks.inference.plan import PlannedBatch, plan_batches, share, share_in_lockstep
from mindspeed_mm.tasks.inference.processes import Processes, join_processes
from mindspeed_mm.tasks.inference.prompts import PromptEncoder, PromptSize
from mindspeed_mm.tasks.inference.requests import AnswerRequest, RowRequests, prompt_requests
from mindspeed_mm.tasks.inference.session import check_length, open_generator, open_prompts, positions_of
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.log import info_rank0, notice

_WINDOW = 1024  # requests that batches are planned of at a time, the same for any number of processes


class Requests(Protocol):
    """Requests by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> AnswerRequest: ...


class FileRequests(Requests, Protocol):
    """Requests that come from files."""

    paths: tuple[str, ...]


def answer_into_file(run: AnswerRun, rows: FileRequests | None = None) -> list[Line]:
    """Answer all requests of a launch that its file has no answer of; a collective of its processes.

    Args:
        run: the launch.
        rows: what is answered; None: the launch's rows or prompts.

    Returns:
        the lines of the file, in the order of the requests (on rank 0; elsewhere none).

    Raises:
        ConfigError, CheckpointError: the launch can't be carried out.
        DataError: a row can't be used; what was answered before is kept.
    """
    assert run.output is not None, "answers go to a file"
    if rows is None and run.prompts is None:
        rows = RowRequests(run.param)
    requests: Requests = prompt_requests(run.prompts or (), run.system) if rows is None else rows
    prompts = open_prompts(run)
    processes = join_processes(run)
    file = AnswersFile(run.output, processes.rank)
    begun = file.begin(settings_of(run, requests, rows), overwrite=run.overwrite) if processes.rank == 0 else None
    done = processes.gather(begun)[0] or set()
    info_rank0(f"{len(requests)} requests, {len(requests) - len(done)} to be answered")
    session = _Session(run, requests, prompts, processes, file)
    file.open()
    try:
        for first in range(0, len(requests), _WINDOW):
            window = range(first, min(first + _WINDOW, len(requests)))
            if not done.issuperset(window):
                session.answer_window(window, done)
    finally:
        file.close()
    processes.gather(None)  # all have closed their parts
    lines = file.finish(len(requests)) if processes.rank == 0 else []
    if lines:
        left_out = sum("error" in line for line in lines)
        info_rank0(f"{len(lines)} answers in '{run.output}'" + (f", {left_out} of them errors" if left_out else ""))
    return lines


class _Session:
    """Answers windows of requests; the model is loaded when the first window has been read without an error."""

    def __init__(
        self, run: AnswerRun, requests: Requests, prompts: PromptEncoder, processes: Processes, file: AnswersFile
    ) -> None:
        self._run, self._requests, self._prompts = run, requests, prompts
        self._processes, self._file = processes, file
        self._skips = run.param.basic_parameters.on_bad_sample == "skip"
        self._positions = positions_of(run)
        self._generator: AnswerGenerator | None = None
        self._began = time.monotonic()
        self._written = 0

    def answer_window(self, window: range, done: set[int]) -> None:
        """Answer the requests of a window that have no answer; batches are the same as if none had one."""
        sizes, faults = self._measure(window)
        self._file.write([self._fault(index, text) for index, text in faults.items() if index not in done])
        most = self._run.settings.values.get("max_new_tokens", 0)
        longest = None if self._positions is None else self._positions - most
        settings = self._run.settings
        planned = plan_batches(sizes, settings.rows_at_once, answer=settings.foreseen_tokens, longest=longest)
        batches = [batch for batch in planned if not done.issuperset(batch)]
        rank, ranks = self._processes.rank, self._processes.size
        if self._run.sharding is None:
            mine = share(batches, rank, ranks)
        else:
            mine = share_in_lockstep(batches, sizes, rank, ranks)
        if batches and self._generator is None:
            self._generator = open_generator(self._run, self._prompts)
        for number, (batch, requests, samples) in enumerate(self._encoded(mine), start=1):
            self._answer(batch, requests, samples, done)
            info_rank0(f"{number} of {len(mine)} batches, {self._speed()}")

    def _measure(self, window: range) -> tuple[dict[int, PromptSize], dict[int, str]]:
        """Sizes of all requests of a window, each process its share; and own requests that can't be answered."""
        mine: dict[int, PromptSize] = {}
        faults: dict[int, str] = {}
        for index in window[self._processes.rank :: self._processes.size]:
            try:
                request = self._requests[index]
                size = self._prompts.measure(request)
                check_length(request, size, self._positions)
                mine[index] = size
            except BadSample as error:
                if not self._skips:
                    raise
                faults[index] = str(error)
        return {index: size for part in self._processes.gather(mine) for index, size in part.items()}, faults

    def _encoded(
        self, batches: Sequence[PlannedBatch]
    ) -> Iterator[tuple[PlannedBatch, list[AnswerRequest], list[TokenSample]]]:
        """Encode batches, each while the one before it is answered."""
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
            waiting = [pool.submit(self._encode, batch) for batch in batches[:1]]
            for number, batch in enumerate(batches, start=1):
                requests, samples = waiting.pop().result()
                waiting += [pool.submit(self._encode, following) for following in batches[number : number + 1]]
                yield batch, requests, samples

    def _encode(self, batch: PlannedBatch) -> tuple[list[AnswerRequest], list[TokenSample]]:
        requests = [self._requests[index] for index in batch.indices]
        return requests, [self._prompts.encode(request) for request in requests]

    def _answer(
        self, batch: PlannedBatch, requests: list[AnswerRequest], samples: list[TokenSample], done: set[int]
    ) -> None:
        answers = self._answers(requests, samples)
        if not batch.counts:
            return
        lines = [line_of(request, answer) for request, answer in zip(requests, answers, strict=True)]
        self._file.write([line for line in lines if line["index"] not in done])
        self._written += len(lines)

    def _answers(self, requests: list[AnswerRequest], samples: list[TokenSample]) -> list[Answer]:
        """Answer a batch; where it doesn't fit into the device's memory, its halves one after the other."""
        assert self._generator is not None, "the model is loaded before the first batch"
        try:
            return self._generator.answer(requests, samples)
        except torch.OutOfMemoryError:
            if len(requests) == 1 or self._run.sharding is not None:  # sharded parameters need all processes alike
                raise
        half = len(requests) // 2
        notice(f"{len(requests)} rows at once take more memory than the device has: they are answered in two halves")
        return self._answers(requests[:half], samples[:half]) + self._answers(requests[half:], samples[half:])

    def _fault(self, index: int, text: str) -> Line:
        return {"index": index, "answer": None, "error": text}

    def _speed(self) -> str:
        return f"{self._written / max(time.monotonic() - self._began, 1e-9):.2f} answers/s"


def line_of(request: AnswerRequest, answer: Answer) -> Line:
    """Return the line of an answer: index, id, answer, reference, finish, and the lengths of prompt and answer."""
    line: Line = {"index": request.index}
    if request.id is not None:
        line["id"] = request.id
    line["answer"] = answer.text
    if request.reference is not None:
        line["reference"] = request.reference
    return {
        **line,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
    }


def settings_of(run: AnswerRun, requests: Requests, rows: FileRequests | None) -> dict[str, Any]:
    """Return what determines the answers of a launch, as JSON; the number of processes doesn't."""
    options = run.param.preprocess_parameters
    basic = run.param.basic_parameters
    source = run.source
    settings: dict[str, Any] = {
        "model": _files_of(source.weights),
        "adapter": _files_of(source.adapter) if source.adapter is not None else None,
        "averaged": run.averaged,
        "merged": run.merge_adapter,
        "dtype": run.dtype,
        "sharded": run.sharding is not None,
        "generation": dict(run.settings.values),
        "stop": list(run.settings.stop),
        "seed": run.settings.seed if run.settings.draws_tokens else None,
        "batch_size": run.settings.rows_at_once,
        "preprocessing": options.model_dump(exclude={"media_timeout", "trust_remote_code"}),
        "template": basic.template,
        "enable_thinking": basic.enable_thinking,
        "system": basic.default_system,
        "requests": len(requests),
    }
    if rows is not None:
        settings["rows"] = {str(Path(path).absolute()): file_digest(Path(path)) for path in rows.paths}
    elif run.prompts is not None:
        settings["prompts"] = [asdict(prompt) for prompt in run.prompts]
    return settings


def _files_of(directory: Path) -> dict[str, Any]:
    """A directory's weight files, with their sizes in bytes and when they were written."""
    files = sorted(f for f in directory.iterdir() if f.suffix in (".safetensors", ".bin", ".distcp"))
    return {"directory": str(directory.absolute()), "files": {f.name: _facts(f) for f in files}}


def _facts(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
