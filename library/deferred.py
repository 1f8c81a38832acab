"""Packages that are loaded at the first use of what only they have. Loads no torch.

Some packages load all of their modules, or all of another package, for the sake of one name. A deferred package stands
for such a one in `sys.modules`; it has the names given here, and loads the real package for any other.
"""

import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class DeferredPackage(ModuleType):
    """Stands for a package until it is loaded."""

    def __init__(
        self, spec: ModuleSpec, names: Mapping[str, Any], parts: Mapping[str, str] | None, then: Callable[[], None]
    ) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__package__, self.__path__ = spec, spec.name, spec.submodule_search_locations or []
        self._parts, self._then, self._lock = parts, then, threading.RLock()
        vars(self).update(names)

    @property
    def _is_apart(self) -> bool:
        """Whether its modules can be loaded without it."""
        return self._parts is not None

    def __getattr__(self, name: str) -> Any:
        """Load the module that has this name, or else the whole package."""
        if name.startswith("__"):  # such as __file__, which `inspect` reads from every module
            raise AttributeError(f"{self.__name__} is not loaded yet, so it has no {name}")
        if module := (self._parts or {}).get(name):
            return getattr(importlib.import_module(f"{self.__name__}.{module}"), name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Load the package, unless it is loaded, and return it."""
        name = self.__name__
        with self._lock:
            if (loaded := sys.modules.get(name)) is not self and loaded is not None:
                return loaded
            del sys.modules[name]
            collecting = gc.isenabled()
            gc.disable()  # what is imported stays, as in `library.imports.without_collecting`
            try:
                package = importlib.import_module(name)
            finally:
                if collecting:
                    gc.enable()
            for child, module in [*vars(self).items()]:  # set by the import of each module
                if isinstance(module, ModuleType) and sys.modules.get(f"{name}.{child}") is module:
                    vars(package).setdefault(child, module)
            self._then()
            return package


class _LoadedModule(Loader):
    """Returns a module that has been loaded while its package was."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _PackageFirst(MetaPathFinder):
    """Loads a deferred package before the first of its modules, where those need it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(package, DeferredPackage) and not package._is_apart:
            package.load()
            if module := sys.modules.get(fullname):  # Python would load it a second time, by the spec that it has
                module.__spec__ = importlib.util.spec_from_loader(fullname, _LoadedModule(module))
                return module.__spec__
        return None


# Why: docs/decisions/2026-11-28-packages-are-deferred.md
def defer_package(
    name: str,
    names: Mapping[str, Any] | None = None,
    parts: Mapping[str, str] | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Defer a package that is installed and not loaded yet.

    `names` are values to use instead of it. `parts` are names by the module that has them, for a package whose modules
    can be loaded without it; None for one that must be loaded before its modules. `then` is called once it is loaded.
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    if not any(isinstance(finder, _PackageFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PackageFirst())
    parent, _, child = name.rpartition(".")
    package = sys.modules[name] = DeferredPackage(spec, names or {}, parts, then)
    setattr(sys.modules[parent], child, package)


def is_loaded(name: str) -> bool:
    return name in sys.modules and not isinstance(sys.modules[name], DeferredPackage)
