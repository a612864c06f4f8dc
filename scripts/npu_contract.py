"""Prove, without an NPU, that the pinned torch_npu has every name that is called of it, with that signature.

`python scripts/npu_contract.py` fetches the wheel that constraints-npu.txt pins (once; it stays in .venv) and reads its
Python files and lists of operators; nothing of it is imported. What is compared with it:

* names of `torch_npu`, `torch.npu` and `torch.ops.npu` in the package, and the arguments of their calls;
* operators of torch's that `accelerator/` calls by a private name, and foreach operators of `optimizer/`: the NPU must
  have a kernel of its own, or torch one for every device;
* what torch's fully_shard needs of a device's module.

It ends with status 1 if a name or an argument isn't there. Only where no package index can be reached it reports that,
and proves nothing. MindSpeed has no wheel: what is imported of it is listed, not proved.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints-npu.txt"
CACHE = ROOT / ".venv" / "wheels"
PACKAGE = ROOT / "mindspeed_mm"
#: room → its uses of torch's operators by private names; an optimizer calls the fused ones where they are, not here
PRIVATE_OPERATORS = {"accelerator/": r"torch\._[a-z]\w*_", "optimizer/": r"torch\._foreach_\w+"}
# runs where there is no accelerator
ONLY_ON_THE_HOST = ("accelerator/megatron_cpu.py", "accelerator/cpu.py", "accelerator/cuda.py")


# --- the wheel


@dataclass
class Found:
    """What a dotted name is: a module, a function, a class, or something that only running the code would show."""

    kind: str
    module: str = ""
    node: ast.FunctionDef | ast.ClassDef | None = None


class Wheel:
    """The Python files of a package, by module, and its operators.

    Args:
        files: path inside the wheel → text, of its `.py` and `.yaml` files.
    """

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self._trees: dict[str, ast.Module] = {}
        self.operators: dict[str, list[str]] = {}
        self.exposed: set[str] = set()
        for path, text in files.items():
            if path.endswith("npu_native_functions_by_codegen.yaml"):
                self._read_operators(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    def _read_operators(self, content: dict[str, Any]) -> None:
        for entries in content.values():
            for entry in entries if isinstance(entries, list) else ():
                schema = entry["func"] if isinstance(entry, dict) else str(entry)
                name = re.split(r"[.(]", schema)[0]
                if "(" in schema:
                    self.operators.setdefault(name, []).append(schema)
                if isinstance(entry, dict) and entry.get("exposed"):
                    self.exposed.add(name)

    def has_module(self, module: str) -> bool:
        return self._path(module) is not None

    def _path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((p for p in (f"{base}/__init__.py", f"{base}.py") if p in self._files), None)

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self._files[self._path(module) or ""])
        return self._trees[module]

    def names(self, module: str) -> list[str]:
        """What could be meant by a misspelt name of `module`."""
        found = set(self.exposed) if module == "torch_npu" else set()
        for statement in _statements(self.tree(module)):
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found.add(statement.name)
            elif isinstance(statement, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in statement.names}
                source = self._source(module, statement)
                if "*" in found and source != module and self.has_module(source):
                    found |= set(self.names(source))
                found.discard("*")
        return sorted(found)

    def find(self, dotted: str) -> Found | None:
        """What a dotted name means; None: nothing of that name is there."""
        first, *rest = dotted.split(".")
        found: Found | None = Found("module", first)
        for part in rest:
            if found is None or found.kind == "unknown":
                return found
            found = self._member(found, part)
        return found

    def _member(self, owner: Found, name: str) -> Found | None:
        if owner.kind == "module":
            return self._of_module(owner.module, name, set())
        body = owner.node.body if isinstance(owner.node, ast.ClassDef) else []
        method = next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == name), None)
        if method is not None:
            return Found("method", owner.module, method)
        # a class that inherits, or an attribute that code sets
        inherits = isinstance(owner.node, ast.ClassDef) and bool(owner.node.bases)
        return Found("unknown") if inherits else None

    def _of_module(self, module: str, name: str, seen: set[str]) -> Found | None:
        if f"{module}.{name}" in seen or not self.has_module(module):
            return None
        seen.add(f"{module}.{name}")
        stars = []
        for statement in _statements(self.tree(module)):
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
                return Found("class" if isinstance(statement, ast.ClassDef) else "function", module, statement)
            if isinstance(statement, ast.ImportFrom):
                source = self._source(module, statement)
                for alias in statement.names:
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name) == name:
                        if source == module:  # from . import name
                            return Found("module", f"{module}.{alias.name}")
                        own = source.split(".")[0] == module.split(".")[0]
                        return self._of_module(source, alias.name, seen) if own else Found("unknown")
            elif isinstance(statement, ast.Import):
                if any((a.asname or a.name.split(".")[0]) == name for a in statement.names):
                    return Found("unknown")
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(isinstance(n, ast.Name) and n.id == name for t in targets for n in ast.walk(t)):
                    return Found("unknown")
        if self.has_module(f"{module}.{name}"):
            return Found("module", f"{module}.{name}")
        return next((f for f in (self._of_module(s, name, seen) for s in stars) if f is not None), None)

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = (self._path(module) or "").endswith("__init__.py")
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + (1 if is_package else 0)]
        return ".".join([*parts, *([statement.module] if statement.module else [])])


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module, those inside `if`, `try` and `with` too, but none of a function or a class."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(child)


# --- what the package calls


@dataclass
class Use:
    """A name of the vendor's in our code, and what it is called with."""

    path: str
    line: int
    name: str
    call: ast.Call | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"


@dataclass
class Uses:
    names: list[Use] = field(default_factory=list)
    operators: list[Use] = field(default_factory=list)
    unproved: set[str] = field(default_factory=set)


def uses_in(folder: Path) -> Uses:
    """Every use of the vendor's names in the Python files of a folder."""
    uses = Uses()
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder).as_posix()
        if relative not in ONLY_ON_THE_HOST:
            _read_uses(ast.parse(path.read_text(encoding="utf-8")), relative, uses)
    return uses


def _read_uses(tree: ast.Module, path: str, uses: Uses) -> None:
    # `QueuedAccelerator.library` is torch.cuda or this module: its shared lines are held to what both have
    aliases = {"torch.npu": "torch_npu.npu", "self.library": "torch_npu.npu"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch_npu":
                    aliases[alias.asname or "torch_npu"] = alias.name if alias.asname else "torch_npu"
                    uses.names.append(Use(path, node.lineno, alias.name))
                elif alias.name.split(".")[0] == "mindspeed":
                    uses.unproved.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            first = node.module.split(".")[0]
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if first == "torch_npu":
                    aliases[alias.asname or alias.name] = name
                    uses.names.append(Use(path, node.lineno, name))
                elif first == "mindspeed":
                    uses.unproved.add(name)

    def vendor_name(node: ast.AST) -> str | None:
        dotted = _dotted(node)
        if dotted is None:
            return None
        if dotted.startswith("torch.ops.npu."):
            return dotted
        for short, name in aliases.items():
            if dotted == short or dotted.startswith(f"{short}."):
                return name + dotted[len(short) :]
        return None

    for node in ast.walk(tree):  # names that are given to vendor modules: self._npu = torch_npu.npu
        if isinstance(node, ast.Assign) and (name := vendor_name(node.value)) is not None:
            aliases |= {target: name for t in node.targets if (target := _dotted(t)) is not None}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    calls_by_name = {node.func.id: node for node in called.values() if isinstance(node.func, ast.Name)}
    for node in ast.walk(tree):  # kernel = torch._one_ if ... else torch._other_
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) and isinstance(node.targets[0], ast.Name):
            call = calls_by_name.get(node.targets[0].id)
            called |= {id(n): call for n in (node.value.body, node.value.orelse) if call is not None}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner or isinstance(node.ctx, ast.Store):
            continue
        name, dotted = vendor_name(node), _dotted(node) or ""
        if name is not None:
            uses.names.append(Use(path, node.lineno, name, called.get(id(node))))
        elif any(path.startswith(room) and re.fullmatch(own, dotted) for room, own in PRIVATE_OPERATORS.items()):
            uses.operators.append(Use(path, node.lineno, dotted, called.get(id(node))))


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


# --- the comparison


def fault_of(use: Use, wheel: Wheel) -> str | None:
    """What is wrong with a use of a vendor's name; None: it is there and takes these arguments."""
    owner, _, last = use.name.rpartition(".")
    is_operator = owner == "torch.ops.npu"
    if is_operator or (owner == "torch_npu" and last in wheel.exposed):
        schemas = wheel.operators.get(last)
        if schemas is None:
            return f"{use}: there is no such operator{_nearest(last, wheel.operators)}"
        return _fault_of_operator(use, schemas)
    found = wheel.find(use.name)
    if found is None:
        known = wheel.names(owner) if wheel.has_module(owner) else []
        return f"{use}: there is no such name{_nearest(last, known)}"
    if use.call is None or found.node is None:
        return None
    if isinstance(found.node, ast.FunctionDef):
        return _fault_of_call(use, use.call, found, wheel, skip=1 if found.kind == "method" else 0)
    init = next((s for s in found.node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
    return None if init is None else _fault_of_call(use, use.call, Found("", found.module, init), wheel, skip=1)


def _fault_of_call(use: Use, call: ast.Call, found: Found, wheel: Wheel, skip: int = 0) -> str | None:
    function = found.node
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    places = [a.arg for a in (*given.posonlyargs, *given.args)][skip:]
    by_name = {*places, *(a.arg for a in given.kwonlyargs)}
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None  # what is passed on isn't known here
    signature = f"{function.name}({ast.unparse(given)})"
    if len(call.args) > len(places) and given.vararg is None:
        return f"{use}: {len(call.args)} arguments by place, and it takes {len(places)}: {signature}"
    keywords = {str(k.arg) for k in call.keywords}
    unknown = sorted(keywords - by_name)
    if unknown and given.kwarg is not None:
        target = _handed_on_to(function, given.kwarg.arg, found.module, wheel)
        unknown = [] if target is None else [n for n in unknown if n not in target]
    if unknown:
        return f"{use}: it takes no argument {unknown[0]!r}: {signature}"
    filled = {*places[: len(call.args)], *keywords}
    needed = places[: len(places) - len(given.defaults)] if given.defaults else places
    needed += [a.arg for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    missing = [n for n in needed if n not in filled]
    return f"{use}: argument {missing[0]!r} is missing: {signature}" if missing else None


def _handed_on_to(function: ast.FunctionDef, kwargs: str, module: str, wheel: Wheel) -> set[str] | None:
    """Arguments of the function that gets `**kwargs`; None: unknown."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == kwargs for k in node.keywords):
            found = wheel.find(f"{module}.{node.func.id}")
            if found is not None and isinstance(found.node, ast.FunctionDef) and found.node.args.kwarg is None:
                given = found.node.args
                return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return None


def _fault_of_operator(use: Use, schemas: list[str]) -> str | None:
    if use.call is None:
        return None
    import torch

    reasons = []
    for schema in schemas:
        arguments = torch._C.parse_schema(f"npu::{schema}").arguments
        places, keywords = [a.name for a in arguments if not a.kwarg_only], {str(k.arg) for k in use.call.keywords}
        filled = {*places[: len(use.call.args)], *keywords}
        unknown = sorted(keywords - {a.name for a in arguments})
        missing = [a.name for a in arguments if a.name not in filled and not a.has_default_value()]
        if len(use.call.args) > len(places):
            reasons.append(f"{len(use.call.args)} arguments by place, and it takes {len(places)}")
        elif unknown:
            reasons.append(f"it takes no argument {unknown[0]!r}")
        elif missing:
            reasons.append(f"argument {missing[0]!r} is missing")
        else:
            return None
    return f"{use}: {reasons[0]}: {schemas[0]}"


def fault_of_torch_operator(use: Use, wheel: Wheel) -> str | None:
    """Whether the NPU can run an operator of torch's: by a kernel of its own, or by torch's for every device."""
    import torch

    name = use.name.removeprefix("torch.")
    if name in wheel.operators:
        return _fault_of_operator(use, wheel.operators[name])
    overloads = getattr(torch.ops.aten, name, None)
    if overloads is None:
        return f"{use}: torch has no such operator"
    for overload in overloads.overloads():
        full = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
        for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"):
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
                return None
    return f"{use}: there is no kernel of it for the NPU{_nearest(name, wheel.operators)}"


def uses_of_fully_shard() -> list[Use]:
    """What torch's FSDP2 takes from a device's module, as uses of `torch_npu.npu`."""
    import torch.distributed.fsdp._fully_shard as package

    found = {}
    for path in sorted(Path(package.__path__[0]).glob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for name in re.findall(r"\bdevice_handle\.(\w+)", line):
                found.setdefault(name, Use(f"torch's {path.name}", number, f"torch_npu.npu.{name}"))
    return list(found.values())


def _nearest(name: str, known: Any) -> str:
    names = difflib.get_close_matches(name, [str(k) for k in known], n=3)
    return f"; the nearest are {', '.join(names)}" if names else ""


# --- the command


def pinned(name: str) -> str:
    """The version that constraints-npu.txt pins."""
    found = re.search(rf"^{name}==(\S+)$", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        sys.exit(f"{PINS.name} pins no {name}")
    return found[1]


def fetch(version: str, download: Callable[..., Any] = subprocess.run) -> Path | None:
    """The wheel, from the cache or the package index; None: no index that has torch_npu can be reached."""
    kept = sorted(CACHE.glob(f"torch_npu-{version}-*.whl"))
    if kept:
        return kept[0]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(CACHE)]
    done = download([*command, f"torch_npu=={version}"], capture_output=True, text=True)
    kept = sorted(CACHE.glob(f"torch_npu-{version}-*.whl"))
    if kept:
        return kept[0]
    output = done.stdout + done.stderr
    if re.search(r"from versions: (?!none)", output):
        sys.exit(f"the package index has no torch_npu {version} for this machine and this Python:\n{output}")
    print(output, file=sys.stderr)
    return None


def read_wheel(path: Path) -> tuple[Wheel, str]:
    """The files of a wheel, and the torch that it is built for."""
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.startswith("torch_npu/") and n.endswith((".py", ".yaml"))]
        files = {name: archive.read(name).decode("utf-8", "replace") for name in names}
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        wanted = re.search(r"^Requires-Dist: torch==([\d.]+?)(\.\*)?$", archive.read(metadata).decode(), re.MULTILINE)
    return Wheel(files), wanted[1] if wanted else ""


def faults_of(uses: Uses, wheel: Wheel) -> list[str]:
    """A sentence for each use that the wheel can't serve."""
    found = [fault_of(use, wheel) for use in uses.names]
    found += [fault_of_torch_operator(use, wheel) for use in uses.operators]
    return [fault for fault in found if fault is not None]


def main() -> int:
    version, torch_version = pinned("torch_npu"), pinned("torch")
    path = fetch(version)
    if path is None:
        print(f"NOT PROVED: no package index can be reached from here, to fetch the wheel of torch_npu {version} from")
        return 0
    wheel, wanted = read_wheel(path)
    uses = uses_in(PACKAGE)
    if not uses.names or not wheel.operators:
        print("nothing was compared: no use of torch_npu, or no list of operators in the wheel, was found")
        return 1
    faults = faults_of(uses, wheel)
    of_torch = uses_of_fully_shard()
    faults += faults_of(Uses(of_torch), wheel)
    if wanted != torch_version:
        faults.append(f"{PINS.name} pins torch {torch_version}, and torch_npu {version} is built for torch {wanted}")
    for fault in faults:
        print(fault)
    for name in sorted(uses.unproved):
        print(f"not proved: {name} (MindSpeed has no wheel)")
    print(
        f"torch_npu {version}: {len(uses.names)} uses of its names, {len(uses.operators)} of torch's operators and "
        f"{len(of_torch)} names that fully_shard takes were compared; {len(faults)} can't be served"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
