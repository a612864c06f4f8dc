"""evaluate_vlm.py on tiny files of the benchmarks and on rows of one's own: predictions, scores, published launches."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.tasks.evaluation.command import main
from mindspeed_mm.tasks.evaluation.labelled_diagrams import draw_letters
from mindspeed_mm.tasks.evaluation.scores import Target, find_score
from mindspeed_mm.tasks.inference import command as inference
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from tests.support import benchmark_files as files
from tests.support.answers import NEW_TOKENS, AnswerCase, transformers_answers
from tests.support.workers import RankPool
from tests.unit.configs.published_vlm import ELSEWHERE, published_model

CHOOSE = "Answer with the option's letter from the given choices directly."
WORD = "Answer the question with a single word."
PHRASE = "Answer the question using a single word or phrase."
OPTIONS = ("red", "green", "blue", "a line")
#: keys of published files of inference
NOT_ITS_OWN = ("image_path", "prompts", "pipeline_class", "use_custom_prompt")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AnswerCase:
    found = AnswerCase("qwen2_5_vl", tmp_path_factory.mktemp("evaluate"))
    for number in (*range(files.ROWS), 7):
        (found.data.parent / f"p{number}.png").write_bytes(files.picture(number))
    of_authors = files.ai2d_folder(tmp_path_factory.mktemp("ai2d"))
    drawn = draw_letters(of_authors / "images" / "0.png", of_authors / "annotations" / "0.png.json")
    (found.data.parent / "p10.png").write_bytes(drawn)
    return found


def words_of(case: AnswerCase, output: Path, **flags: object) -> list[str]:
    """The words of a launch."""
    given = {"load": case.hf_dir, "output": output, "max_new_tokens": NEW_TOKENS, **flags}
    return [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def by_transformers(case: AnswerCase, texts: list[str], pictures: dict[int, list[int]] | None = None) -> list[str]:
    """transformers' answers to the benchmarks' own prompts; row N has picture N unless `pictures` states others."""
    asked, answer = copy.copy(case), {"role": "assistant", "content": ""}
    shown = [(pictures or {}).get(number, [number]) for number in range(len(texts))]
    asked.rows = [
        {"messages": [{"role": "user", "content": text}, answer], "images": [f"p{number}.png" for number in numbers]}
        for text, numbers in zip(texts, shown, strict=True)
    ]
    return transformers_answers(asked)


def of_ai2d(n: int, options: int = 4) -> str:
    lettered = map(". ".join, zip("ABCD"[:options], OPTIONS, strict=False))
    return "\n".join([f"<image>{files.question(n)}", *lettered, CHOOSE])


def of_mmmu(n: int, options: int) -> str:
    text = "<image> and <image>: what is it?" if n == 1 else f"{files.question(n)} <image>"
    if not options:
        return f"{text}\n\n{PHRASE}"
    return "\n".join([text, *map(". ".join, zip("ABCD"[:options], OPTIONS, strict=False)), "", CHOOSE])


TWO = {1: [1, 7]}
OF_AUTHORS = [of_ai2d(n, 3 if n == 3 else 4) for n in range(5)]
LAYOUTS: list[tuple[str, Callable[[Path], Path], list[str], dict[int, list[int]], list[int]]] = [
    # name, file, prompts, pictures, order of the rows
    ("ai2d_test", files.ai2d_tsv, [of_ai2d(n) for n in range(5)], {4: [0]}, [0, 1, 2, 3, 4]),
    ("ai2d", files.ai2d_parquet, [of_ai2d(n) for n in range(5)], {4: [0]}, [0, 1, 2, 3, 4]),
    ("ai2d", files.ai2d_folder, OF_AUTHORS, {1: [10], 2: [1], 3: [2], 4: [3]}, [0, 1, 2, 3, 4]),
    ("chartqa_test", files.chartqa_tsv, [f"<image>{files.question(n)}\n{WORD}" for n in range(5)], {}, [0, 1, 2, 3, 4]),
    ("chartqa", files.chartqa_json, [f"<image>{files.question(n)}\n{WORD}" for n in range(5)], {}, [0, 2, 4, 1, 3]),
    ("docvqa_val", files.docvqa_tsv, [f"<image>{files.question(n)}\n{PHRASE}" for n in range(5)], {}, [0, 1, 2, 3, 4]),
    ("docvqa", files.docvqa_json, [f"<image>{files.question(n)}\n{PHRASE}" for n in range(5)], {}, [0, 1, 2, 3, 4]),
    ("mmmu", files.mmmu_parquet, [of_mmmu(n, 0 if n == 4 else 4) for n in range(5)], TWO, [2, 3, 0, 1, 4]),
    ("mmmu_dev_val", files.mmmu_tsv, [of_mmmu(n, 3) for n in range(5)], TWO, [0, 1, 2, 3, 4]),
]
ALWAYS = ("ai2d_test", "chartqa", "docvqa", "mmmu")


@pytest.mark.parametrize(
    ("name", "make", "prompts", "pictures", "order"),
    [pytest.param(*row, marks=() if row[0] in ALWAYS else pytest.mark.full, id=row[0]) for row in LAYOUTS],
)
def test_rows_are_asked_as_published(
    case: AnswerCase,
    name: str,
    make: Callable[[Path], Path],
    prompts: list[str],
    pictures: dict[int, list[int]],
    order: list[int],
    tmp_path: Path,
) -> None:
    """Each layout: the predictions are transformers' own answers to the benchmark's prompt with the row's pictures."""
    (tmp_path / "data").mkdir()
    path = make(tmp_path / "data")
    main(words_of(case, tmp_path / "out", benchmark=name, data_path=path, batch_size=2))
    expected = by_transformers(case, prompts, pictures)
    assert [line["answer"] for line in lines_of(tmp_path / "out" / "predictions.jsonl")] == [
        expected[number] for number in order
    ]
    scored = lines_of(tmp_path / "out" / "scores.jsonl")
    assert [line["prediction"] for line in scored] == [expected[number].strip() for number in order]
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["rows"] == 5 and report["score"] == sum(line["score"] for line in scored) / 5


def test_categories_and_the_table(case: AnswerCase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that are the references: their scores by category and in all, on the console and as JSON."""
    data = files.mmmu_tsv(tmp_path)
    words = words_of(case, tmp_path / "out", benchmark="mmmu", data_path=data)
    main(words)
    predictions = tmp_path / "out" / "predictions.jsonl"
    lines = lines_of(predictions)
    for line, answer in zip(lines, ["A", "(B)", "C", "B.", "I say C"], strict=True):
        line["answer"] = answer
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    main(words)  # everything is answered: scores alone
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (report["benchmark"], report["metric"], report["unit"], report["score"]) == (
        "mmmu",
        "accuracy",
        "fraction",
        0.6,
    )
    assert report["categories"] == {
        "domain": {
            "Art and Design": {"score": 1.0, "rows": 1},
            "Humanities and Social Science": {"score": 0.0, "rows": 1},
            "Science": {"score": 2 / 3, "rows": 3},
        },
        "split": {"dev": {"score": 1.0, "rows": 1}, "validation": {"score": 0.5, "rows": 4}},
        "subject": {
            "Art_Theory": {"score": 1.0, "rows": 1},
            "History": {"score": 0.0, "rows": 1},
            "Math": {"score": 2 / 3, "rows": 3},
        },
    }
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mmmu", "accuracy", "rows"] in table
    assert ["subject:", "Math", "0.6667", "3"] in table and ["all", "0.6000", "5"] in table


def test_rows_of_ones_own(case: AnswerCase, ranks2: RankPool, tmp_path: Path) -> None:
    """The last answer is the reference; each score; a column's values get scores of their own; a process that has no
    batch waits for the other one."""
    greedy = by_transformers(case, ["<image>what", "<image>where"])
    rows = [
        {"messages": [{"role": "user", "content": f"<image>{text}"}, {"role": "assistant", "content": reference}]}
        | {"images": [f"p{n}.png"], "kind": f"k{n}"}
        for n, (text, reference) in enumerate([("what", f" {greedy[0].strip()}\n"), ("where", "elsewhere")])
    ]
    data = case.data.parent / "own.json"
    data.write_text(json.dumps(rows))
    main(words_of(case, tmp_path / "out", data_path=data, category="kind"))
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["score"] == 0.5 and report["benchmark"] == "own.json"
    assert {name: found["score"] for name, found in report["categories"]["kind"].items()} == {"k0": 1.0, "k1": 0.0}
    ranks2.run(main, words_of(case, tmp_path / "two", data_path=data, category="kind", batch_size=2))
    for name in ("predictions.jsonl", "scores.jsonl", "results.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    main(words_of(case, tmp_path / "wer", data_path=data, score="wer", limit=1))
    report = json.loads((tmp_path / "wer" / "results.json").read_text())
    assert report["score"] == 0.0 and (report["unit"], report["rows"]) == ("percent", 1)
    with pytest.raises(BadSample, match=r"own\.json, row 1: no column 'knd' \(--category\).*did you mean 'kind'\?"):
        main(words_of(case, tmp_path / "x", data_path=data, category="knd"))
    with pytest.raises(BadSample, match=r"own\.json, row 1: the question has no options; expected lines 'A\. …'"):
        main(words_of(case, tmp_path / "x", data_path=data, score="multiple_choice"))
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "column", "flags"),
    [
        ("whisper", "audios", {"score": "wer", "language": "en"}),
        ("qwen2_audio", "audios", {"score": "wer", "language": "zh"}),
        ("qwen2_5_vl", "videos", {"score": "wer"}),
    ],
)
def test_speech_and_videos_of_ones_own(family: str, column: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Predictions are transformers' answers; the first one is the reference, the others are scored by the language."""
    whole = AnswerCase(family, tmp_path / "case")
    case = AnswerCase.of(whole, [row for row in whole.rows if row.get(column)])
    expected = [answer.strip() for answer in transformers_answers(case)]
    rows = copy.deepcopy(case.rows)
    for row, reference in zip(rows, [expected[0], *(["it's 23%"] * (len(rows) - 1))], strict=True):
        row["messages"][-1]["content"] = reference
    data = case.data.parent / "own.json"
    data.write_text(json.dumps(rows))
    main(words_of(case, tmp_path / "out", data_path=data, batch_size=2, **flags))
    lines = lines_of(tmp_path / "out" / "scores.jsonl")
    assert len(rows) > 1 and [line["prediction"] for line in lines] == expected
    score = find_score("wer", flags.get("language"))
    scored = [score.of_row(line["prediction"], Target(tuple(line["references"])), random.Random(0)) for line in lines]
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert scored[0][0] == 0 and (report["score"], report.get("language")) == (
        score.total(scored),
        flags.get("language"),
    )
    words = {"en": 3, "zh": 9, None: 3}[flags.get("language")]  # it is 23; its百分之二十三; it s 23
    assert {below for _, below in scored[1:]} == {words}


def test_faults_are_sentences_before_a_model_is_loaded(case: AnswerCase, tmp_path: Path) -> None:
    tsv = files.chartqa_tsv(tmp_path)

    def message(kind: type[Exception], **flags: object) -> str:
        with pytest.raises(kind) as caught:
            main(words_of(case, tmp_path / "x", **flags))
        return str(caught.value)

    assert "'chatqa'; expected one of ai2d, ai2d_test, chartqa" in message(ConfigError, benchmark="chatqa")
    assert "did you mean 'chartqa'" in message(ConfigError, benchmark="chatqa")
    assert "--data-path is missing: the file or folder of mmmu" in message(ConfigError, benchmark="mmmu")
    assert "--score anls: it is for rows of your own" in message(
        ConfigError, benchmark="chartqa", score="anls", data_path=tsv
    )
    assert "--language en: it is for rows of your own" in message(
        ConfigError, benchmark="chartqa", language="en", data_path=tsv
    )
    assert "--language zh: it is the language of transcripts, for wer; the score is anls" in message(
        ConfigError, score="anls", language="zh", data_path=case.data
    )
    assert "ChartQA_TEST.tsv" in message(ConfigError, benchmark="ai2d", data_path=tmp_path / "ChartQA_TES.tsv")
    found = message(DataError, benchmark="ai2d", data_path=tsv)
    assert (
        "ChartQA_TEST.tsv: no layout of ai2d: 'options' missing" in found and "found the columns index, image" in found
    )
    found = message(DataError, benchmark="docvqa", data_path=tmp_path)
    assert "has no file val*{" in found and "it holds ChartQA_TEST.tsv" in found
    rows = [{"index": 0, "image": "!" * 70, "question": "q", "answer": "1"}]
    broken = files.write_tsv(tmp_path / "broken.tsv", rows)
    assert "broken.tsv, line 2 (row 1): 'image' begins with" in message(
        BadSample, benchmark="chartqa", data_path=broken
    )
    broken = files.write_tsv(tmp_path / "broken.tsv", [{**rows[0], "image": "7"}])
    assert "'image' is '7'; expected a picture in base64, or the index" in message(
        BadSample, benchmark="chartqa", data_path=broken
    )
    wrong = files.write_tsv(tmp_path / "wrong.tsv", [{**rows[0], "A": "x", "B": "y", "answer": "E"}])
    assert "wrong.tsv, line 2 (row 1): 'answer' is 'E'; expected the letter of one of its 2 options" in message(
        BadSample, benchmark="ai2d", data_path=wrong
    )
    assert "--prompt belongs to inference_vlm.py" in message(ConfigError, prompt="x")
    (tmp_path / "evaluate.json").write_text(json.dumps({"evaluation_dataset": "ai2d_test", "dataset_path": str(tsv)}))
    with pytest.raises(ConfigError, match="'dataset_path', 'evaluation_dataset': this file describes a benchmark"):
        inference.main(["--load", str(case.hf_dir), "--mm-model", str(tmp_path / "evaluate.json")])


#: words of the published launches, without the model and its file
PUBLISHED = (
    "--use-mcore-models --tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 1 "
    "--tokenizer-type NullTokenizer --vocab-size 152064 --seq-length 1024 --make-vocab-size-divisible-by 1 "
    "--normalization RMSNorm --swiglu --seed 42 --vocab-size 1 --distributed-timeout-minutes 1000 "
    "--use-flash-attn --no-load-optim --no-load-rng --log-interval 1 --save-interval 10000 --eval-interval 10000 "
    "--eval-iters 5000 --distributed-backend gloo"
)


def published_file(case: AnswerCase, data: Path, output: Path) -> dict[str, Any]:
    """The published file of 7B with the numbers of a tiny model; its pictures are not scaled up."""
    config = json.loads((case.hf_dir / "config.json").read_text())
    text, tower = config["text_config"], config["vision_config"]
    content = published_model("7b", **{key: value for key, value in ELSEWHERE.items() if key not in NOT_ITS_OWN})
    content["text_decoder"] |= {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text["intermediate_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"],
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "mrope_section": text["rope_parameters"]["mrope_section"],
        "layernorm_epsilon": text["rms_norm_eps"],
    }
    content["image_encoder"]["vision_encoder"] |= {
        "num_layers": tower["depth"],
        "hidden_size": tower["hidden_size"],
        "ffn_hidden_size": tower["intermediate_size"],
        "intermediate_size": tower["intermediate_size"],
        "num_attention_heads": tower["num_heads"],
        "llm_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": tower["fullatt_block_indexes"],
        "window_attn_size": tower["window_size"],
        "tokens_per_second": tower["tokens_per_second"],
    }
    content["image_encoder"]["vision_projector"] |= {
        "input_size": tower["hidden_size"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": 4 * tower["hidden_size"],
    }
    content["generation_config"] |= {"max_new_tokens": NEW_TOKENS, "temperature": 0.1, "eos_token_id": None}
    content["tokenizer"] |= {"from_pretrained": str(case.hf_dir)}
    for name in ("vision_start_token_id", "image_token_id", "video_token_id"):
        content.pop(name, None)
    return content | {
        "model_id": "Qwen2VlPipeline",
        "dtype": "fp32",
        "min_pixels": 3136,
        "dataset_path": str(data),
        "result_output_path": str(output),
    }


def test_published_launches_evaluate(case: AnswerCase, ranks4: RankPool, tmp_path: Path) -> None:
    """The 7B launch by itself, and the 72B one on four processes whose stages become shards: the same bytes, which are
    transformers' answers, drawn from the one likeliest token."""
    data, expected = files.ai2d_tsv(tmp_path), by_transformers(case, [of_ai2d(n) for n in range(5)], {4: [0]})
    words = [*PUBLISHED.split(), "--load", str(case.hf_dir), "--mm-model", str(tmp_path / "evaluate.json")]
    (tmp_path / "evaluate.json").write_text(json.dumps(published_file(case, data, tmp_path / "7b")))
    main([*words, "--pipeline-model-parallel-size", "1"])
    lines = lines_of(tmp_path / "7b" / "predictions.jsonl")
    assert [line["answer"] for line in lines] == expected
    (tmp_path / "evaluate.json").write_text(json.dumps(published_file(case, data, tmp_path / "72b")))
    ranks4.run(main, [*words, "--pipeline-model-parallel-size", "4", "--variable-seq-lengths"])
    for name in ("predictions.jsonl", "scores.jsonl", "results.json"):
        assert (tmp_path / "72b" / name).read_bytes() == (tmp_path / "7b" / name).read_bytes()
