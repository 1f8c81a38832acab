"""What a training loads before its first step, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from library.families import config_class
from library.families.qwen_image import text_encoder
from library.families.qwen_image_21 import text_encoder as qwen_21_text
from library.families.qwen_image_21 import vae as qwen_21_vae
from library.families.shared import autoencoder, clip, language_model, qwen3_vl, qwen_vae, statistics_vae, t5, weights
from tests.source import ROOT
from tests.training import FULL_OF_EACH_KIND, LORAS, config_of, copied, pictures, train

# Adapters, optimizers, tables, statistics and exports that no plain training asks for, each seconds or hundreds of MB.
UNUSED = {
    "peft",
    "bitsandbytes",
    "pandas",
    "sklearn",
    "scipy",
    "onnx",
    "onnxruntime",
    "torchvision",
    "torchao",
    "cv2",
    "tensorboard",
    "wandb",
    "matplotlib",
    "gradio",
    "lycoris",
    "torch._inductor.compile_fx",
}


# Runs scripts one after the other, as each would be run by itself.
SCRIPTS_IN_TURN = """
import runpy, sys
for script, toml in zip(*[iter(sys.argv[1:])] * 2):
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)
    sys.argv = [script, "--config_file", toml]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (script, end.code)
"""


def imported(*command):
    """Every module that a Python process imports; the process must end well."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=600,
    )
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(names)


def test_a_training_imports_nothing_that_it_does_not_use(demo, squares, tmp_path):
    """Of no family: what all of them import is nothing of that."""
    from library.config.formats import to_toml

    turns, values = [], {"train_data_dir": squares, "max_train_steps": 1}
    values |= {"cache_latents_to_disk": False, "cache_text_encoder_outputs_to_disk": False}  # all are loaded
    for script in LORAS:
        config = config_of(demo, script, output_dir=tmp_path / script, **values)
        file = tmp_path / f"{script}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        turns += [f"sd-scripts/{script}.py", file]
    loaded = imported("-c", SCRIPTS_IN_TURN, *turns)
    assert {"torch", *(f"library.families.{config_class(script).family}.model" for script in LORAS)} <= loaded
    assert not loaded & UNUSED
    assert all(list((tmp_path / script).glob("*.safetensors")) for script in LORAS)


# Loaded where something is compiled, sharded or encoded.
LATER = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers", "jinja2"}
NETWORK_FOLDERS = tuple(f"diffusers.models.{folder}." for folder in ("autoencoders", "transformers", "unets"))
NETWORKS = {"transformers.dual_transformer_2d", "transformers.transformer_2d"} | {
    f"unets.unet_2d_{part}" for part in ("blocks", "condition")
}


def test_a_cached_training_loads_no_compiler_no_text_model_and_one_network(demo, tmp_path):
    """Eager steps and a schedule, in one process. Tokens of captions are counted by what the first training stored."""
    from library.config.formats import to_toml

    images = pictures(tmp_path / "pictures")
    for caption in images.rglob("*.txt"):
        caption.write_text("toy " * 200)
    values = {"train_data_dir": images, "max_train_steps": 2, "lr_scheduler": "cosine"}
    turns = []
    for script in ("sdxl_train_network", "flux_train_network", "flux_2_train_network"):
        train(config_of(demo, script, output_dir=tmp_path / "first", **values, **TO_DISK))
        config = config_of(demo, script, output_dir=tmp_path / script, **values, **TO_DISK)
        file = tmp_path / f"{script}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        turns += [f"sd-scripts/{script}.py", file]
    loaded = imported("-c", SCRIPTS_IN_TURN, *turns)
    assert not (LATER & loaded), sorted(LATER & loaded)
    networks = {name for name in loaded if name.startswith(NETWORK_FOLDERS)}
    assert networks == {f"diffusers.models.{name}" for name in NETWORKS}


UNET_AFTER_A_TOKENIZER = """
import sys
from transformers import tokenization_utils_tokenizers
from library.imports import without_optional
with without_optional("diffusers"):
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.utils import is_transformers_available
assert is_transformers_available()
"""


def test_a_u_net_loads_no_text_models_where_a_tokenizer_is_loaded():
    loaded = imported("-c", UNET_AFTER_A_TOKENIZER)
    assert "transformers" in loaded and "diffusers.loaders.lora_base" in loaded
    assert "transformers.modeling_utils" not in loaded


def test_what_asks_the_hub_loads_no_network_library_before_it_asks():
    loaded = imported("-c", "import library.downloads.hub_files")
    assert "huggingface_hub" in loaded
    assert not loaded & {"httpx", "httpx2", "huggingface_hub.errors", "huggingface_hub.hf_api"}


@pytest.fixture
def read(monkeypatch):
    """Every file of weights that is opened, and every VAE and text encoder that is built."""
    counts = {"opened": [], "built": []}

    def spy(place, name, kind, what):
        real = getattr(place, name)

        def wrapped(*given, **named):
            counts[kind].append(what(*given))
            return real(*given, **named)

        monkeypatch.setattr(place, name, wrapped)

    spy(weights, "_open_file", "opened", lambda path, mmap: path.name)
    spy(autoencoder, "build_autoencoder", "built", lambda *_: "vae")
    spy(clip, "build_encoder", "built", lambda *_: "clip")
    spy(t5, "load_t5", "built", lambda *_: "t5")
    spy(qwen_vae, "build_qwen_vae", "built", lambda *_: "vae")
    spy(statistics_vae, "build_statistics_vae", "built", lambda *_: "vae")
    spy(text_encoder, "build_text_encoder", "built", lambda *_: "qwen")
    spy(qwen3_vl, "empty_qwen3_vl", "built", lambda *_: "qwen")
    spy(qwen_21_vae, "build_qwen_21_vae", "built", lambda *_: "vae")
    spy(qwen_21_text, "empty_qwen_21_encoder", "built", lambda *_: "qwen")
    spy(language_model, "empty_qwen3", "built", lambda *_: "qwen")
    return counts


TO_DISK = {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True, "sample_prompts": None}


@pytest.mark.parametrize("script", [*LORAS, *FULL_OF_EACH_KIND])
def test_what_is_cached_is_not_read_again(demo, tmp_path, read, script):
    """Neither the VAE's nor the text encoders' files are opened; losses and the file are the same to the last bit."""
    values = {"train_data_dir": pictures(tmp_path / "pictures"), "max_train_steps": 2, **TO_DISK}
    first = train(config_of(demo, script, output_dir=tmp_path / "first", **values))
    assert "vae" in read["built"] and {"clip", "qwen"} & set(read["built"])
    read["opened"].clear(), read["built"].clear()
    config = config_of(demo, script, output_dir=tmp_path / "second", **values)
    second = train(config)
    assert second.losses == first.losses
    ours, before = second.tensors(), first.tensors()
    assert ours.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.items())
    # Adapters that are saved are read back; a whole SDXL model's file holds all networks, so they are read for it.
    assert set(read["opened"]) - {second.file.name} == {Path(config.model.pretrained_model_name_or_path).name}
    assert set(read["built"]) == ({"vae", "clip"} if script == "sdxl_train" else set())


def test_another_file_under_the_same_name_is_read(demo, tmp_path, read):
    """Its latents are others, so those that are cached are made anew."""
    own = copied(demo, tmp_path / "own")
    values = {"train_data_dir": pictures(tmp_path / "pictures"), "max_train_steps": 1, **TO_DISK}
    first = train(config_of(own, "flux_train_network", output_dir=tmp_path / "first", **values))
    read["built"].clear()
    config = config_of(own, "flux_train_network", output_dir=tmp_path / "second", **values)
    stored = weights.open_weights(config.model.ae)
    from safetensors.torch import save_file

    save_file({name: stored[name] * 1.5 for name in stored}, config.model.ae)
    done = train(config)
    assert read["built"] == ["vae"]
    assert done.losses != first.losses
