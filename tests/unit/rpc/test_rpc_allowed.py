"""The functions, classes and methods that other processes may call here, by name."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.rpc import allow
from paceline.rpc.allowed import Allowed, qualified_name

imported = os.getcwd
HIDDEN = "_hidden"


def function() -> int:
    return 1


def _private() -> int:
    return 2


@allow
def _decorated() -> int:
    return 3


class Outer:
    def method(self) -> int:
        return 4

    @staticmethod
    def plain() -> int:
        return 5

    @classmethod
    def made(cls) -> Outer:
        return cls()

    def _hidden(self) -> int:
        return 6

    def __call__(self) -> int:
        return 7


THIS_MODULE = __name__


def test_definitions_of_a_module_are_found_by_name() -> None:
    allowed = Allowed([THIS_MODULE])
    assert allowed.resolve(qualified_name(function)) is function
    assert allowed.resolve(f"{THIS_MODULE}:Outer.plain") is Outer.plain
    assert allowed.resolve_class(f"{THIS_MODULE}:Outer") is Outer
    assert allowed.resolve(f"{THIS_MODULE}:function") is allowed.resolve(f"{THIS_MODULE}:function")


@pytest.mark.parametrize(
    "name",
    ["imported", "os.getcwd", "os", "_private", "Outer.__init__", "Outer._hidden", "function.__globals__", "", "a..b"],
)
def test_imported_and_private_names_are_rejected(name: str) -> None:
    with pytest.raises(UsageError, match=r"not allowed here|has no"):
        Allowed([THIS_MODULE]).resolve(f"{THIS_MODULE}:{name}")


def test_modules_without_permission_are_rejected() -> None:
    for allowed in (Allowed(), Allowed(["tests"]), Allowed([f"{THIS_MODULE}:Outer"])):
        with pytest.raises(UsageError, match=r"is not allowed here: .*module to init_rpc"):
            allowed.resolve(f"{THIS_MODULE}:function")


def test_single_names_packages_and_decorated_functions() -> None:
    assert Allowed(["os:getcwd"]).resolve("os:getcwd") is os.getcwd
    package = THIS_MODULE.rpartition(".")[0]
    if package:
        assert Allowed([f"{package}.*"]).resolve(f"{THIS_MODULE}:function") is function
    assert Allowed().resolve(f"{THIS_MODULE}:_decorated") is _decorated
    assert Allowed(["json.*"]).resolve("json.decoder:JSONDecoder").__name__ == "JSONDecoder"
    with pytest.raises(UsageError, match=r"_private' is not allowed here: its name begins with _; .*init_rpc"):
        Allowed([THIS_MODULE]).resolve(f"{THIS_MODULE}:_private")
    assert Allowed([f"{THIS_MODULE}:_private"]).resolve(f"{THIS_MODULE}:_private") is _private
    with pytest.raises(UsageError, match=f"imported' is not allowed here: {THIS_MODULE} does not define it itself"):
        Allowed([THIS_MODULE]).resolve(f"{THIS_MODULE}:imported")
    with pytest.raises(UsageError, match="cannot be imported"):
        Allowed(["no_such_module_at_all"]).resolve("no_such_module_at_all:f")


def test_errors_about_built_in_modules_suggest_single_names() -> None:
    for name in ("builtins:min", "os:getcwd"):
        with pytest.raises(UsageError, match=rf"'{name}' is not allowed here; .* init_rpc\(allow=\['{name}'\]"):
            Allowed().resolve(name)


@pytest.mark.parametrize("entry", ["", "*", 3])
def test_invalid_entries_are_rejected(entry: Any) -> None:
    with pytest.raises(UsageError, match="allow has"):
        Allowed([entry])


def test_methods_of_allowed_classes() -> None:
    value = Outer()
    allowed = Allowed([THIS_MODULE])
    assert allowed.check_method(value, "method")() == 4
    assert allowed.check_method(value, "__call__")() == 7
    for name in ("_hidden", "__init__", "__class__", "__reduce__"):
        with pytest.raises(UsageError, match="is not allowed here"):
            allowed.check_method(value, name)
    with pytest.raises(UsageError, match=f"its name begins with _; .*'{THIS_MODULE}:Outer._hidden'"):
        allowed.check_method(value, HIDDEN)
    assert Allowed([f"{THIS_MODULE}:Outer._hidden"]).check_method(value, HIDDEN)() == 6
    with pytest.raises(UsageError, match="has no method 'nothing'"):
        allowed.check_method(value, "nothing")
    with pytest.raises(UsageError, match="decorate the class"):
        Allowed().check_method(value, "method")
    with pytest.raises(UsageError, match="not allowed"):
        allowed.check_method([], "append")


@pytest.mark.parametrize("bad", [lambda: 0, "nothing"])
def test_objects_without_a_qualified_name_are_rejected(bad: Callable[[], int] | str) -> None:
    with pytest.raises(UsageError):
        qualified_name(bad)


def test_the_main_script_has_one_name_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale() -> int:
        return 8

    scale.__module__, scale.__qualname__ = "__mp_main__", "scale"  # the name that multiprocessing gives the main script
    assert qualified_name(scale) == "__main__:scale"
    monkeypatch.setattr(sys.modules["__main__"], "scale", scale, raising=False)
    for entry in ("__main__", "__mp_main__"):
        assert Allowed([entry]).resolve("__main__:scale") is scale


def test_functions_of_tensors_are_allowed_by_their_public_names() -> None:
    torch = pytest.importorskip("torch")
    allowed = Allowed(["torch", "torch.nn.functional", "torch.linalg"])
    for function, name in (
        (torch.add, "torch:add"),
        (torch.ones, "torch:ones"),
        (torch.einsum, "torch:einsum"),
        (torch.Tensor.add, "torch:Tensor.add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.nn.functional.gelu, "torch.nn.functional:gelu"),
        (torch.linalg.norm, "torch.linalg:norm"),
    ):
        assert qualified_name(function) == name
        assert allowed.resolve(name) is function
    assert allowed.check_method(torch.ones(2), "sum")() == 2
    for hidden in ("torch:from_file", "torch:import_ir_module", "torch:load", "torch:hub.load", "torch:nn.Linear"):
        with pytest.raises(UsageError, match=f"'{hidden}' is not allowed here: .*its name to init_rpc"):
            allowed.resolve(hidden)
    assert Allowed(["torch:from_file"]).resolve("torch:from_file") is torch.from_file
    with pytest.raises(UsageError, match="cannot find"):
        qualified_name(torch.import_ir_module)


_REFUSED_METHODS = """
    const_data_ptr data_ptr eig index is_shared lstsq module_load new record_stream register_hook
    register_post_accumulate_grad_hook reinforce resize resize_as set_ share_memory_ solve storage storage_type symeig
    untyped_storage
"""


def _is_allowed(find: Callable[..., Any], *names: Any) -> bool:
    try:
        find(*names)
    except UsageError:
        return False
    return True


def test_only_tensor_functions_of_torch_are_allowed() -> None:
    """No allowed function of torch opens files, compiles code or changes settings of the process."""
    torch = pytest.importorskip("torch")
    allowed = Allowed(["torch"])
    of_tensors = {*dir(torch._C._VariableFunctions), *dir(torch.functional)} - {"from_file"}
    names = {name for name in dir(torch) if _is_allowed(allowed.resolve, f"torch:{name}")}
    assert len(names) > 500
    assert names <= of_tensors
    assert {name for name in torch.functional.__all__ if name not in names} <= {
        "align_tensors",
        "pca_lowrank",
        "svd_lowrank",
    }
    for name in ("PyTorchFileWriter", "PyTorchFileReader", "compile", "ScriptModuleSerializer", "set_default_dtype"):
        with pytest.raises(UsageError, match=f"'torch:{name}' is not allowed here: .*functions and methods that comp"):
            allowed.resolve(f"torch:{name}")
    assert Allowed(["torch:compile"]).resolve("torch:compile") is torch.compile


def test_only_computing_methods_of_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    allowed = Allowed(["torch", "torch.nn.parameter"])
    value, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    methods = [name for name in dir(torch.Tensor) if name[0] != "_" and callable(getattr(torch.Tensor, name))]
    refused = {name for name in methods if not _is_allowed(allowed.check_method, value, name)}
    assert refused <= set(_REFUSED_METHODS.split())
    assert refused >= {"data_ptr", "new", "set_", "storage", "share_memory_", "register_hook"}
    assert {name for name in methods if not _is_allowed(allowed.resolve, f"torch:Tensor.{name}")} == refused
    assert {name for name in methods if not _is_allowed(allowed.check_method, parameter, name)} == refused
    with pytest.raises(UsageError, match=r"'data_ptr' of torch.Tensor is not allowed here: .*'torch:Tensor.data_ptr'"):
        allowed.check_method(value, "data_ptr")
    assert Allowed(["torch:Tensor.data_ptr"]).check_method(value, "data_ptr")() == value.data_ptr()
    writer = torch.PyTorchFileWriter(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="not allowed here"):
        allowed.check_method(writer, "write_record")
    writer.write_end_of_file()


def test_a_class_method_has_a_name() -> None:
    assert qualified_name(Outer.made) == f"{THIS_MODULE}:Outer.made"
    assert qualified_name(math.sqrt) == "math:sqrt"


def test_names_may_be_given_as_text() -> None:
    assert qualified_name("a.b:c.d") == "a.b:c.d"
    assert qualified_name("a.b.c") == "a.b:c"
