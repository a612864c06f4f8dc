"""Check what the documents tell users to write and to run: README.md, README.zh.md and docs/*.md.

    python scripts/check_docs.py

Snippets of JSON and YAML must load through the schemas, Python must compile and its imports of this package exist,
commands must be of programs and files that there are, with flags that the program knows. Links and paths of the
repository that the text names must lead somewhere, and so must the flags that it names. A Chinese page has the
sections, the snippets and the tables of the English one. Fences without a language show what is printed and are
not read. scripts/run_docs.py runs them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from mindspeed_mm.configs.data_config import DataConfig  # noqa: E402
from mindspeed_mm.configs.flags import GROUPS  # noqa: E402
from mindspeed_mm.configs.flags.from_yaml import typed_flags  # noqa: E402
from mindspeed_mm.configs.flags.parser import build_parser, unknown_flags  # noqa: E402
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config  # noqa: E402
from mindspeed_mm.configs.model_config import TransformersModelConfig  # noqa: E402
from mindspeed_mm.configs.vlm_config import VLMModelConfig  # noqa: E402
from mindspeed_mm.configs.yaml_run import read_yaml_run  # noqa: E402

TRAINING = ("pretrain_transformers.py", "pretrain_vlm.py", "pretrain_sora.py", "train_fsdp2.py")
#: program, and the words before its flags, → where its `main` is
PROGRAMS = {
    "inference_sora.py": "mindspeed_mm.tasks.generation.inference",
    "inference_vlm.py": "mindspeed_mm.tasks.inference.command",
    "evaluate_gen.py": "mindspeed_mm.tasks.generation.evaluation",
    "evaluate_vlm.py": "mindspeed_mm.tasks.evaluation.command",
    "mindspeed-mm": "mindspeed_mm.tools.cli",
    "mm-convert": "mindspeed_mm.tools.convert",
}


class Snippet(NamedTuple):
    """A fenced part of a document: where it begins, its language, its text."""

    place: str
    language: str
    text: str


def documents() -> list[Path]:
    """The documents that people read."""
    return [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> Iterator[Snippet]:
    """The fenced parts of a page."""
    inside: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and inside is None:
            inside, language, start = [], line[3:].strip(), number
        elif line.startswith("```") and inside is not None:
            yield Snippet(f"{page.relative_to(ROOT)}:{start}", language, "\n".join(inside))
            inside = None
        elif inside is not None:
            inside.append(line)


def check_json(text: str) -> None:
    """A model.json or data.json loads through its schema; a row of a data set has messages with role and content."""
    content = json.loads(text)
    if "dataset_param" in content:
        DataConfig.from_dict(content)
    elif "messages" in content:
        assert all(set(message) == {"role", "content"} for message in content["messages"]), "messages of other keys"
    else:
        TransformersModelConfig.from_dict(content)
        VLMModelConfig.from_dict(content)


def check_yaml(text: str) -> None:
    """An fsdp2.yaml, or the YAML file of a run, with its sections."""
    content = yaml.safe_load(text)
    if content.keys() <= Fsdp2Config.model_fields.keys():
        Fsdp2Config.from_dict(content)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        run = read_yaml_run(file.name)
    typed_flags(build_parser(GROUPS), run)
    DataConfig.from_dict(run.sections["mm_data"].content)
    TransformersModelConfig.from_dict(run.sections["mm_model"].content)


def check_python(text: str) -> None:
    """It compiles, and what it imports of this package is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspeed_mm":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no '{alias.name}'"


def check_bash(text: str) -> None:
    """Every command names files that there are and flags that its program knows."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if word != "…"]
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    """See `check_bash`."""
    for word in words:
        if re.match(r"(scripts|examples|tests|benchmarks|mindspeed_mm)/", word) or word in (*TRAINING, *PROGRAMS):
            assert word in ("mindspeed-mm", "mm-convert") or (ROOT / word).exists(), f"there is no '{word}'"
    for number, word in enumerate(words):
        if word in TRAINING:
            problems = unknown_flags(build_parser(GROUPS), words[number + 1 :])
            assert not problems, "; ".join(problems)
        elif word in PROGRAMS:
            rest = words[number + 1 :]
            first = next((i for i, w in enumerate(rest) if w.startswith("-")), len(rest))
            known = flags_in_help(word, *(w for w in rest[:first] if re.fullmatch(r"\w[\w-]*", w) and not w.isupper()))
            for flag in rest:
                assert not flag.startswith("--") or flag.partition("=")[0] in known, f"{word} has no flag '{flag}'"


@functools.cache
def flags_in_help(program: str, *words: str) -> frozenset[str]:
    """The flags that `program words… --help` names."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), suppress(SystemExit):
        importlib.import_module(PROGRAMS[program]).main([*words, "--help"])
    return frozenset(re.findall(r"--[\w.-]*\w", output.getvalue()))


CHECKS: dict[str, Callable[[str], None]] = {
    "json": check_json,
    "yaml": check_yaml,
    "python": check_python,
    "bash": check_bash,
}


def check_text(page: Path) -> Iterator[str]:
    """What is wrong with the links of a page, and with the paths that it names."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link and not (page.parent / link).exists():
            yield f"{page.relative_to(ROOT)}: the link '{link}' leads nowhere"
    for path in re.findall(r"`((?:scripts|examples|tests|benchmarks|mindspeed_mm|docs|configs)/[\w./-]+)`", text):
        if not (ROOT / path).exists():
            yield f"{page.relative_to(ROOT)}: there is no '{path}'"


def check_translation(page: Path) -> Iterator[str]:
    """What a Chinese page lacks of the English one, or has beyond it."""
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    for what, count in (
        ("sections", lambda text: len(re.findall(r"^#+ ", text, re.MULTILINE))),
        ("fences", lambda text: re.findall(r"^```(\w*)$", text, re.MULTILINE)),
        ("rows of tables", lambda text: len(re.findall(r"^\| ", text, re.MULTILINE))),
        ("names of flags", lambda text: sorted(set(re.findall(r"`(--[a-z][\w-]*)", text)))),
    ):
        ours, theirs = (count(file.read_text(encoding="utf-8")) for file in (page, english))
        if ours != theirs:
            yield f"{page.relative_to(ROOT)} has {what} {ours}, and {english.relative_to(ROOT)} has {theirs}"


def main() -> int:
    """Print what is wrong; returns the exit status."""
    problems: list[str] = []
    checked = 0
    for page in documents():
        problems += check_text(page)
        if page.name.endswith(".zh.md"):
            problems += check_translation(page)
        for place, language, text in snippets(page):
            if language not in (*CHECKS, ""):
                problems.append(f"{place}: nobody knows how to check '{language}'; expected {', '.join(CHECKS)}")
            elif language:
                checked += 1
                try:
                    CHECKS[language](text)
                except subprocess.CalledProcessError as error:
                    problems.append(f"{place}: {error.stderr.strip()}")
                except Exception as error:  # of whatever kind: the page is wrong
                    problems.append(f"{place}: {type(error).__name__}: {error}")
    print("\n".join(problems) or f"{checked} snippets of {len(documents())} documents are right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
