"""The options of evaluate_vlm.py beside those of inference_vlm.py: its flags, and the keys of a published file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mindspeed_mm.configs.eval_metrics import AnswerScoreName, TranscriptLanguage
from mindspeed_mm.configs.flags.spec import flag
from mindspeed_mm.configs.vlm_inference import AnswerFlags


@dataclass
class BenchmarkFlags(AnswerFlags):
    """Evaluating answers."""

    benchmark: Annotated[
        str | None, flag("ai2d, chartqa, docvqa or mmmu; absent = model.json's, else the rows are your own")
    ] = None
    data_path: Annotated[
        str | None, flag("file or folder of the benchmark, or file of your own rows; precedes files' keys", path="file")
    ] = None
    score: Annotated[AnswerScoreName | None, flag("of your own rows; absent = exact_match")] = None
    language: Annotated[
        TranscriptLanguage | None,
        flag("of your own rows' transcripts, for wer: how words are written in one way; absent = as in any language"),
    ] = None
    category: Annotated[str | None, flag("column of your own rows; its values get scores of their own")] = None
    limit: Annotated[int | None, flag("rows that are evaluated, from the first on; absent = all", minimum=1)] = None
    output: Annotated[
        str | None,
        flag("folder of results.json, scores.jsonl and predictions.jsonl; absent = model.json's", path="output"),
    ] = None
