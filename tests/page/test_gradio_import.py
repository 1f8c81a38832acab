"""Gradio is imported without its stub files, and would be found out if it changed how it writes them."""

import importlib.util
from pathlib import Path

from kohya_gui.server.gradio_import import MODULE, WRITER, WithoutStubFiles


def test_only_what_writes_the_stub_files_is_replaced(tmp_path):
    (tmp_path / "component_meta.py").write_text(f"def {WRITER}(*given): raise SystemExit\ndef other(): return 5\n")
    spec = WithoutStubFiles().find_spec(MODULE, [str(tmp_path)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert getattr(module, WRITER)(int, "int", []) is None and module.other() == 5


def test_all_other_modules_are_found_as_usual():
    assert WithoutStubFiles().find_spec("gradio.components", None) is None


def test_the_installed_gradio_still_writes_them_by_that_function():
    source = Path(importlib.util.find_spec("gradio").origin).with_name("component_meta.py")
    assert f"{WRITER}(component_class, name, events)" in source.read_text(encoding="utf-8")
