"""What a training tells PyTorch before it is loaded."""

import os
import platform
import subprocess
import sys

import pytest

from library.config import environment
from library.config.environment import cpu_requested

STUB = """
import os, sys, types
stub = types.ModuleType("library.cli.train")
stub.train = lambda *_: print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "torch" in sys.modules)
sys.modules["library.cli.train"] = stub
sys.modules["library.compiler.torch_private"] = types.SimpleNamespace(defer_dynamo=lambda: None)  # it loads torch
from library.cli.train_script import main
from library.families.flux.options import FluxLora
for swapped in ("0", "4"):
    main(FluxLora, ["--pretrained_model_name_or_path", "a", "--train_data_dir", "b", "--output_dir", "c",
        "--output_name", "d", "--ae", "e", "--clip_l", "f", "--t5xxl", "g", "--gradient_checkpointing",
        "--blocks_to_swap", swapped])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there does PyTorch do it")
def test_memory_grows_in_place_where_blocks_are_swapped():
    variables = {name: value for name, value in os.environ.items() if name not in environment.ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", STUB], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.splitlines()[-2:] == ["None False", "expandable_segments:True False"], done.stderr


@pytest.mark.parametrize(
    ("system", "release", "given", "expected"),
    [
        ("linux", "6.8.0-generic", None, "expandable_segments:True"),
        ("linux", "6.8.0-generic", "max_split_size_mb:128", "max_split_size_mb:128"),
        ("linux", "5.15.90.1-microsoft-standard-WSL2", None, None),
        ("win32", "11", None, None),
    ],
)
def test_the_user_and_the_driver_are_heard(system, release, given, expected, monkeypatch):
    variables = {environment.ALLOCATOR[0]: given} if given else {}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    environment.expand_segments()
    assert variables.get(environment.ALLOCATOR[0]) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("yes", True), ("On", True), ("0", False), ("", False)]
)
def test_the_cpu_is_requested_by_the_words_that_accelerate_reads(monkeypatch, value, expected):
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    assert cpu_requested() is expected
