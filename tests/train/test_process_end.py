"""The end of a training's process: nothing is lost, and nothing is taken apart that the system frees at once."""

import os
import subprocess
import sys

import pytest

from tests.source import ROOT

ENDING = """
import atexit, threading, time
from library.cli.train_script import end_at_once

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
kept.itself = kept

printed = threading.Event()

def work():
    printed.wait()
    time.sleep(0.2)
    print("thread")

threading.Thread(target=work).start()
atexit.register(print, "registered first")
atexit.register(print, "registered last")
print("main", end=" ")
printed.set()
end_at_once({code})
"""


def ended(code, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("code", [0, 130])
def test_threads_exit_functions_and_output_come_before_the_end(code):
    done = ended(ENDING.format(code=code))
    assert done.stdout == "main thread\nregistered last\nregistered first\n"
    assert (done.returncode, done.stderr) == (code, "")


def test_a_program_that_runs_a_script_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom library.cli.train_script import end_at_once\nend_at_once(0)\nsys.exit(0)\n")
    around = """
import runpy, sys
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except SystemExit:
    print("continues")
sys.exit(3)
"""
    done = ended(around, script)
    assert (done.returncode, done.stdout) == (3, "continues\n")


def test_a_closed_output_is_reported_as_ever():
    closing = "import os\nfrom library.cli.train_script import end_at_once\nprint('text')\nos.close(1)\nend_at_once(0)"
    done = ended(closing)
    assert done.returncode == 120 and "Exception ignored" in done.stderr
