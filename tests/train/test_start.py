"""What a training loads before its first step, in a process of its own."""

import re
import subprocess
import sys

import pytest

from tests.source import ROOT
from tests.training import LORAS, config_of

# Adapters, optimizers, tables, statistics and exports that no plain training asks for, each seconds or hundreds of MB.
UNUSED = {"peft", "bitsandbytes", "pandas", "sklearn", "scipy", "onnx", "onnxruntime", "torchvision", "torchao", "cv2",
          "tensorboard", "wandb", "matplotlib", "gradio", "lycoris", "torch._inductor.compile_fx"}  # fmt: skip


def imported(*command):
    """Every module that a Python process imports; the process must end well."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, command)],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=600,
    )  # fmt: skip
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(names)


@pytest.mark.parametrize("script", LORAS)
def test_a_training_imports_nothing_that_it_does_not_use(demo, squares, tmp_path, script):
    from library.config.schema import to_toml

    config = config_of(demo, script, train_data_dir=squares, output_dir=tmp_path / "out", max_train_steps=1)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    loaded = imported(f"sd-scripts/{script}.py", "--config_file", file)
    assert "torch" in loaded
    assert not loaded & UNUSED
