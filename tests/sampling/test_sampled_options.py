"""Every option that changes images counts in `kohya sample` and *Try it*, and their images are a training's."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from library import families
from library.config.building import Layer, read_layers
from library.config.formats import to_toml
from library.config.schema import options_of
from library.sampling import generate, plan, shell
from library.sampling.prompts import parse_line
from tests.sampling.test_sampling import CAT, SCRIPTS, adapter_names, given, lora_file, quiet  # noqa: F401
from tests.training import LORA_OF_EACH_KIND, LORAS, cached_squares, config_of, shallow, train  # noqa: F401

# Options of these sections decide what a training does with its images and files, or when; no image of a file.
OF_TRAINING = ("data", "captions", "cache", "optim", "steps", "save", "loss", "validation")
OF_TRAINING += ("metadata", "hub", "log", "distributed")
IN_FILE, LEARNING, ROUNDS = "the file holds what it decides", "changes only what is learned", "changes rounding alone"
STEPS, SPEED = "is for steps and their gradients", "is for speed or memory alone"
# Options without effect on images -> why. An option is either here or in `plan.sampling_options`.
UNUSED = {
    **dict.fromkeys(("network_module", "network_dim", "network_alpha", "network_args", "cond_emb_dim"), IN_FILE),
    **dict.fromkeys(("network_train_unet_only", "network_train_text_encoder_only", "scale_weight_norms"), IN_FILE),
    **dict.fromkeys(("network_weights", "dim_from_weights", "weights", "num_vectors_per_token"), IN_FILE),
    **dict.fromkeys(("network_dropout", "preserve_weight", "preserve_prompt", "init_word"), LEARNING),
    **dict.fromkeys(("use_object_template", "use_style_template"), LEARNING),
    "assistant_lora": "is off in images",
    "token_string": "is --word, which is read from the TOML",
    **dict.fromkeys(("training_comment", "no_metadata"), "describes the file"),
    **dict.fromkeys(("full_bf16", "full_fp16"), "rounds the masters of a whole model, which its file holds"),
    "auto_compute": ROUNDS,
    "t5xxl_train_length": STEPS,
    **dict.fromkeys(("gradient_checkpointing", "cpu_offload_checkpointing", "checkpoint_keep_attention"), STEPS),
    "fp8_transposed_weights": STEPS,
    **dict.fromkeys(("gpu_memory_limit", "lowram", "highvram"), SPEED),
    "compile": "is sample_compile for images",
    **dict.fromkeys(("compile_fallback", "compile_autotune", "compile_compare_steps", "compile_warmup"), STEPS),
    **dict.fromkeys(("compile_scope", "compile_activation_budget", "compile_from_step"), STEPS),
    **dict.fromkeys(("sample_images", "sample_prompts", "sample_from_captions"), "says which images there are"),
    **dict.fromkeys(("sample_every_n_epochs", "sample_every_n_steps", "sample_at_first"), "says when"),
}
# Options of the sections of trainings that an image reads nevertheless -> why they do not change it.
READ = {
    **dict.fromkeys(("fsdp", "ddp_timeout"), "`kohya sample` is one process"),
    "huggingface_token": "gives access to files alone",
    "exif_rotation": "images show references upright, as viewers do",
    "random_masks": "draws masks for data sets",
    # With fp8_base, FLUX.3's blocks for references have 8 bits only in trainings with references, so previews differ.
    **dict.fromkeys(("control_directory", "dataset_config"), "says which blocks learn"),
    **dict.fromkeys(("debiased_estimation_loss", "loss_type", "min_snr_gamma"), LEARNING),
    **dict.fromkeys(("scale_v_pred_loss_like_noise_pred", "v_pred_like_loss"), LEARNING),
}


def all_options():
    return {
        name: (option.section, script)
        for script in families.RUNS
        for name, option in options_of(families.config_class(script)).items()
    }


def of_noise(name):
    return all_options()[name][0] == "noise" and name != "zero_terminal_snr"


def test_every_option_is_sampled_with_or_has_a_reason_against_it():
    sampled = {name for family in families.FAMILIES for name in plan.sampling_options(family)}
    undecided = {
        name
        for name, (section, _) in all_options().items()
        if section not in OF_TRAINING and not of_noise(name) and name not in sampled | UNUSED.keys()
    }
    assert not undecided, "decide: into plan.OPTIONS, or with a reason into UNUSED"
    assert not sampled & UNUSED.keys() and (UNUSED.keys() | READ.keys()) <= all_options().keys()


def values_to_try(option):
    if option.choices:
        return option.choices
    return [not option.default] if isinstance(option.default, bool) else [1, 4]


@pytest.mark.parametrize("script", families.RUNS)
def test_what_can_be_trained_can_be_sampled(script):
    kind = families.config_class(script)
    sampled, options = families.config_class(families.lora_script(kind.family)), options_of(kind)
    usual = {"pretrained_model_name_or_path": "a", "train_data_dir": "x", "mixed_precision": "bf16"}
    usual |= {"cache_text_encoder_outputs": True, "network_train_unet_only": True}
    usual = {name: value for name, value in usual.items() if name in options}
    for name in plan.sampling_options(kind.family) & options.keys():
        for value in values_to_try(options[name]):
            values = {**usual, name: value}
            if not read_layers(kind, [Layer(values)]).problems:
                assert not read_layers(sampled, [Layer(plan.sampling_values(kind, values))]).problems


@pytest.fixture
def reads(monkeypatch):
    """Options that are read from a config outside of what builds configs."""
    seen = set()

    def watch(config):
        for field in dataclasses.fields(config):
            section = type(getattr(config, field.name))
            names = {option.name for option in dataclasses.fields(section)}

            def read(self, name, names=names, original=section.__getattribute__):
                reader = sys._getframe(1).f_code.co_filename
                if name in names and not reader.endswith(("dataclasses.py", "schema.py", "building.py")):
                    seen.add(name)
                return original(self, name)

            monkeypatch.setattr(section, "__getattribute__", read)
        return seen

    return watch


@pytest.mark.parametrize("script", SCRIPTS)
def test_images_read_only_options_that_are_decided(given, reads, script, tmp_path):  # noqa: F811
    config = given(script)
    seen = reads(config)
    generate.generate(config, plan.plan_columns("together", []), [CAT], tmp_path, quiet)
    left = seen - plan.sampling_options(config.family)
    methods = set(options_of(type(config))) & UNUSED.keys()  # the check of the method reads its options
    assert left <= methods | READ.keys(), "an image depends on these: decide"
    assert {"pretrained_model_name_or_path", "base_weights"} <= seen


def transparent(folder):
    path = folder / "reference.png"
    colours = np.random.default_rng(2).integers(0, 255, (64, 64, 4), dtype=np.uint8)
    colours[:32, :, 3] = 0
    Image.fromarray(colours).save(path)
    return path


ZERO = {"zero_terminal_snr": True, "v_parameterization": True}
# A script, an option that its images depend on, its values, and how the option is left out.
WAYS = [
    *((script, "base_weights", {}, "") for script in LORAS),
    *((script, "zero_terminal_snr", ZERO, "false") for script in ("sdxl_train_network", "train_network")),
    ("flux_2_train_network", "transparent_background", {"transparent_background": "white"}, ""),
]


def merged(demo, script, folder):
    """Values that merge a file into the model."""
    family = families.family_for(config_of(demo, script))
    layers = adapter_names(family, family.load(torch.float32, torch.float32))
    file = lora_file(folder / "base.safetensors", layers)
    return {"base_weights": (str(file),), "base_weights_multiplier": (0.5,)}


@pytest.fixture
def trained(shallow, cached_squares, tmp_path, monkeypatch):  # noqa: F811
    """Train a LoRA with a preview at the end; returns its file, its TOML, and the pixels of the preview."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))

    def start(script, line, values):
        (tmp_path / "prompts.txt").write_text(line, encoding="utf-8")
        quick = {"max_train_steps": 1, "seed": 1, "network_dim": 2, "learning_rate": 1e-2, "mixed_precision": "no"}
        quick |= {"sample_prompts": tmp_path / "prompts.txt", "sample_every_n_steps": 1, "output_dir": tmp_path / "out"}
        config = config_of(shallow, script, train_data_dir=cached_squares, **{**quick, **values})
        file, toml = train(config).file, tmp_path / f"{script}.toml"
        toml.write_text(to_toml(config), encoding="utf-8")
        (preview,) = (tmp_path / "out").glob("sample/*.png")
        return file, toml, pixels_of(preview)

    return start


def pixels_of(path):
    with Image.open(path) as image:
        return np.asarray(image, int)


@pytest.mark.parametrize(("script", "option", "values", "off"), WAYS)
def test_an_image_of_the_file_is_the_trainings_preview(shallow, trained, tmp_path, script, option, values, off):  # noqa: F811
    line = "a cat --w 64 --h 64 --s 2 --d 3 --l 2"
    if option == "base_weights":
        values = merged(shallow, script, tmp_path)
    if option == "transparent_background":
        line += f" --ci {transparent(tmp_path)}"
    file, toml, preview = trained(script, line, values)

    def image(**options):
        sampled = shell.read_sample_config(toml, options, lambda _: script).config
        columns = plan.plan_columns("together", [(file, 1.0)])
        sheet = generate.generate(sampled, columns, [parse_line(line)], tmp_path / "new", quiet)
        with Image.open(sheet.files[0][0]) as image:
            assert ("base.safetensors" in image.text["kohya"]) is (option == "base_weights" and not options)
        return abs(pixels_of(sheet.files[0][0]) - preview)

    difference = image()
    assert difference.max() <= 2
    assert image(**{option: off}).sum() > 2 * difference.sum()  # so the option matters here


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_an_image_of_the_file_is_rounded_as_the_trainings_preview(shallow, trained, tmp_path, script):  # noqa: F811
    line = "a cat --w 64 --h 64 --s 2 --d 3 --l 2"
    # A strength of 2 / 3 is exact in no format: where it is applied decides what is rounded.
    values = {"mixed_precision": "bf16", "network_dim": 3, "network_alpha": 2.0}
    file, toml, preview = trained(script, line, values)
    sampled = shell.read_sample_config(toml, {}, lambda _: script).config

    def image(strength):
        columns = plan.plan_columns("together", [(file, strength)])
        return pixels_of(generate.generate(sampled, columns, [parse_line(line)], tmp_path / "new", quiet).files[0][0])

    assert np.array_equal(image(1.0), preview) and not np.array_equal(image(0.5), preview)


def test_what_is_merged_is_said_and_a_file_that_counts_twice(shallow, tmp_path):  # noqa: F811
    values = merged(shallow, SCRIPTS[0], tmp_path)
    toml = tmp_path / f"{SCRIPTS[0]}.toml"
    toml.write_text(to_toml(config_of(shallow, SCRIPTS[0], **values)), encoding="utf-8")
    for more, count in (([], 1), ([f"--lora={values['base_weights'][0]}=0.5"], 2), (["--set=base_weights="], 0)):
        arguments = shell.build_sample_parser().parse_args([str(toml), "--prompt", "a cat", *more])
        inputs = shell.read_inputs(arguments, lambda _: SCRIPTS[0])
        assert sum("base_weights" in str(note) for note in shell.sampling_notes(arguments, inputs.config)) == count


@pytest.mark.parametrize("script", LORAS)
def test_base_weights_that_cannot_be_used_are_named_before_the_model_is_loaded(given, script, tmp_path):  # noqa: F811
    is_unet = script in ("sdxl_train_network", "train_network")
    layer = "double_blocks_0_img_attn_qkv" if is_unet else "input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    other = lora_file(tmp_path / "other.safetensors", {f"lora_unet_{layer}": torch.nn.Linear(4, 4)})
    for file, says in ((tmp_path / "gone.safetensors", "does not exist"), (other, "other.safetensors")):
        config = given(script)
        with_file = dataclasses.replace(config, network=dataclasses.replace(config.network, base_weights=(str(file),)))
        (problem,) = generate.find_problems(with_file, [CAT])
        assert says in str(problem)
