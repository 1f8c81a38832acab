"""benchmarks/golden.py: the same code equals its recording, and what another version does otherwise is named."""

import json

import pytest

from benchmarks import golden
from tests.training import pictures

# A stand-in for a training: what differs in every run differs here too, and `planted` stands for another version.
SCRIPT = """
import json, os, sys, time, tomllib
from pathlib import Path
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

config = tomllib.loads(Path(sys.argv[-1]).read_text())
planted = json.loads(Path(__file__).with_name("planted.json").read_text())
out, images = Path(config["output_dir"]), Path(config["train_data_dir"])
run = out / "runs" / f"m-20260101-{time.time_ns() % 10**6:06}-{os.urandom(2).hex()}"
run.mkdir(parents=True)
step = {"kind": "step", "t": time.time(), "step": 1, "loss": planted["loss"], "compute_s": time.time()}
phase = {"kind": "phase", "t": 0, "name": planted["phase"]}
(run / "progress.jsonl").write_text(json.dumps(step) + "\\n" + json.dumps(phase) + "\\n")
(run / "run.json").write_text(json.dumps({"pid": os.getpid(), "since_boot": time.monotonic(), "config": config}))
about = {"ss_training_started_at": str(time.time()), "ss_network_dim": str(config["network_dim"])}
tensors = {"a": np.full((2, 3), planted["weight"], np.float32), "b": np.ones(2, np.float16)}
save_file(tensors, out / "m.safetensors", about)
Image.new("RGB", (4, 4), planted["color"]).save(out / "m_000001_20261122042619_1.png")
np.savez(images / "0_flux.npz", latents=np.full(3, planted["latent"]), made_from=str(images))
print("trained at", time.time() > 0, ", 0.12 s/it")
"""
SAME = {"loss": 0.1, "phase": "saving", "weight": 1.0, "color": "red", "latent": 2.0}


@pytest.fixture
def tree(tmp_path):
    """A version of the code whose script ends at once, and the inputs of a recording."""
    (tmp_path / "tree" / "sd-scripts").mkdir(parents=True)
    (tmp_path / "tree" / "sd-scripts" / "flux_train_network.py").write_text(SCRIPT, encoding="utf-8")
    pictures(tmp_path / "recording" / "inputs" / "images", sizes=((8, 8),))
    return tmp_path / "tree"


def golden_run(what, tree, **planted):
    """Record or compare one case, in a version of the code where something is planted; the exit code."""
    (tree / "sd-scripts" / "planted.json").write_text(json.dumps(SAME | planted), encoding="utf-8")
    return golden.main([what, str(tree.parent / "recording"), "--tree", str(tree), "--case", "flux_lora"])


def test_what_differs_from_a_recording_is_named(tree, capsys):
    assert golden_run("record", tree) == 0
    assert golden_run("compare", tree) == 0
    assert "flux_lora: equal" in capsys.readouterr().out

    assert golden_run("compare", tree, phase="saving the file") == 0  # a text may be reworded
    assert "text differs" in capsys.readouterr().out

    assert golden_run("compare", tree, loss=0.10000000000000002, weight=1.0000001, color="blue", latent=2.5) == 1
    printed = capsys.readouterr().out
    assert "0.1 -> 0.10000000000000002" in printed
    assert "m.safetensors: tensors: a:" in printed and "tensors: b" not in printed and "metadata" not in printed
    assert "m_000001_TIME_1.png: pixels" in printed and "0_flux.npz: latents" in printed
    assert "0 of 1 cases equal" in printed


def test_a_case_that_fails_differs(tree, capsys):
    golden_run("record", tree)
    (tree / "sd-scripts" / "flux_train_network.py").write_text("raise SystemExit('no such option')", encoding="utf-8")
    assert golden_run("compare", tree) == 1
    assert "no such option" in capsys.readouterr().out
