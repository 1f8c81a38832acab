"""Options that change a training, each seen from where its user sees it; docs/dev/flags.md names the test of each.

Those of noise and loss are asked of each family's own step, the others of whole trainings that several of them share.
"""

import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional

from library import families, methods
from library.cli import train_script
from library.config.building import replace_options
from library.config.formats import to_toml
from library.config.ineffective import ineffective_options
from library.config.schema import options_of
from library.families import config_class
from library.objectives import loss
from tests import training
from tests.training import FEW, SCRIPTS, config_of, fresh, problems_and_remarks, runs_in, train

EVERY = {
    "ip_noise_gamma": (0.5, {}),
    "ip_noise_gamma_random_strength": (True, {"ip_noise_gamma": 0.5}),
    "loss_type": ("huber", {"huber_schedule": "constant"}),
    "huber_schedule": ("exponential", {"loss_type": "huber", "huber_schedule": "constant"}),
    "huber_c": (0.5, {"loss_type": "smooth_l1", "huber_schedule": "constant"}),
    "huber_scale": (2.0, {"loss_type": "smooth_l1", "huber_schedule": "constant"}),
}
OFFSET = {"noise_offset": 0.1}
SDXL = {
    "v_parameterization": (True, {}),
    "noise_offset": (0.1, {}),
    "noise_offset_random_strength": (True, OFFSET),
    "adaptive_noise_scale": (0.5, OFFSET),
    "multires_noise_iterations": (4, {}),
    "multires_noise_discount": (0.9, {"multires_noise_iterations": 4}),
    "zero_terminal_snr": (True, {"v_parameterization": True}),
    "min_timestep": (900, {}),
    "max_timestep": (10, {}),
    "min_snr_gamma": (1.0, {}),
    "debiased_estimation_loss": (True, {}),
    "scale_v_pred_loss_like_noise_pred": (True, {"v_parameterization": True}),
    "v_pred_like_loss": (0.5, {}),
}
SIGMA = {"timestep_sampling": "sigma", "model_prediction_type": "sigma_scaled"}
FLUX = {
    "timestep_sampling": ("uniform", SIGMA),
    "discrete_flow_shift": (1.5, SIGMA),
    "sigmoid_scale": (3.0, {"timestep_sampling": "shift"}),
    "weighting_scheme": ("sigma_sqrt", SIGMA),
    "logit_mean": (1.0, SIGMA | {"weighting_scheme": "logit_normal"}),
    "logit_std": (0.2, SIGMA | {"weighting_scheme": "logit_normal"}),
    "mode_scale": (0.5, SIGMA | {"weighting_scheme": "mode"}),
}


def noise_and_loss(demo, script, **values):
    """What a step makes of the same latents and the same answer of the model."""
    config = config_of(demo, script, **values)
    family = families.family_for(config)
    channels = 4 if "resnet" in FEW[script] else 16
    chance = torch.Generator().manual_seed(3)
    latents = torch.randn(6, channels, 8, 8, generator=chance) + 1
    noised = family.noised(latents, torch.Generator().manual_seed(5))
    wrong = loss.elementwise(torch.zeros_like(noised.target), noised.target, config.loss.loss_type, noised.huber_c)
    parts = noised.latents, noised.timesteps, noised.target, noised.weight, wrong
    return [part.clone() for part in parts]


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_noise_and_loss_change_the_step(demo, script):
    config = families.config_class(script)
    table = EVERY | (FLUX if "timestep_sampling" in options_of(config) else SDXL)
    for name, (value, others) in table.items():
        before = noise_and_loss(demo, script, **others)
        after = noise_and_loss(demo, script, **others | {name: value})
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), name


def test_mask_area_is_divided_out_on_request(demo, squares, tmp_path):
    """Half of each image is transparent: the loss of the rest is about twice as large, in every step alike."""
    shutil.copytree(squares, tmp_path / "cut")
    for path in (tmp_path / "cut").rglob("*.png"):
        with Image.open(path) as image:
            cut = image.convert("RGBA")
        cut.putalpha(Image.linear_gradient("L").resize(cut.size).point(lambda value: 255 * (value > 127)))
        cut.save(path)
    options = {"train_data_dir": tmp_path / "cut", "alpha_mask": True, "max_train_steps": 1, "seed": 1}
    plain, divided = (
        train(
            config_of(
                demo, "flux_train_network", output_dir=tmp_path / str(on), normalize_masked_area_loss=on, **options
            )
        )
        for on in (False, True)
    )
    assert divided.losses[0] == pytest.approx(2 * plain.losses[0], rel=0.02)


@pytest.fixture
def run(demo, squares, tmp_path):
    def start(script="flux_train_network", folder="out", **values):
        base = {"train_data_dir": squares, "output_dir": tmp_path / folder, "output_name": "m", "seed": 1}
        return train(config_of(demo, script, **base | values))

    return start


PARTS = {
    "both": ({"network_train_unet_only": False}, {"lora_unet", "lora_te1"}),
    "image": ({"network_train_unet_only": True}, {"lora_unet"}),
    "text": ({"network_train_unet_only": False, "network_train_text_encoder_only": True}, {"lora_te1"}),
}


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train_network"])
def test_what_has_adapters_and_of_which_size(demo, script):
    for values, expected in PARTS.values():
        shape = {"network_dim": 6, "network_alpha": 3, "network_dropout": 0.3, "cache_text_encoder_outputs": False}
        config = config_of(demo, script, **shape, **values)
        family = families.family_for(config)
        method = methods.attach_method(family.load(torch.float32), family, config)
        assert {adapter.spec.dropout for adapter in method.adapters.values()} == {0.3}
        tensors = method.state_dict()
        kinds = {name.split("_")[0] + "_" + name.split("_")[1] for name in tensors}
        second = {"lora_te2"} if config.family == "sdxl" and "lora_te1" in expected else set()
        assert kinds == expected | second
        assert {t.shape[0] for name, t in tensors.items() if name.endswith("lora_down.weight")} == {6}
        assert {float(t) for name, t in tensors.items() if name.endswith("alpha")} == {3.0}


def test_gradients_are_clipped_and_rates_scale_the_step(run):
    """A plain step is the rate times the gradient, whose norm is at most max_grad_norm."""
    values = {"optimizer_type": "SGD", "max_train_steps": 1, "learning_rate": 1.0}
    names = [f"m-{n}" for n in range(4)]
    start = run(**values | {"learning_rate": 1e-30}, output_name=names[0]).tensors()
    moved = []
    for name, more in zip(
        names[1:], ({"max_grad_norm": 1e-3}, {"max_grad_norm": 0}, {"max_grad_norm": 0, "unet_lr": 0.5}), strict=True
    ):
        tensors = run(**values | more, output_name=name).tensors()
        moved.append(torch.stack([(tensors[n] - start[n]).norm() for n in start]).norm().item())
    clipped, whole, half = moved
    assert clipped == pytest.approx(1e-3, rel=1e-2) and whole > 0.01
    assert half == pytest.approx(whole / 2, rel=1e-2)


def test_states_and_files_of_epochs_leave_when_they_are_old(run, tmp_path):
    run(max_train_epochs=5, save_every_n_epochs=1, save_state=True, save_last_n_epochs=3, save_last_n_epochs_state=1)
    files = {path.name for path in (tmp_path / "out").iterdir()} - {"runs", "m.safetensors", "m-state"}
    assert files == {f"m-00000{n}.safetensors" for n in (2, 3, 4)} | {"m-000004-state"}
    run(folder="few", max_train_epochs=4, save_n_epoch_ratio=2, output_name="few", save_every_n_epochs=1)
    names = {path.name for path in (tmp_path / "few").iterdir()} - {"runs"}
    assert names == {"few-000002.safetensors", "few.safetensors"}


WORDS = (
    "metadata_title",
    "metadata_author",
    "metadata_description",
    "metadata_license",
    "metadata_tags",
    "metadata_trigger_phrase",
)


def test_the_file_says_what_its_maker_wants_it_to(run):
    words = {name: f"my {name}" for name in WORDS}
    outcome = run(max_train_steps=1, clip_skip=2, training_comment="for all", **words)
    with safe_open(outcome.file, "pt") as file:
        told = file.metadata()
    assert {name: told[f"modelspec.{name.removeprefix('metadata_')}"] for name in WORDS} == words
    assert (told["ss_clip_skip"], told["ss_training_comment"]) == ("2", "for all")


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train"])
def test_attention_is_pytorchs_with_every_option(run, monkeypatch, script):
    calls = []
    attention = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or attention(*a, **k)
    )
    runs = []
    for name in ("plain", "sdpa", "xformers"):
        training.ENCODED.clear()  # a VAE has attention, too
        runs.append(run(script, name, max_train_steps=1, **({name: True} if name != "plain" else {})))
    plain, *others = runs
    assert calls and len(calls) % 3 == 0
    assert all(other.losses == plain.losses for other in others)


# ---- curves


class Wandb(SimpleNamespace):
    """What the client of Weights & Biases was told."""

    def __init__(self):
        super().__init__(lines=[], how={}, ended=False, Image=lambda picture: picture)
        self.__spec__ = SimpleNamespace(name="wandb")

    def init(self, **how):
        self.how = how
        return self

    def log(self, numbers, step=None):
        self.lines.append((step, numbers))

    def finish(self):
        self.ended = True


@pytest.fixture
def wandb(monkeypatch):
    stub = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_API_KEY", "")
    return stub


def test_weights_and_biases_get_the_same_numbers(run, wandb, tmp_path, monkeypatch):
    outcome = run(
        log_with="wandb",
        wandb_run_name="cats",
        log_tracker_name="all cats",
        log_config=True,
        wandb_api_key="canary",
        max_train_steps=2,
    )
    assert os.environ["WANDB_API_KEY"] == "canary"
    assert (wandb.how["project"], wandb.how["name"], wandb.ended) == ("all cats", "cats", True)
    assert {
        step: numbers["loss/current"] for step, numbers in wandb.lines if "loss/current" in numbers
    } == outcome.numbers()
    told = wandb.how["config"]
    assert told["network_dim"] == 4 or told["max_train_steps"] == 2
    assert not {"output_dir", "train_data_dir", "wandb_api_key", "pretrained_model_name_or_path"} & told.keys()
    (tmp_path / "how.toml").write_text('[wandb]\nentity = "me"\n', encoding="utf-8")
    run(folder="b", log_with="wandb", log_tracker_config=tmp_path / "how.toml", max_train_steps=1)
    assert wandb.how["entity"] == "me" and "config" not in wandb.how


def test_tensorboard_shows_the_settings_on_request(run, tmp_path):
    run(logging_dir=tmp_path / "logs", log_config=True, log_tracker_name="cats", max_train_steps=1)
    (file,) = (tmp_path / "logs").rglob("events.out.tfevents.*")
    assert file.parent.name == "cats"
    assert b"max_train_steps" in file.read_bytes() and str(tmp_path).encode() not in file.read_bytes()


def test_trackers_that_cannot_be_used_are_known_before(demo, squares, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    config = config_of(
        demo,
        "sdxl_train",
        train_data_dir=squares,
        output_dir=tmp_path,
        log_with="wandb",
        log_tracker_config=tmp_path / "none.toml",
    )
    told = list(problems_and_remarks(config)[0])
    assert len(told) == 2 and "pip install wandb" in str(told[0]) and "none.toml does not exist" in str(told[1])


# ---- what has no effect


def test_what_has_no_effect_is_in_the_record_once(demo, squares, tmp_path, capsys):
    """Whether the config itself says so, or its other options, or the data; and keys of other programs."""
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=squares,
        output_dir=tmp_path / "out",
        max_train_steps=1,
        noise_offset=0.1,
        huber_c=0.5,
        highvram=True,
        masked_loss=True,
        ddp_timeout=3,
        logit_std=0.5,
        enable_wildcard=True,
        max_train_epochs=1,
        xformers=True,
    )
    text = "mem_eff_attn = true\n" + to_toml(replace_options(config, max_train_epochs=None, max_train_steps=1))
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    fresh()
    assert train_script.main(config_class(config.script), ["--config_file", str(tmp_path / "run.toml")]) == 0
    said = capsys.readouterr()
    (folder,) = runs_in(tmp_path / "out")
    lines = (folder / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    told = [event["text"] for event in map(json.loads, lines) if event["kind"] == "warning"]
    for name in (
        "noise_offset",
        "huber_c",
        "highvram",
        "masked_loss",
        "ddp_timeout",
        "logit_std",
        "enable_wildcard",
        "xformers",
        "mem_eff_attn",
    ):
        assert sum(name in text.split() or f"{name}:" in text for text in told) == 1, (name, told)
        assert sum(f"{name} " in line for line in (said.out + said.err).splitlines()) == 1, name
    assert "max_train_steps" in ineffective_options(config)


@pytest.mark.parametrize("guided", [True, False])
def test_guidance_of_a_model_without_it_is_reported(demo, squares, tmp_path, monkeypatch, guided):
    config = config_of(demo, "flux_train", train_data_dir=squares, output_dir=tmp_path, guidance_scale=1.0)
    monkeypatch.setattr(type(families.family_for(config)), "is_schnell", not guided)
    said = [text for text in map(str, problems_and_remarks(config)[1]) if "guidance_scale" in text]
    assert said == ([] if guided else ["guidance_scale has no effect here: FLUX.1 schnell takes no guidance"])


def test_every_linear_layer_of_t5_learns(tmp_path, demo, squares):
    out = train(
        config_of(
            demo,
            "flux_train_network",
            train_data_dir=squares,
            max_train_steps=1,
            output_dir=tmp_path / "out",
            network_train_unet_only=False,
            cache_text_encoder_outputs=False,
            cache_text_encoder_outputs_to_disk=False,
            network_args=["train_t5xxl=True"],
        )
    ).tensors()
    attention, dense = "layer_0_SelfAttention_", "layer_1_DenseReluDense_"
    layers = [attention + n for n in ("q", "k", "v", "o")] + [dense + n for n in ("wi_0", "wi_1", "wo")]
    expected = {f"lora_te3_encoder_block_{block}_{layer}" for block in (0, 1) for layer in layers}
    layer_kinds = {name.partition(".")[0] for name in out if name.startswith("lora_te3_")}
    assert layer_kinds == expected
    assert all(out[f"{name}.lora_up.weight"].any() for name in layer_kinds)


# A model with convolutions, and one without.
@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train_network"])
def test_whole_matrices_of_lokr_are_saved_in_float16_and_gone_on_with(tmp_path, demo, squares, script):
    options = {
        "train_data_dir": squares,
        "network_module": "lycoris.kohya",
        "network_dim": 100_000,
        "network_alpha": 1,
        "network_args": ["algo=lokr", "factor=8"],
        "save_precision": "fp16",
        "save_state": True,
        "output_name": "m",
    }
    first = train(
        config_of(demo, script, **options, output_dir=tmp_path / "a", max_train_steps=2, save_every_n_steps=2)
    )
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {
        "m.safetensors",
        "m-step00000002.safetensors",
        "m-step00000002-state",
        "m-state",
    }
    assert not first.events("warning")
    alphas = [tensor for name, tensor in first.tensors().items() if name.endswith(".alpha")]
    assert alphas and all(alpha.dtype == torch.float16 and alpha == float("inf") for alpha in alphas)
    state, file = tmp_path / "a" / "m-state", str(first.file)
    on = train(config_of(demo, script, **options, output_dir=tmp_path / "b", max_train_steps=3, resume=state))
    weights = {"network_weights": file, "dim_from_weights": True, "max_train_steps": 1}
    anew = train(config_of(demo, script, **{**options, **weights}, output_dir=tmp_path / "c"))
    assert all(map(math.isfinite, [*on.losses, *anew.losses]))


def test_lora_fa_learns_one_half_and_goes_on_exactly(tmp_path, demo, squares):
    def trained(name, steps, **more):
        values = {"train_data_dir": squares, "output_dir": tmp_path / name, "max_train_steps": steps, "seed": 5}
        options = {
            "network_module": "networks.lora_fa",
            "network_args": ["conv_dim=4"],
            "network_train_unet_only": True,
        }
        return train(config_of(demo, "sdxl_train_network", **values, **options, **more))

    first = trained("a", 2, save_state=True, save_every_n_steps=1, output_name="m")
    before, after = (load_file(tmp_path / "a" / name) for name in ("m-step00000001.safetensors", "m.safetensors"))
    downs, ups = ({n for n in after if f"{half}.weight" in n} for half in ("lora_down", "lora_up"))
    assert len(downs) == len(ups) and after.keys() == downs | ups | {n.replace("lora_up.weight", "alpha") for n in ups}
    assert all(torch.equal(before[name], after[name]) for name in downs)
    assert all(after[name].any() for name in ups) and not all(torch.equal(before[name], after[name]) for name in ups)
    wide = [after[n] for n in downs if after[n].ndim == 2]
    spread = torch.cat([t.flatten() / (2 / sum(t.shape)) ** 0.5 for t in wide])
    assert abs(spread.std() - 1) < 0.05 and spread.abs().max() > 2.5  # normal, of the variance 2 / (in + rank)
    again = trained("b", 2, resume=tmp_path / "a" / "m-step00000001-state")
    assert again.losses[-1] == first.losses[-1]
    assert all(torch.equal(tensor, after[name]) for name, tensor in again.tensors().items())
