"""What people type and paste into one field: read as they mean it, or refused with what to write."""

from pathlib import Path

import pytest

from library.config.building import build_config, draft, working_fix
from library.config.problems import ConfigError
from library.config.schema import option_values, options_of
from library.config.values import WINDOWS
from library.families import config_class
from tests.training import SCRIPTS

LORA = config_class("sdxl_train_network")


def read(name, value):
    return options_of(LORA)[name].read(value)


def test_pasted_paths_lose_what_is_around_them(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for pasted in (' "C:\\my cats\\x" ', "'C:\\my cats\\x'\n", "\u202aC:\\my cats\\x", "\u201cC:\\my cats\\x\u201d"):
        assert read("train_data_dir", pasted) == "C:\\my cats\\x"
    with pytest.raises(ConfigError, match="write"):  # of a TOML in which "C:\train" stands
        read("train_data_dir", "C:\train")
    assert read("output_dir", '""') is None and read("output_dir", " \t") is None
    assert WINDOWS or read("output_dir", '/a/"b"') == '/a/"b"'
    assert read("output_dir", "~somebody/x") == "~somebody/x"
    assert read("pretrained_model_name_or_path", "black-forest-labs/FLUX.1-dev ") == "black-forest-labs/FLUX.1-dev"
    thumbnail = "data:image/png;base64," + "iVBORw0KGgo" * 1000
    assert read("metadata_thumbnail", thumbnail) == thumbnail
    expanded = option_values(
        build_config(LORA, {"vae": "~/küche/猫.safetensors", "dataset_config": "~/a.toml", "wandb_api_key": " k\n"})
    )
    assert (
        Path(expanded["vae"]) == tmp_path / "küche/猫.safetensors" and expanded["dataset_config"] == tmp_path / "a.toml"
    )
    assert expanded["wandb_api_key"] == "k"


@pytest.mark.parametrize("spelling", ["1e-4", " 1E-04 ", ".0001", "0.0001", "０．０００１", "１ｅ－４", "1e\u22124"])
def test_one_number_in_many_spellings(spelling):
    assert read("learning_rate", spelling) == 1e-4 and read("text_encoder_lr", spelling) == (1e-4,)


def test_a_share_of_all_steps_is_not_one_step():
    steps = [("1", 1), (1, 1), (100.0, 100), ("0%", 0), ("0.0", 0)]
    for written, share in [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0), ("1.0", 1.0), (1.0, 1.0), *steps]:
        value = read("lr_warmup_steps", written)
        assert value == share and type(value) is type(share), written
        assert read("lr_warmup_steps", options_of(LORA)["lr_warmup_steps"].text(value)) == value
    with pytest.raises(ConfigError, match="at most 100%"):
        read("lr_decay_steps", "120%")
    for written in ("1.5", 1.5):  # one and a half of all steps, or one step
        with pytest.raises(ConfigError, match="must be whole steps, or a share of at most 1, got"):
            read("lr_warmup_steps", written)


def test_several_sizes_differ_from_a_width_and_a_height():
    for size in (
        "512,768,1024",
        [512, 768, 1024],
        "512;768;1024",
        "512 768 1024",
        [[512], 768, "1024"],
        "512;768;1024;",
    ):
        assert read("resolution", size) == "512;768;1024"
    for size in ("512;1024", [[512], [1024]], "５１２；１０２４"):
        assert read("resolution", size) == "512;1024"
    for size in ("512;1024,768", "512x512,1024x768", [512, [1024, 768]]):
        assert read("resolution", size).endswith(";1024,768")
    for size in ("512,1024", [512, 1024], ["512", "1024"]):  # as in sd-scripts
        assert read("resolution", size) == "512,1024"
    assert draft(LORA, {"resolution": "512;1024,768;640"}).data.size == (1024, 768)
    wrong = {
        "512;512": "the size 512 more than once",
        "512;": None,
        "512;0": "or several sizes with ;",
        "512;;768": "several sizes",
        "512,768,x": "got '512,768,x'",
        "512;70000": "at most 65536",
        ",".join(map(str, range(1, 40))): "at most 16 sizes, got 39",
    }
    for size, said in wrong.items():
        if said is None:
            assert read("resolution", size) == "512"
            continue
        with pytest.raises(ConfigError, match=said):
            read("resolution", size)


def test_sizes_and_choices_in_many_spellings():
    for size in ("1024,768", "1024x768", "1024 × 768", "1024 768", "１０２４，７６８"):
        assert read("resolution", size) == "1024,768"
    assert read("mixed_precision", " BF16 ") == "bf16" and read("optimizer_type", "AdamW8bit ") == "AdamW8bit"
    assert read("caption_prefix", " a ") == " a "  # where blanks may be meant they stay


def test_a_comma_in_a_number_is_never_guessed_but_explained():
    for name, typed, meant in (
        ("learning_rate", "0,0001", "0.0001"),
        ("text_encoder_lr", "0,00005", "0.00005"),
        ("max_train_steps", "1,600", "1600"),
        ("noise_offset", "0,05", "0.05"),
    ):
        with pytest.raises(ConfigError, match=rf"\(did you mean {meant}\?\)") as refused:
            build_config(LORA, {name: typed})
        fix = working_fix(refused.value.problems[0], draft(LORA, {}))
        assert build_config(LORA, {**fix, "lr_scheduler": "cosine"}) and float(fix[name]) == float(meant)
    assert read("text_encoder_lr", "1e-4,1e-5") == (1e-4, 1e-5) and read("text_encoder_lr", "0,0") == (0, 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_but_spaces_is_no_value_through_every_door(script):
    """A form and a file have text, flags have a list of words; only free text may consist of spaces."""
    config = config_class(script)
    for option in options_of(config).values():
        if not (option.many or option.optional or option.type is str):
            continue
        unset = option.read("")
        if option.many:
            assert option.read([""]) == option.read([" ", ""]) == unset, option.name
        is_text = option.type is str and option.kind in ("", "text")
        if option.many or not is_text or option.choices or "parse" in option.hints:
            assert option.read("  ") == unset, option.name
        else:
            assert option.read("  ") == "  ", option.name
    assert option_values(build_config(config, {"lr_scheduler": " "}, notes=[]))["lr_scheduler"] == "constant"
