"""A kill ends all processes of a training, also those that are started while it happens."""

import sys
import uuid

import psutil

from library.runs import process

# A launcher, whose child starts others without a pause.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], *sys.argv[1:]])"
STARTING = """
import subprocess, sys
print("ready", flush=True)
while True:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", sys.argv[1]])
"""


def of_mark(mark):
    found = []
    for one in psutil.process_iter():
        try:
            if mark in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            pass
    return found


def test_a_kill_leaves_no_process_that_a_dying_one_has_started():
    mark = uuid.uuid4().hex
    launcher = psutil.Popen([sys.executable, "-c", LAUNCHER, mark, STARTING], stdout=-1)
    try:
        assert launcher.stdout.readline().strip() == b"ready"
        assert process.kill([psutil.Process(launcher.pid)])
        launcher.wait(10)
        assert not of_mark(mark)
    finally:
        for left in of_mark(mark):
            left.kill()
