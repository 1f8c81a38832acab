"""Importing Gradio without the stub files that it writes for editors."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE, WRITER = "gradio.component_meta", "create_or_modify_pyi"


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and let its writer do nothing; a later version may have none."""
        super().exec_module(module)
        if hasattr(module, WRITER):
            setattr(module, WRITER, lambda *_: None)


# Why: docs/decisions/2026-11-23-gradio-without-stub-files.md
class WithoutStubFiles(importlib.abc.MetaPathFinder):
    """Finds one module of Gradio where it is, and takes from it what writes a .pyi file for each component."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with a loader of ours; None for all other modules, which others find."""
        if fullname != MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=_Loader(fullname, spec.origin))
