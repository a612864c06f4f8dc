"""Count what the structure of the package forbids, and fail where a count has risen.

    python scripts/count_structure.py                 one line a count
    python scripts/count_structure.py --list NAME     every place of one count, as path:line

The files are parsed, not imported. A count above its limit in `LIMITS` is an error (status 1). Limits only ever fall:
where a count is below its limit, the line says what to lower it to; `target` is the final goal.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.structure.imports import import_cycles  # noqa: E402
from scripts.structure.source import Function, Hit, Source, parse, read_package  # noqa: E402

PACKAGE = "mindspeed_mm"


class Limit(NamedTuple):
    """How much of something the package may have today, and in the end."""

    now: float
    target: float
    what: str


#: name of a count → its limit; a commit that lowers a count lowers the limit with it
LIMITS = {
    "description-writes": Limit(0, 0, "writes to the description of the run after it was built"),
    "untyped-namespaces": Limit(0, 0, "parameters and fields that are an untyped namespace, below the entry points"),
    "model-attributes": Limit(0, 0, "getattr and hasattr of a named attribute on the trained model"),
    "launcher-reads": Limit(0, 0, "reads of the launcher's ranks and sizes from the environment"),
    "repeated-names": Limit(0, 0, "public names that several modules define"),
    "import-cycles": Limit(0, 0, "files in a cycle of imports at the top of files"),
    "import-cycles-deferred": Limit(0, 0, "files in a cycle of imports, those inside functions included"),
    "untyped-parameters": Limit(4.0, 4.0, "percent of the parameters that are Any or have no annotation"),
    "long-files": Limit(0, 0, "files over 500 lines"),
    "long-functions": Limit(0, 0, "functions over 70 lines"),
}
#: counted for information: no limit applies
INFORMATION = {
    "import-cycles-typing": "files in a cycle of imports, those for annotations only included",
    "untyped-variadics": "*args and **kwargs that are Any (not among the parameters)",
    "long-elsewhere": "files over 500 and functions over 70 lines in scripts/ and tests/support/",
}

#: variables, parameters and attributes that refer to the description of a run
DESCRIPTION_NAMES = {"args", "run", "description"}
#: files that build the description, and so may write to it
BUILDERS = (
    "configs/arguments.py",
    "configs/config.py",  # merge_mm_args(args) adds the files' content
    "configs/describe.py",
    "configs/implied_backend.py",
    "configs/layout_rules.py",
)
#: where flags are parsed, and what published launch scripts call with a namespace
ENTRY_POINTS = ("entry/", "tools/", "configs/flags/", "configs/global_args.py")
#: variables and attributes that refer to the trained model, whole or a pipeline chunk of it
MODEL_NAMES = {"model", "chunk", "wrapped", "unwrapped", "inner", "user_model", "base_model"}
#: `as_trainable` asks a model for everything that it may lack
MODEL_CONTRACT = "models/contract.py"
#: files whose `model` is a library's, which is used and not trained
FROZEN_MODELS = ("models/generation/ae/", "models/generation/text_encoder/", "tasks/generation/")
#: environment variables of a launcher, the one module that reads them, and the table that documents all variables
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
LAUNCHER_MODULES = ("utils/launch.py", "configs/environment.py")
#: names that several modules may define → where, and why
REPEATED_BY_DESIGN: Mapping[str, tuple[str, ...]] = {
    "main": ("entry/", "tasks/", "tools/"),  # what a command line runs
    # callbacks: a user's script defines them by these names, and so do our recipes
    "model_provider": ("tasks/train/",),
    "get_batch": ("tasks/train/",),
    "loss_func": ("tasks/train/",),
    "forward_step": ("tasks/train/",),
    "train_valid_test_datasets_provider": ("tasks/train/",),
    # what a folder of families or of dialects is searched for
    "BENCHMARK": ("tasks/evaluation/benchmarks/",),
    "DIALECT": ("configs/dialects/",),
    "ADAPTER": ("models/transformers/",),
    "FAMILY": ("models/transformers/",),
    "MEGATRON": ("models/transformers/",),
    "TRAITS": ("models/transformers/",),
}
LONGEST_FILE, LONGEST_FUNCTION = 500, 70


# --- the description of a run


def description_writes(package: Sequence[Source]) -> Iterator[Hit]:
    """Assignments to attributes of the description, at any depth, and `setattr` on it."""
    for source in package:
        for node in () if source.is_in(BUILDERS) else source.nodes:
            for owner in _owners_of_written(node):
                if _last_name(owner) in DESCRIPTION_NAMES:
                    yield source.hit(node, ast.unparse(node))


def _owners_of_written(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement changes: storing to `args.mm.model` changes `args.mm` and `args`; `vars(args)` is `args`."""
    match node:
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            pass
        case ast.Subscript(value=ast.Attribute() | ast.Call() as owner, ctx=ast.Store() | ast.Del()):
            pass
        case ast.Call(func=ast.Name(id="setattr" | "delattr") | ast.Attribute(attr="__setattr__"), args=[owner, *_]):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="update" | "setdefault" | "pop" | "clear")) if _is_dict(
            owner
        ):
            pass
        case _:
            return
    yield owner
    while True:
        match owner:
            case ast.Attribute(value=inside) | ast.Subscript(value=inside):
                owner = inside
            case ast.Call(func=ast.Name(id="vars"), args=[inside]):
                owner = inside
            case _:
                return
        yield owner


def _is_dict(node: ast.expr) -> bool:
    """Whether an expression is the dictionary of an object's attributes."""
    match node:
        case ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__"):
            return True
    return False


def _last_name(node: ast.expr) -> str | None:
    """The name of a variable, or of the attribute that an expression ends with."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def untyped_namespaces(package: Sequence[Source]) -> Iterator[Hit]:
    """Parameters `args` that are Any or not annotated, and whatever is annotated as a Namespace."""
    for source in package:
        if source.is_in(ENTRY_POINTS):
            continue
        for function in source.functions:
            for parameter in _parameters(function):
                if _is_namespace(parameter.annotation) or (parameter.arg == "args" and _is_untyped(parameter)):
                    yield source.hit(parameter, f"{function.name}({ast.unparse(parameter)})")
        for node in source.nodes:
            if isinstance(node, ast.AnnAssign) and _is_namespace(node.annotation):
                yield source.hit(node, ast.unparse(node))


def _is_namespace(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Namespace" in re.findall(r"\w+", ast.unparse(annotation))


# --- the trained model


def model_attributes(package: Sequence[Source]) -> Iterator[Hit]:
    """`getattr` and `hasattr` with a fixed name on the model.

    A name that is computed is a path into a tree of modules, which is no contract. A `module` is a layer of such a
    tree, unless it is a parameter of type Any: then it is whatever the user trains.
    """
    for source in package:
        if source.is_in(FROZEN_MODELS) or source.path == MODEL_CONTRACT:
            continue
        constants = _string_constants(source.tree)
        anything = {
            id(node)
            for function in source.functions
            if any(parameter.arg == "module" and _is_untyped(parameter) for parameter in _parameters(function))
            for node in ast.walk(function)
        }
        for node in source.nodes:
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, name, *_]):
                    is_fixed = isinstance(name, ast.Constant) or _last_name(name) in constants
                    is_module = isinstance(owner, ast.Attribute) or id(node) in anything
                    named = _last_name(owner)
                    if is_fixed and (named in MODEL_NAMES or (named == "module" and is_module)):
                        yield source.hit(node, ast.unparse(node))


def _string_constants(tree: ast.Module) -> set[str]:
    """Names that the file gives to strings."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


# --- the launcher's environment


def launcher_reads(package: Sequence[Source]) -> Iterator[Hit]:
    """Every mention of a launcher's variable: whoever writes its name reads it, by one way or another."""
    for source in package:
        if source.is_in(LAUNCHER_MODULES):
            continue
        for node in source.nodes:
            if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES:
                yield source.hit(node, str(node.value))


# --- names


def repeated_names(package: Sequence[Source]) -> Iterator[Hit]:
    """Each public name that more than one module defines, with all of its places; imports don't define."""
    places: dict[str, list[Hit]] = defaultdict(list)
    for source in package:
        for name, node in _defined(source.tree.body):
            if not name.startswith("_") and not source.is_in(REPEATED_BY_DESIGN.get(name, ())):
                places[name].append(source.hit(node, name))
    for name, hits in sorted(places.items()):
        if len({hit.path for hit in hits}) > 1:
            others = ", ".join(f"{hit.path}:{hit.line}" for hit in hits[1:])
            yield hits[0]._replace(text=f"{name}, also {others}")


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Classes, functions, constants and aliases at the top of a file, under an `if` or a `try` too."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((name, node) for target in targets for name in _bound(target))
            case ast.AnnAssign(target=target):
                yield from ((name, node) for name in _bound(target))
            case ast.If(body=first, orelse=second):
                yield from _defined([*first, *second])
            case ast.Try(body=first, handlers=handlers, orelse=second):
                yield from _defined([*first, *(line for handler in handlers for line in handler.body), *second])


def _bound(target: ast.expr) -> Iterator[str]:
    """Names of variables in the target of an assignment; attributes and elements belong to something else."""
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _bound(part)


# --- types and lengths


def untyped_parameters(package: Sequence[Source]) -> Iterator[Hit]:
    """Parameters that are `Any`, `Any | None` or not annotated."""
    for source in package:
        for function in source.functions:
            for parameter in _parameters(function):
                if _is_untyped(parameter):
                    yield source.hit(parameter, f"{function.name}({ast.unparse(parameter)})")


def untyped_variadics(package: Sequence[Source]) -> Iterator[Hit]:
    """`*args` and `**kwargs` of any type, as wrappers pass them on."""
    for source in package:
        for function in source.functions:
            for stars, parameter in (("*", function.args.vararg), ("**", function.args.kwarg)):
                if parameter is not None and _is_untyped(parameter):
                    yield source.hit(parameter, f"{function.name}({stars}{ast.unparse(parameter)})")


def share_of_untyped(package: Sequence[Source]) -> float:
    """Percent of the parameters that `untyped_parameters` finds, rounded up to a tenth."""
    everything = sum(len(_parameters(function)) for source in package for function in source.functions)
    return -(-1000 * len(list(untyped_parameters(package))) // max(everything, 1)) / 10


def _parameters(function: Function) -> list[ast.arg]:
    """Named parameters of a function, without a method's `self` or `cls`."""
    named = [*function.args.posonlyargs, *function.args.args]
    if named and named[0].arg in ("self", "cls") and named[0].annotation is None:
        named = named[1:]
    return [*named, *function.args.kwonlyargs]


def _is_untyped(parameter: ast.arg) -> bool:
    match parameter.annotation:
        case None | ast.Name(id="Any") | ast.Attribute(attr="Any"):
            return True
        case ast.BinOp() | ast.Subscript() as union:
            return ast.unparse(union) in ("Any | None", "None | Any", "Optional[Any]")
    return False


def long_files(package: Sequence[Source]) -> Iterator[Hit]:
    """Files that are too long."""
    for source in package:
        if source.lines > LONGEST_FILE:
            yield Hit(source.path, source.lines, f"{source.lines} lines")


def long_functions(package: Sequence[Source]) -> Iterator[Hit]:
    """Functions that are too long, their signature and docstring included."""
    for source in package:
        for function in source.functions:
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > LONGEST_FUNCTION:
                yield source.hit(function, f"{function.name}, {length} lines")


# --- the command line


FINDERS: Mapping[str, Callable[[Sequence[Source]], Iterator[Hit]]] = {
    "description-writes": description_writes,
    "untyped-namespaces": untyped_namespaces,
    "model-attributes": model_attributes,
    "launcher-reads": launcher_reads,
    "repeated-names": repeated_names,
    "import-cycles": import_cycles,
    "import-cycles-deferred": lambda package: import_cycles(package, deferred=True),
    "import-cycles-typing": lambda package: import_cycles(package, deferred=True, typing=True),
    "untyped-parameters": untyped_parameters,
    "untyped-variadics": untyped_variadics,
    "long-files": long_files,
    "long-functions": long_functions,
}


def count(name: str, package: Sequence[Source]) -> float:
    """The figure of one count: how many places, or what share."""
    return share_of_untyped(package) if name == "untyped-parameters" else len(list(FINDERS[name](package)))


def verdict(figure: float, limit: Limit) -> str:
    """What a figure means, in a word or two; it is an error if it begins with "TOO MANY"."""
    if figure > limit.now:
        return f"TOO MANY, the limit is {limit.now:g}"
    if figure < limit.now:
        return f"lower the limit of {limit.now:g} to {figure:g}"
    return "" if figure <= limit.target else f"target {limit.target:g}"


def long_elsewhere() -> list[Hit]:
    """What is too long beside the package."""
    found = []
    for place in ("scripts", "tests/support"):
        for source in (parse(path, ROOT, place) for path in sorted((ROOT / place).rglob("*.py"))):
            found += [*long_files([source]), *long_functions([source])]
    return found


def main() -> int:
    """Print every count, or the places of one; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", metavar="NAME", choices=[*LIMITS, *INFORMATION], help="print the places of one count")
    wanted = parser.parse_args().list
    package = read_package(ROOT / PACKAGE)
    if wanted is not None:
        hits = long_elsewhere() if wanted == "long-elsewhere" else FINDERS[wanted](package)
        folder = "" if wanted == "long-elsewhere" else f"{PACKAGE}/"
        print("\n".join(f"{folder}{hit}" for hit in hits) or "none")
        return 0
    failed = False
    for name, limit in LIMITS.items():
        figure = count(name, package)
        meaning = verdict(figure, limit)
        failed |= meaning.startswith("TOO MANY")
        print(f"{figure:6g}  {name:24}{limit.what}{f' ({meaning})' if meaning else ''}")
    for name, what in INFORMATION.items():
        figure = len(long_elsewhere()) if name == "long-elsewhere" else count(name, package)
        print(f"{figure:6g}  {name:24}{what}")
    if failed:
        print(f"python {Path(sys.argv[0]).name} --list NAME shows the places of a count")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
