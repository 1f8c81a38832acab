"""What a file of an adapter is, by its header, for all families: names of other programs, kinds of adapters, and whose
model it was trained on.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from library import families
from library.adapter_files import adapters, fitting, names
from library.check import preflight
from library.config.problems import ConfigError
from library.families import recognition
from library.families.shared import weights
from library.methods import lora_files
from library.tools import convert, merge, resize
from tests.families.test_recognition import RELATIVES, demo, made, plain_tensors  # noqa: F401
from tests.training import LORAS, config_of

KINDS_OF_ADAPTERS = {
    "LoRA": ("lora_down.weight", "lora_up.weight", "alpha"),
    "diffusers": ("lora_A.weight", "lora_B.weight"),
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LoKr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    "OFT": ("oft_blocks", "alpha"),
    "full": ("diff", "diff_b"),
    "GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight"),
    "iA3": ("weight", "on_input"),
}


def layers_of(demo: Any, name: str) -> dict[str, tuple[int, ...]]:  # noqa: F811
    """What a family's LoRA files call the layers of its denoiser, and their shapes."""
    header = weights.header(config_of(demo, families.lora_script(name)).model.pretrained_model_name_or_path)
    names = families.load_object(families.facts_of(name).lora_names)
    paths = (path for part, path in names.layers(header, False) if part == "denoiser")
    before = names.prefixes["kohya"]["denoiser"]
    return {f"{before}{path.replace('.', '_')}": header.get(f"{path}.weight", (4, 4)) for path in paths}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_names_of_onetrainer_are_those_of_the_same_layers_and_dora_is_named(demo, family, tmp_path):  # noqa: F811
    if "lora_transformer_" not in families.load_object(families.facts_of(family).lora_names).other_prefixes:
        pytest.skip("OneTrainer's names of it are kohya's")
    sides = {"lora_down": 1, "lora_up": 0}
    own = {
        f"{layer}.{side}.weight": (shape[0], 4) if row == 0 else (4, shape[1])
        for layer, shape in layers_of(demo, family).items()
        for side, row in sides.items()
    }
    theirs = {name.replace("lora_unet_", "lora_transformer_"): shape for name, shape in own.items()}
    assert own.keys() <= lora_files.file_of(made(theirs, tmp_path / "theirs.safetensors"), family).keys()
    dora = own | {f"{next(iter(own)).partition('.')[0]}.dora_scale": (4, 1)}
    with pytest.raises(ConfigError, match="is DoRA, not a plain LoRA"):
        lora_files.plain_file("network_weights", made(dora, tmp_path / "dora.safetensors"), family)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_names_of_lycoris_are_those_of_the_same_layers(demo, family, tmp_path):  # noqa: F811
    layers = layers_of(demo, family)
    theirs = {
        f"{name.replace('lora_unet_', 'lycoris_')}.{side}.weight": shape
        for name, (rows, columns) in ((name, shape[:2]) for name, shape in layers.items())
        for side, shape in (("lora_down", (4, columns)), ("lora_up", (rows, 4)))
    }
    path = made(theirs, tmp_path / "theirs.safetensors")
    assert layers.keys() == {key.partition(".")[0] for key in lora_files.file_of(path, family)}
    assert {module.kohya for module in adapters.read_lora(path, family).adapters} == layers.keys()
    other = {f"{name.partition('.')[0]}.lokr_w1": shape for name, shape in theirs.items()}
    path = made(other, tmp_path / "lokr.safetensors")
    assert layers.keys() == {key.partition(".")[0] for key in lora_files.file_of(path, family)}


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer."])
def test_no_kind_of_adapter_is_taken_for_a_model(demo, script, prefix):  # noqa: F811
    config = config_of(demo, script)
    shapes = {name: tuple(tensor.shape) for name, tensor in plain_tensors(config).items() if name.endswith(".weight")}
    for kind, parts in KINDS_OF_ADAPTERS.items():
        adapters_of = {
            f"{prefix}{name.removesuffix('weight')}{part}": shape[:1]
            for name, shape in shapes.items()
            for part in parts
        }
        assert recognition.family_and_description(adapters_of) == (None, "a LoRA file"), kind


def test_a_lora_whose_names_two_families_share_is_of_the_one_that_is_trained_and_never_guessed(tmp_path):
    """Attention in diffusers' double blocks, without metadata; FLUX.1 keeps query, key and value as one."""
    sides = {"lora_A": (4, 8), "lora_B": (8, 4)}
    both = {f"transformer.transformer_blocks.0.attn.to_q.{side}.weight": shape for side, shape in sides.items()}
    path, stored = made(both, tmp_path / "both.safetensors"), {}
    for family in ("flux", "qwen_image"):
        stored[family] = lora_files.file_of(path, family)
        assert adapters.read_lora(path, family).family == family
    assert {name.partition(".")[0] for name in stored["flux"]} == {"lora_unet_double_blocks_0_img_attn_qkv"}
    assert {name.partition(".")[0] for name in stored["qwen_image"]} == {"lora_unet_transformer_blocks_0_attn_to_q"}
    with pytest.raises(ConfigError, match=r"may be those of FLUX\.1.*Qwen-Image.*--set ss_base_model_version="):
        adapters.read_lora(path)
    musubi = {
        f"lora_unet_transformer_blocks_0_attn_to_q.lora_{side}.weight": shape
        for side, shape in zip(("down", "up"), sides.values(), strict=True)
    }
    assert adapters.read_lora(made(musubi, tmp_path / "musubi.safetensors")).family == "qwen_image"
    single = {name.replace("transformer_blocks", "single_transformer_blocks"): shape for name, shape in both.items()}
    assert adapters.read_lora(made(both | single, tmp_path / "flux.safetensors")).family == "flux"


@pytest.mark.parametrize("style", names.FORMATS)
def test_a_file_in_the_names_of_any_program_fits_its_own_family_alone(demo, style, tmp_path):  # noqa: F811
    """Qwen-Image-2.1's own files have dotted names, too."""
    path = made({"a": (1,)}, tmp_path / "without_metadata.safetensors")
    for family in families.FAMILIES:
        header = weights.header(config_of(demo, families.lora_script(family)).model.pretrained_model_name_or_path)
        lora_names = names.lora_names_of(family)
        plain, lokr = {}, {}
        for layer in (layer for part, layer in lora_names.layers(header, False) if part == "denoiser"):
            rows, columns = header.get(f"{layer}.weight", (4, 4))[:2]
            spelled = names.spelled(names.Module("denoiser", layer), family, style)
            for name in spelled:
                sides = {"lora_A.weight": (2, columns), "lora_B.weight": (rows // len(spelled), 2)}
                plain |= {f"{name}.{side}": {"shape": shape} for side, shape in sides.items()}
                sides = {"lokr_w1": (2, 2), "lokr_w2": (rows // len(spelled) // 2, columns // 2)}
                lokr |= {f"{name}.{side}": {"shape": shape} for side, shape in sides.items()}
        for stored in (plain, lokr):
            fits = [other for other in families.FAMILIES if fitting.misfit(path, stored, other) is None]
            assert fits == [family], f"give their layers different names, or say so in metadata: {next(iter(stored))}"


def test_a_layer_of_another_rank_is_named_without_the_ending_of_its_tensor(demo, tmp_path):  # noqa: F811
    layer = "transformer_blocks.0.img_mlp.out"
    shapes = {f"{layer}.lora_down.weight": (4, 192), f"{layer}.lora_up.weight": (64, 4)}
    path = made(shapes, tmp_path / "four.safetensors")
    with pytest.raises(ConfigError, match=re.escape(f"network_weights: {layer} has rank 4 in the file and 8 here")):
        preflight.check_before_training(config_of(demo, "qwen_image_21_train_network", network_weights=path))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_layers_of_text_encoders_that_a_family_does_not_adapt_stay_in_the_file(demo, family, tmp_path):  # noqa: F811
    encoder = "lora_te9_text_model_0_q_proj"
    sides = {**dict([*layers_of(demo, family).items()][-2:]), encoder: (32, 32)}
    shapes = {f"{name}.lora_down.weight": (4, columns) for name, (_, columns, *_) in sides.items()}
    shapes |= {f"{name}.lora_up.weight": (rows, 4) for name, (rows, *_) in sides.items()}
    path = made(shapes, tmp_path / "both.safetensors")
    resized = resize.resize_lora(path, tmp_path / "resized.safetensors", choices=resize.ResizeOptions(rank=2)).path
    joined = merge.join_loras([(path, 1.0), (path, 0.5)], tmp_path / "joined.safetensors").path
    there = convert.convert_lora(path, tmp_path / "there.safetensors", to="comfy")
    for written in (resized, joined, convert.convert_lora(there, tmp_path / "back.safetensors", to="kohya")):
        assert {name for name in weights.header(written) if name.startswith(encoder)} >= {
            f"{encoder}.lora_{side}.weight" for side in ("down", "up")
        }
    assert lora_files.file_of(path, family).keys() >= {f"{encoder}.lora_up.weight"}


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_lora_of_another_family_is_named_before_anything_is_loaded(demo, script, tmp_path):  # noqa: F811
    config = config_of(demo, script)
    for family in families.FAMILIES:
        if family == config.family:
            continue
        layers = layers_of(demo, family)
        assert layers
        title, plain, lokr = families.facts_of(family).title, {}, {}
        for layer, (rows, columns) in ((layer, sides[:2]) for layer, sides in layers.items()):
            plain |= {f"{layer}.lora_down.weight": (4, columns), f"{layer}.lora_up.weight": (rows, 4)}
            lokr |= {
                f"{layer}.lokr_w1": (2, 2),
                f"{layer}.lokr_w2_a": (rows // 2, 4),
                f"{layer}.lokr_w2_b": (4, columns // 2),
            }
        path, other = (made(shapes, tmp_path / f"{family}-{len(shapes)}.safetensors") for shapes in (plain, lokr))
        for option, value in (("network_weights", path), ("base_weights", [str(other)])):
            with pytest.raises(ConfigError, match=f"was made for {re.escape(title)}, ") as raised:
                preflight.check_before_training(config_of(demo, script, **{option: value}))
            (problem,) = raised.value.problems
            assert problem.option == option and "\n" not in str(problem)
    base = config.model.pretrained_model_name_or_path
    for path, said_of in ((base, "not a LoRA file"), (Path(base).parent, "is a folder")):
        with pytest.raises(ConfigError, match=said_of) as raised:
            preflight.check_before_training(config_of(demo, script, network_weights=path))
        assert [problem.option for problem in raised.value.problems] == ["network_weights"]
