"""A kill ends all processes of a training, also those that are started while it happens."""

import sys
import uuid

import psutil
import pytest

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


@pytest.mark.parametrize("way", [process.kill, process.end])
def test_a_process_of_another_user_is_left_but_none_of_the_others(monkeypatch, way):
    def refuse(own):
        def act(one):
            if one.pid == others.pid:
                raise psutil.AccessDenied(one.pid)
            own(one)

        return act

    others, ours = (psutil.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(2))
    try:
        with monkeypatch.context() as patch:
            for name in ("suspend", "terminate", "kill"):
                patch.setattr(psutil.Process, name, refuse(getattr(psutil.Process, name)))
            assert not way([psutil.Process(one.pid) for one in (others, ours)], grace=1)
        assert process.exists(others.pid) and not process.exists(ours.pid)
    finally:
        for one in filter(psutil.Popen.is_running, (others, ours)):
            one.kill()
            one.wait(10)
