"""Decide which functions and classes of this process other workers may use by name (``module:qualified.name``).

If a module is allowed, other workers may use the public names that the module *defines*, but not the names that it
imports. This module does no I/O, except that it imports allowed modules.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from paceline.errors import UsageError, printable

_Named = TypeVar("_Named", bound=Callable[..., Any])
_decorated: set[str] = set()
_SPAWNED_MAIN = "__mp_main__"
"""The name of the main script's module in a process that `multiprocessing` has started with the method ``spawn``."""
_TENSOR_FUNCTIONS = "_VariableFunctionsClass."
_TORCH_HOMES: Final = {
    "torch._C._fft": ("torch.fft", "fft_"),
    "torch._C._linalg": ("torch.linalg", "linalg_"),
    "torch._C._nn": ("torch.nn.functional", ""),
    "torch._C._special": ("torch.special", "special_"),
    "torch._tensor": ("torch", ""),
    "torch.functional": ("torch", ""),
}
"""For each internal module of PyTorch: the public module, and the prefix that only the internal names have."""
_OF_FILES_OR_MEMORY = frozenset(
    {
        "from_file",
        "Tensor.const_data_ptr",
        "Tensor.data_ptr",
        "Tensor.new",  # accepts a memory address
        "Tensor.record_stream",
        "Tensor.set_",
        "Tensor.untyped_storage",
    }
)
"""The PyTorch functions and tensor methods that are forbidden, because they open files or use memory addresses."""
_COMPUTING_IN_PYTHON = frozenset(
    f"Tensor.{name}"
    for name in (
        *("backward", "dim_order", "istft", "lu", "norm", "split", "stft"),
        *("to_sparse_coo", "unflatten", "unique", "unique_consecutive"),
    )
)
"""The tensor methods that are written in Python and that only compute, so that other workers may call them."""
_NOT_COMPUTING: Final = "for torch, allow covers only functions and methods that compute with tensors"
_WITH_NAMES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_OWN = ("paceline.rpc.autograd", "paceline.rpc.optimizer")


def allow(function: _Named) -> _Named:
    """Let other processes call this function, or create and send values of this class (decorator)."""
    _decorated.add(qualified_name(function))
    return function


def qualified_name(function: Callable[..., Any] | str) -> str:
    """Return ``module:qualified.name`` for a function or a name such as ``package.module.name``. Raises UsageError."""
    if isinstance(function, str):
        if ":" in function:
            return function
        module, _, name = function.rpartition(".")
        if not module:
            raise UsageError(f"{function!r} does not name a function of a module; write module:function")
        return f"{module}:{name}"
    module, name = home_of(function)
    if not module or not name or "<" in name:
        raise UsageError(
            f"another process cannot find {printable(repr(function), 200)} by name; call a function that a module "
            "defines at its top level or in a class, or pass its name as module:function"
        )
    return f"{module}:{name}"


def home_of(function: Any) -> tuple[str, str]:
    """Return the public module of a function or class, and its name in that module. An unknown part is empty.

    PyTorch's tensor functions and methods belong to ``torch``. For PyTorch's other C functions the module is unknown.
    """
    if isinstance(function, types.ModuleType):
        return "", ""  # access to a module's attribute may raise any error (as in torch.classes)
    module = str(getattr(function, "__module__", None) or "")
    name = str(getattr(function, "__qualname__", ""))
    if module == _SPAWNED_MAIN:
        return "__main__", name
    if module in _TORCH_HOMES:
        home, prefix = _TORCH_HOMES[module]
        return home, name.removeprefix(prefix)
    if module == "torch" and isinstance(function, types.BuiltinFunctionType):
        return (module, name.removeprefix(_TENSOR_FUNCTIONS)) if name.startswith(_TENSOR_FUNCTIONS) else ("", name)
    if isinstance(function, types.MethodDescriptorType) and function.__objclass__.__qualname__ == "TensorBase":
        return "torch", f"Tensor.{function.__name__}"
    if not isinstance(function, _WITH_NAMES) and name == type(function).__qualname__:
        return module, ""  # a function of torch.jit.script has the name of its class instead of its own name
    return module, name


def computes_with_tensors(function: Any) -> bool:
    """Return whether `function` is a function of ``torch`` that only computes with tensors.

    ``torch`` also has functions that open files, compile code or change global settings.
    """
    module, name = home_of(function)
    if module != "torch" or name in _OF_FILES_OR_MEMORY:
        return False
    if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return bool(name)  # home_of returns no name for functions that do not compute with tensors
    return name in _COMPUTING_IN_PYTHON or getattr(function, "__module__", "") == "torch.functional"


class Allowed:
    """The names of functions and classes that other workers may use in this process. Thread-safe."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Each entry is a module, a package with all its modules (``package.*``), or a name (``module:function``)."""
        self._modules: set[str] = set()
        self._packages: tuple[str, ...] = ()
        self._names: set[str] = set()
        self._found: dict[str, Any] = {}
        self._lock = threading.Lock()
        for entry in entries:
            if not isinstance(entry, str) or not entry or entry in ("*", ".*"):
                raise UsageError(
                    f"allow has {printable(repr(entry), 100)}; expected a module ('my_module'), a package with all "
                    "its modules ('my_package.*') or a function ('my_module:function')"
                )
            if ":" in entry:
                self._names.add(entry)
            elif entry == _SPAWNED_MAIN:
                self._modules.add("__main__")
            elif entry.endswith(".*"):
                self._packages += (entry[:-1],)
                self._modules.add(entry[:-2])
            else:
                self._modules.add(entry)

    def resolve(self, name: str) -> Any:
        """Return an allowed function or class. Raises UsageError if the name is missing or not allowed."""
        found = self._found.get(name)
        if found is None:
            with self._lock:
                found = self._found[name] = self._resolve(name)
        return found

    def resolve_class(self, name: Any) -> type:
        found = self.resolve(name) if isinstance(name, str) else None
        if not isinstance(found, type):
            raise UsageError(f"{printable(repr(name), 200)} is not a class")
        return found

    def check_method(self, value: Any, method: str) -> Any:
        """Return the bound method of `value` if other workers may call it. Raises UsageError otherwise.

        They may call the public methods and ``__call__`` of an allowed class, and methods that are allowed by name.
        """
        kind = type(value)
        is_public = method == "__call__" or not method.startswith("_")
        module, name = home_of(kind)
        is_offered = is_public and self._offers_method(kind, method)
        if not is_offered and not self._has_name(f"{module}:{name}.{method}"):
            shown = (
                f"the method {printable(method, 100)!r} of {kind.__module__}.{kind.__qualname__} is not allowed here"
            )
            if not is_public:
                raise UsageError(f"{shown}: its name begins with _; {_by_name(f'{module}:{name}.{method}')}")
            if self.has_class(kind):
                raise UsageError(f"{shown}: {_NOT_COMPUTING}; {_by_name(f'{module}:{name}.{method}')}")
            raise UsageError(
                f"{shown}; pass its module to init_rpc(allow=[{module!r}]), or decorate the class with "
                "paceline.rpc.allow"
            )
        function = getattr(kind, method, None)
        if not callable(function):
            raise UsageError(f"{kind.__module__}.{kind.__qualname__} has no method {printable(method, 100)!r}")
        return getattr(value, method)

    def has_class(self, kind: type) -> bool:
        module, name = home_of(kind)
        return self._has_module(module) or self._has_name(f"{module}:{name}")

    def _offers_method(self, kind: type, method: str) -> bool:
        module, name = home_of(kind)
        function = getattr(kind, method, None)
        is_of_torch = "torch" in (module, home_of(function)[0]) and not self._has_name(f"{module}:{name}")
        return self.has_class(kind) and (not is_of_torch or computes_with_tensors(function))

    def _has_module(self, module: str) -> bool:
        return module in self._modules or module.startswith(self._packages)

    def _has_name(self, name: str) -> bool:
        return name in self._names or name in _decorated

    def _resolve(self, name: str) -> Any:
        module_name, _, path = name.partition(":")
        steps = path.split(".")
        if module_name in _OWN:
            importlib.import_module(module_name)
        is_named = self._has_name(name)
        is_public = all(step and not step.startswith("_") for step in steps)
        if not is_named and not (is_public and self._has_module(module_name)):
            raise not_allowed(name)
        module = sys.modules.get(module_name)
        if module is None:
            try:
                module = importlib.import_module(module_name)
            except ImportError as error:
                raise UsageError(f"the module {module_name!r} cannot be imported here: {error}") from None
        found: Any = module
        for step in steps:
            found = getattr(found, step, None)
            if not is_named and home_of(found)[0] != module_name:
                if found is None:
                    raise UsageError(f"the module {module_name!r} has no {printable(path, 100)!r}")
                raise not_allowed(name, why=f"{module_name} does not define it itself")
        if not callable(found):
            raise UsageError(f"{printable(name, 200)!r} is not a function")
        if not is_named and module_name == "torch" and not computes_with_tensors(found):
            raise not_allowed(name, why=_NOT_COMPUTING)
        return found


def not_allowed(name: str, *, why: str = "") -> UsageError:
    shown = printable(name, 200)
    module, _, path = shown.partition(":")
    if any(step.startswith("_") for step in path.split(".")):
        why = "its name begins with _"
    if why:
        return UsageError(f"{shown!r} is not allowed here: {why}; {_by_name(name)}")
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        # The message does not recommend to allow the whole module, which would allow too many functions.
        return UsageError(f"{shown!r} is not allowed here; {_by_name(name)}")
    return UsageError(
        f"{shown!r} is not allowed here: pass its module to init_rpc(allow=[{module!r}]) in the called process, or "
        "decorate it there with paceline.rpc.allow"
    )


def _by_name(name: str) -> str:
    shown = printable(name, 200)
    return (
        f"pass its name to init_rpc(allow=[{shown!r}]) in the called process, or decorate it there with "
        "paceline.rpc.allow"
    )
