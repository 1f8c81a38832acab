"""Gradio is imported without what the page does not need; these tests fail if a new version imports differently."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from kohya_gui.gradio_host.gradio_import import MODULE, WRITER, LightGradio


def test_only_what_writes_the_stub_files_is_replaced(tmp_path):
    (tmp_path / "component_meta.py").write_text(f"def {WRITER}(*given): raise SystemExit\ndef other(): return 5\n")
    spec = LightGradio().find_spec(MODULE, [str(tmp_path)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert getattr(module, WRITER)(int, "int", []) is None and module.other() == 5


def test_all_other_modules_are_found_as_usual():
    assert LightGradio().find_spec("gradio.components", None) is None


def test_the_installed_gradio_still_writes_them_by_that_function():
    source = Path(importlib.util.find_spec("gradio").origin).with_name("component_meta.py")
    assert f"{WRITER}(component_class, name, events)" in source.read_text(encoding="utf-8")


SERVED = """
import os, sys
from kohya_gui.app import application, build_page
page = build_page()
app = application(page, {"host": "127.0.0.1"})
print("pandas.core" in sys.modules, type(page.app).__name__, page.app is not None)
from gradio.caching import pd
print(os.environ["no_proxy"], len(pd.DataFrame({"a": [1, 2]})))
"""


def test_the_page_is_put_together_without_pandas_and_its_queue_has_the_server_that_is_mounted():
    # And with variables at which the clients that Gradio makes when it is imported would fail.
    wrong = {
        "ALL_PROXY": "socks5://127.0.0.1:9",
        "https_proxy": "nonsense://x",
        "no_proxy": "localhost,::1/128",
        "SSL_CERT_FILE": "/nowhere/ca.pem",
    }
    how = {"capture_output": True, "text": True, "check": True, "env": {**os.environ, **wrong}}
    output = subprocess.run([sys.executable, "-c", SERVED], **how).stdout
    assert output.split() == ["False", "App", "True", "localhost,::1/128", "2"]
