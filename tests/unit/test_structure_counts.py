"""scripts/count_structure.py finds what each of its counts is of, and only that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "count_structure.py"


@pytest.fixture(scope="module")
def counts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_structure", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["count_structure"] = module
    spec.loader.exec_module(module)
    return module


def found(counts: ModuleType, folder: Path, name: str, files: dict[str, str]) -> list[str]:
    """Places of one count in a package `pkg` of these files; of the share of untyped parameters, the places too."""
    for path, text in files.items():
        file = folder / "pkg" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    hits = counts.FINDERS[name](counts.read_package(folder / "pkg"))
    return sorted(f"{hit.path}:{hit.line}" for hit in hits)


WRITES = """\
args.rank = 1
args.mm.model.path += "x"
run.a, (description.b, other) = 1, (2, 3)
self.args.size: int = 4
del args.rank
setattr(args, name, 1)
object.__setattr__(run, "a", 1)
vars(args)["a"] = 1
vars(args).update(a=1)
args.mm["model"] = 1
args = run = make()
self.args = args
plan.args.x
other.x = args.x
run[0] = del_
read(args.x)
"""
NAMESPACES = """\
def a(args: Any): ...
def b(args): ...
def c(options: "argparse.Namespace" | None): ...
def d(flags: Namespace): ...
class E:
    flags: argparse.Namespace
def f(args: Any | None): ...
def g(*args: Any, run: Run): ...
def h(args: tuple[Any, ...], model: Any): ...
"""
ATTRIBUTES = """\
KEY = "kept"
getattr(model, "source", None)
hasattr(self.model, "traits")
getattr(chunk.module, KEY)
def f(module: Any): return hasattr(module, "config")
getattr(model, name)
for module in model.modules(): getattr(module, "padding_idx", None)
getattr(model.config, "head_dim", None)
def g(module: nn.Module): return hasattr(module, "config")
isinstance(model, Trainable)
"""
LAUNCHER = """\
os.environ["RANK"]
os.getenv("LOCAL_RANK", "0")
rank = "WORLD_SIZE" in environ
[number(n) for n in ("LOCAL_WORLD_SIZE",)]
os.environ.get("RANKING")
"The text of RANK and WORLD_SIZE."
"""
PARAMETERS = """\
class A:
    def a(self, x: Any): ...
    def b(cls, x: Any | None): ...
def c(x): ...
def d(x: Optional[Any], *, y: int): ...
def e(x: dict[str, Any], y: Any): ...
def f(x: int, *args: Any, **kwargs: Any): ...
"""
NAMES = {
    "a.py": "class Part: ...\ndef _own(): ...\nLIMIT = 1\nif x:\n    ALIAS = int\nfrom b import C\ndef main(): ...\n",
    "b.py": "Part, OTHER = 1, 2\ndef _own(): ...\nLIMIT: int = 2\nclass D:\n    C = OTHER = 2\ndef main(): ...\n",
    "c.py": "try:\n    ALIAS = str\nexcept E:\n    OTHER.x = 1\n",
    "entry/x.py": "def main(): ...\n",
    "entry/y.py": "def main(): ...\n",
}
CYCLES = {
    "__init__.py": "",
    "a.py": "from pkg import b\n",
    "b.py": "import pkg.c\n",
    "c.py": "try:\n    from .a import x\nfinally: ...\n",
    "d.py": "from pkg.e import x\n",
    "e.py": "def f():\n    if x:\n        from pkg.d import x\n",
    "g.py": "from pkg.h import x\n",
    "h.py": "if TYPE_CHECKING:\n    from pkg.g import x\n",
    "i.py": "from pkg.a import x\nfrom pkg.d import x\nfrom pkg.g import x\nimport os\n",
}


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("description-writes", WRITES, [1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("untyped-namespaces", NAMESPACES, [1, 2, 3, 4, 6, 7]),
        ("model-attributes", ATTRIBUTES, [2, 3, 4, 5]),
        ("launcher-reads", LAUNCHER, [1, 2, 3, 4]),
        ("untyped-parameters", PARAMETERS, [2, 3, 4, 5, 6]),
        ("untyped-variadics", PARAMETERS, [7, 7]),
        ("long-files", "x = 1\n" * 501, [501]),
        ("long-files", "x = 1\n" * 500, []),
        ("long-functions", "def f():\n" + "    x = 1\n" * 70, [1]),
        ("long-functions", "class A:\n    def f():\n" + "        x = 1\n" * 69, []),
    ],
)
def test_a_count_finds_its_lines(counts: ModuleType, tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    assert found(counts, tmp_path, name, {"room/a.py": text}) == sorted(f"room/a.py:{line}" for line in lines)


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("description-writes", "configs/arguments.py", WRITES),
        ("untyped-namespaces", "entry/pretrain.py", NAMESPACES),
        ("model-attributes", "models/contract.py", ATTRIBUTES),
        ("model-attributes", "models/generation/ae/build.py", ATTRIBUTES),
        ("launcher-reads", "utils/launch.py", LAUNCHER),
    ],
)
def test_files_that_may(counts: ModuleType, tmp_path: Path, name: str, path: str, text: str) -> None:
    assert found(counts, tmp_path, name, {path: text}) == []


def test_names_are_repeated_across_files(counts: ModuleType, tmp_path: Path) -> None:
    assert found(counts, tmp_path, "repeated-names", NAMES) == ["a.py:1", "a.py:3", "a.py:5", "a.py:7"]


@pytest.mark.parametrize(("kind", "files"), [("", "abc"), ("-deferred", "abcde"), ("-typing", "abcdegh")])
def test_cycles_by_kind_of_import(counts: ModuleType, tmp_path: Path, kind: str, files: str) -> None:
    hits = found(counts, tmp_path, f"import-cycles{kind}", CYCLES)
    assert [hit.split(".py")[0] for hit in hits] == list(files)


def test_share_of_untyped_parameters(counts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PARAMETERS)
    assert counts.share_of_untyped(counts.read_package(tmp_path)) == 62.5  # 5 of 8


def test_what_a_figure_means(counts: ModuleType) -> None:
    limit = counts.Limit(4, 2, "")
    assert [counts.verdict(figure, limit) for figure in (5, 4, 3)] == [
        "TOO MANY, the limit is 4",
        "target 2",
        "lower the limit of 4 to 3",
    ]
    assert counts.verdict(2, counts.Limit(2, 2, "")) == ""


def test_a_rise_fails(counts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["count_structure.py"])
    monkeypatch.setattr(counts, "read_package", lambda folder: [])
    assert counts.main() == 0
    monkeypatch.setitem(counts.LIMITS, "long-files", counts.Limit(-1, 0, "files over 500 lines"))
    assert counts.main() == 1
    assert "files over 500 lines (TOO MANY, the limit is -1)" in capsys.readouterr().out
