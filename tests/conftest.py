"""What holds for every test: two cores, no network, and never a file in the user's home."""

import gc
import logging
import os
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests.quick import mark_item
from tests.source import SCRATCH

# Rare collections of garbage: imports and PyTorch's tracing make many small objects that live, a tenth of whose time
# they took.
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
    # Shared by all tests and all runs of them: what one compiled, the next finds.
    TORCHINDUCTOR_CACHE_DIR=str(SCRATCH / "inductor"),
    # The processor's own word for what it can do. Else each process that generates code starts others to try it, and
    # each new cache has the trials compiled first: some 15 s of CPU time.
    TORCHINDUCTOR_VEC_ISA_OK="1",
    # PyTorch collects garbage after every graph, a hundredth of the time of compiling; so does each file of tests.
    TORCH_DYNAMO_RUN_GC_AFTER_COMPILE="0",
)
for name in ("KOHYA_RUN_DIR", "HF_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(name, None)

# uv leaves it to Python to compile what it installs. Where images of containers forbid Python to keep that, as many do,
# each process compiled all that it imports: two to seven seconds of CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# PyTorch writes down every graph for those who listen to this log, a twentieth of the time of compiling; pytest would
# listen to it in each test.
logging.getLogger("torch.__trace").addHandler = lambda handler: None

# No test cuts the power: nothing waits until the disk has what is written, which a training does sixteen times.
os.fsync = lambda handle: None

# The same examples every time, and no clock: a busy machine is no failure.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


# Files with a single test of half a minute or more: begun first, so that it is not the last that one worker waits for.
LONGEST = {
    "test_style.py",
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
    """Mark what `./setup.sh test --quick` leaves out, skip what needs a GPU where there is none, and begin with what
    takes longest."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        mark_item(item)


@pytest.fixture(scope="module", autouse=True)
def light():
    """Each file begins with what it needs and no more: what others compiled is dropped, and what stays, imported
    packages above all, is not looked through again by every collection of garbage, which trainings do on purpose."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    # PyTorch empties the processor's caches to time the guards of every graph, which it writes to a log alone.
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
    if settings := sys.modules.get("library.compiler.torch_settings"):
        settings.THREAD_SETTINGS.want([])  # which blocks that were compiled outside of a training have left
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_training_before():
    """accelerate keeps the precision of a process's first training, and refuses another one in the next."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)
