"""Import Gradio and build a page without the work that the page does not need."""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from library.config import environment

GRADIO_PACKAGE = "gradio"
MODULE, WRITER = "gradio.component_meta", "create_or_modify_pyi"
LATER = "pandas"  # imported by Gradio for components that the page does not use


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and disable its writer of .pyi files; a later version may have none."""
        super().exec_module(module)
        if hasattr(module, WRITER):
            setattr(module, WRITER, lambda *_: None)


class _WithoutProxies(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        # Without proxy settings, as the module creates a client for downloads that the page never uses.
        with environment.without_network_settings():
            super().exec_module(module)


# Why: docs/decisions/2026-11-23-gradio-imports-less.md
class LightGradio:
    """Finds three modules: Gradio itself, imported as if there were no proxies; one whose writing of components' .pyi
    files is disabled; and one that is loaded on first use."""

    def __init__(self) -> None:
        self.left = {GRADIO_PACKAGE, MODULE, LATER}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec with another loader; None for all other modules."""
        if fullname not in self.left:
            return None
        self.left.discard(fullname)
        if not self.left and self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or spec.loader is None:
            return None
        if fullname == LATER:
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec
        if fullname == GRADIO_PACKAGE:
            spec.loader = _WithoutProxies(fullname, spec.origin)
            return spec
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=_Loader(fullname, spec.origin))


class _NoApp:
    @staticmethod
    def create_app(*_: Any, **__: Any) -> None:
        return None


@contextmanager
def without_apps() -> Iterator[None]:
    """Build a page without the two server applications that Gradio creates besides the mounted one."""
    from gradio import blocks

    real, blocks.App = blocks.App, _NoApp  # type: ignore[misc]
    try:
        yield
    finally:
        blocks.App = real  # type: ignore[misc]
