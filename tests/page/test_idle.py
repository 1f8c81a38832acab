"""What the page costs while nobody uses it, which is mostly beside a training."""

import time

import pytest


def test_an_idle_page_hardly_wakes_up(served):
    """Of whatever waits in this process: a server that polls a thousand times a second would be seen."""
    resource = pytest.importorskip("resource", reason="POSIX counts how often a process wakes up")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 300
