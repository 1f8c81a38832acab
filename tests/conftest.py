"""Settings of every test: one thread per process, no network, and no file in the user's home."""

import gc
import logging
import os
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests import links
from tests.exhaustive import mark_exhaustive
from tests.quick import mark_item
from tests.source import SCRATCH

# Collect garbage rarely: imports and PyTorch's tracing make many small objects that stay alive, and a tenth of their
# time went into collections that freed none of them.
gc.set_threshold(50_000, 20, 50)

HOME = tempfile.TemporaryDirectory(prefix="kohya-home-", ignore_cleanup_errors=True)

# Set before anything imports torch, gradio or a hub client, and inherited by every process that a test starts.
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    KOHYA_HOME=HOME.name,
    HF_HOME=str(SCRATCH / "huggingface"),
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    GRADIO_ANALYTICS_ENABLED="False",
    # Shared by all tests and all runs of them, so that each kernel is compiled once.
    TORCHINDUCTOR_CACHE_DIR=str(SCRATCH / "inductor"),
    # Trust the processor's flags. Otherwise each process that generates code tries vector instructions out in processes
    # of their own, and compiles the trials first where the cache is new: some 15 s of CPU time.
    TORCHINDUCTOR_VEC_ISA_OK="1",
    # PyTorch would collect garbage after every graph, 1% of the time of compiling; `light` below does so once per file.
    TORCH_DYNAMO_RUN_GC_AFTER_COMPILE="0",
)
for name in ("KOHYA_RUN_DIR", "HF_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(name, None)

# uv installs without compiling to bytecode. Many container images forbid Python to write bytecode, so each process
# would compile all that it imports: two to seven seconds of CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# PyTorch formats every graph for this log if it has a handler, 5% of the time of compiling, and pytest would add one in
# each test.
logging.getLogger("torch.__trace").addHandler = lambda handler: None

# No test cuts the power, so nothing has to wait until the disk has stored a file, as a training does sixteen times.
os.fsync = lambda handle: None

links.refuse_without()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    with links.skip_without():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    with links.skip_without():
        return (yield)


# The same examples every time, and no time limit: a test must not fail because the machine is busy.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def no_spare_process():
    """Start no process of the page's checks ahead: hardly a test needs it."""
    from library.check import check_process

    check_process.spare.prepare = lambda: None


# Files with a test of a third of a minute or more. They start first, so that no worker is left alone with one at the
# end.
LONGEST = {
    "test_style.py",
    "test_check_process.py",
    "test_toy.py",
    "test_kills.py",
    "test_background_compile.py",
    "test_fsdp.py",
    "test_launch.py",
    "test_learning.py",
    "test_autotune.py",
}


# Why: docs/decisions/2026-11-20-tests-run-in-parallel.md
def pytest_collection_modifyitems(items):
    """Mark the tests that `./setup.sh test` or its `--quick` leave out, skip those that need a GPU if there is none,
    and start with the longest."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        mark_item(item)
    mark_exhaustive(items)


@pytest.fixture(scope="module", autouse=True)
def light():
    """Before each file, drop what other files' tests compiled. What stays, above all imported packages, is frozen, so
    that the garbage collections of the trainings need not search it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    # PyTorch clears the processor's caches to time each graph's guards; the result would only go to a log.
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
    if settings := sys.modules.get("library.compiler.torch_settings"):
        settings.THREAD_SETTINGS.want([])  # blocks compiled outside of a training have left theirs
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_training_before():
    # accelerate keeps the precision of a process's first training, and refuses a different one in the next
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)
