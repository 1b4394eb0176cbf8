"""Limits of the size of modules and folders, of imports, repeated names, and private names in tests.

Modules and folders beyond the limits are listed here, and may not grow.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.syntax_trees import parse

import paceline
from paceline.protocol import Eventual, ServerCore
from paceline.protocol.client import ClientCore
from paceline.protocol.scheduler.core import SchedulerCore
from paceline.protocol.scheduler.messages import SchedulerSettings

SOURCE = Path(paceline.__file__).parent
TESTS = Path(__file__).parents[1]
SIMULATOR = TESTS.parent / "simulator"
MAX_MODULE_LINES, MAX_FOLDER_MODULES = 450, 22

MAX_PRIVATE_ACCESSES = 49
MAX_VALUES_READ = 12
FOREIGN_NAMES = ("_C", "_VariableFunctions", "_efficientzerotensor",
            "_exit", "_replace", "_run_exitfuncs", "_shutdown", "_version", "_parameters", "_coalescing_manager",
            "_foreach_lerp_", "_get_backend", "_get_default_store")  # fmt: skip
"""Names of other packages. Some are public although they begin with an underscore."""

LARGE_MODULES: dict[str, int] = {}
LARGE_FOLDERS: dict[str, int] = {}
MAX_IMPORTS = 24
MANY_IMPORTS = {"torch/strategies/pipeline/runner.py": 27, "training/train.py": 27}
"""Modules that may import more than `MAX_IMPORTS` modules of the package."""
MAX_FILES_OF_A_SETTING = 15
"""Largest number of files that name one setting of a cluster; the other files pass `ClusterSettings`."""
SETTINGS = ("min_replicas", "non_finite", "heartbeat_timeout_s", "memory_limit")

MAX_PARAMETERS, MAX_PARAMETERS_EVER = 10, 30
MANY_PARAMETERS = {
    # Kernels: Numba compiles functions of arrays and numbers.
    "kernels/columns.py:move_columns": 11,
    "kernels/peer_memory.py:_reduce_peers": 11,
    "kernels/peer_memory.py:all_reduce_direct": 11,
    "kernels/shared.py:_reduce_part": 11,
    "kernels/shared.py:all_reduce": 11,
    "kernels/shared.py:move": 11,
    "kernels/text/csv.py:_parse_row": 21,
    "kernels/text/csv.py:_parse_rows": 25,
    "kernels/text/csv.py:parse_csv": 25,
    "kernels/text/csv_cells.py:take_cell": 16,
    "kernels/text/json_lines.py:_parse_lines": 21,
    "kernels/text/json_lines.py:_parse_object": 15,
    "kernels/text/json_lines.py:parse_json_lines": 19,
    "kernels/text/lines.py:parse_criteo": 12,
    "kernels/text/lines.py:parse_libsvm": 12,
    "kernels/text/vw.py:parse_vw": 15,
    "tables/logistic_pass.py:logistic_pass": 12,
    # Public functions, whose parameters are their documentation.
    "launch/local.py:local_cluster": 11,
    "rpc/api.py:init_rpc": 13,
    "torch/strategies/all_reduce.py:AllReduce.__init__": 11,
    "torch/strategies/server/parameter_server.py:ParameterServer.__init__": 11,
}


def module_paths() -> dict[str, Path]:
    """Return the modules of the package, and the modules of the simulator, whose names begin with ``simulator/``."""
    return {
        str(path.relative_to(root)): path
        for root, folder in ((SOURCE, SOURCE), (SIMULATOR.parent, SIMULATOR))
        for path in sorted(folder.rglob("*.py"))
    }


@dataclass(frozen=True)
class Module:
    """Facts about a module, so that each file is parsed once and no tree stays in memory."""

    lines: int
    imports: frozenset[str]
    classes: tuple[str, ...]
    num_parameters: dict[str, int]
    """By function, with qualified names."""
    settings: frozenset[str]
    """Settings that are a field, parameter, keyword argument or attribute here."""


@functools.cache
def modules() -> dict[str, Module]:
    """Return the facts about the modules by name."""
    return {name: read_module(path) for name, path in module_paths().items()}


def read_module(path: Path) -> Module:
    """Return the facts about a module."""
    tree = parse(path)
    imports: set[str] = set()
    classes: list[str] = []
    settings: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, level=level) if level or (module or "").startswith("paceline"):
                imports.add("." * level + (module or ""))
            case ast.Import(names=names):
                imports |= {name.name for name in names if name.name.startswith("paceline")}
            case ast.ClassDef(name=name):
                classes.append(name)
            case ast.arg(arg=name) | ast.keyword(arg=name) | ast.Attribute(attr=name) if name in SETTINGS:
                settings.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) if name in SETTINGS:
                settings.add(name)
    parameters = {name: num_parameters(function) for name, function in functions(tree, "")}
    return Module(path.read_bytes().count(b"\n"), frozenset(imports), tuple(classes), parameters, frozenset(settings))


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions in a module or class, with qualified names."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            name += "."
        if isinstance(child, ast.stmt | ast.match_case | ast.excepthandler):
            yield from functions(child, name)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters without `self` and `cls`."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([parameter for parameter in parameters if parameter.arg not in ("self", "cls")])


def test_no_module_is_too_long() -> None:
    lengths = {name: module.lines for name, module in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > LARGE_MODULES.get(name, MAX_MODULE_LINES)} == {}
    assert [name for name in LARGE_MODULES if lengths.get(name, 0) <= MAX_MODULE_LINES] == [], (
        "remove this exception, which is not needed"
    )


def test_no_folder_has_too_many_modules() -> None:
    sizes = Counter(str(Path(name).parent) for name in module_paths())
    assert {name: size for name, size in sizes.items() if size > LARGE_FOLDERS.get(name, MAX_FOLDER_MODULES)} == {}
    assert [name for name in LARGE_FOLDERS if sizes.get(name, 0) <= MAX_FOLDER_MODULES] == [], (
        "remove this exception, which is not needed"
    )


def test_no_module_imports_too_many() -> None:
    counts = {name: len(module.imports) for name, module in modules().items()}
    assert {name: count for name, count in counts.items() if count > MAX_IMPORTS} == MANY_IMPORTS


def test_few_files_name_a_setting() -> None:
    for setting in SETTINGS:
        files = [name for name, module in modules().items() if setting in module.settings]
        assert 0 < len(files) <= MAX_FILES_OF_A_SETTING, (setting, files)


def test_no_function_has_too_many_parameters() -> None:
    """The parameters of commands are generated: they are fields of the dataclasses that the commands receive."""
    counts = {
        f"{name}:{function}": count
        for name, module in modules().items()
        for function, count in module.num_parameters.items()
    }
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == MANY_PARAMETERS
    assert max(MANY_PARAMETERS.values()) <= MAX_PARAMETERS_EVER


def test_class_names_mean_one_thing() -> None:
    counts = Counter(name for module in modules().values() for name in module.classes)
    repeated = [name for name, count in counts.items() if count > 1]
    assert {name: [path for path, module in modules().items() if name in module.classes] for name in repeated} == {}


def names_read_of(node: ast.AST) -> Iterator[str]:
    """Yield each attribute of `core` or `_core` that a module reads, as "name", or "name.name" if nested."""
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=ast.Attribute(value=core, attr=part), attr=name) if is_core(core):
                yield f"{part}.{name}"
            case ast.Attribute(value=core, attr=name) if is_core(core):
                yield name


def is_core(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("core", "_core")


@pytest.mark.parametrize(
    ("role", "core"),
    [
        ("server", ServerCore(Eventual())),
        ("client", ClientCore(is_worker=True, is_sequential=False)),
        ("scheduler", SchedulerCore(SchedulerSettings())),
    ],
)
def test_runtimes_read_few_attributes_of_a_core(role: str, core: object) -> None:
    """A runtime calls methods of its core and reads a few values, but no parts of the core."""
    trees = [parse(path) for path in sorted((SOURCE / "ps" / role).glob("*.py"))]
    names = {name for tree in trees for name in names_read_of(tree)}
    values = {name for name in names if hasattr(core, name) and not callable(getattr(core, name))}
    assert len(values) <= MAX_VALUES_READ, values
    reaches = {name for name in names if name.partition(".")[0] in values and "." in name}
    assert {name for name in reaches if not name.startswith("newest.")} == set()  # `newest` is a view


def private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of private names of other modules that a test reads or replaces."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=imported):
                names = [module.name for module in imported]
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]):  # setattr() and similar functions
                names = [name]
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in FOREIGN_NAMES:
                yield node.lineno, name  # type: ignore[attr-defined]


def test_tests_use_public_names() -> None:
    found = {str(path.relative_to(TESTS)): list(private_accesses(parse(path))) for path in sorted(TESTS.rglob("*.py"))}
    count = sum(map(len, found.values()))
    assert count <= MAX_PRIVATE_ACCESSES, {name: accesses for name, accesses in found.items() if accesses}
