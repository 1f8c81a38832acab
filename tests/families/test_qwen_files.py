"""Qwen-Image's files: every layout is read, what is something else is named, caches and LoRA are known elsewhere."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library import families
from library.adapter_files import names
from library.families import recognition
from library.families.flux import random as random_flux
from library.families.qwen_image import random
from tests import links
from tests.families import alike
from tests.families.test_qwen_model import family
from tests.training import config_of, narrowed

SCRIPT = "qwen_image_train_network"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("qwen"), dtype=torch.float32)


@pytest.fixture(scope="module")
def stored(files):
    return load_file(files["qwen_image"])


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return random_flux.write_random_model(tmp_path_factory.mktemp("flux"))


def saved(tensors, path):
    save_file(tensors, path)
    return path


def said(files, **other):
    return [str(problem) for problem in family(files | other).problems()]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_a_single_file_is_read_with_any_prefix(files, stored, tmp_path, prefix):
    path = saved({prefix + name: tensor for name, tensor in stored.items()}, tmp_path / "m.safetensors")
    assert recognition.recognise_file(path)[:2] == ("qwen_image", "a Qwen-Image transformer")
    assert said(files, qwen_image=path) == []
    tensors = family(files | {"qwen_image": path}).load(torch.float32).denoiser.state_dict()
    assert (
        all(torch.equal(tensors[name], tensor) for name, tensor in stored.items()) and tensors.keys() == stored.keys()
    )


def test_a_diffusers_folder_has_all_parts(files, stored, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    for part, name in (("transformer", "qwen_image"), ("text_encoder", "text_encoder"), ("vae", "vae")):
        (tmp_path / part).mkdir()
        saved(load_file(files[name]), tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    assert recognition.recognise_file(tmp_path)[0] == "qwen_image"
    whole = {"qwen_image": tmp_path, "text_encoder": None, "vae": None}
    assert said(files, **whole) == []
    components = family(files | whole).load(torch.float32)
    assert torch.equal(components.denoiser.state_dict()["img_in.weight"], stored["img_in.weight"])
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImageEditPlusPipeline"}')
    (problem,) = said(files, **whole)
    assert "is Qwen-Image-Edit-2509: set model_version = edit-2509" in problem
    (tmp_path / "transformer" / "config.json").write_text('{"zero_cond_t": true}')
    (problem,) = said(files, **whole)
    assert "is Qwen-Image-Edit-2511: set model_version = edit-2511" in problem


@pytest.mark.parametrize("ending", ["scale_weight", "weight_scale"])
def test_scaled_fp8_is_read(files, stored, tmp_path, ending):
    tensors = {"scaled_fp8": torch.zeros(2)} if ending == "scale_weight" else {}
    for name, tensor in stored.items():
        if tensor.ndim == 2 and "blocks." in name:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name.removesuffix('weight')}{ending}"] = scale.reshape(()) if len(name) % 2 else scale.reshape(1)
        else:
            tensors[name] = tensor
    path = saved(tensors, tmp_path / "m.safetensors")
    assert said(files, qwen_image=path) == []
    weights_read = family(files | {"qwen_image": path}).load(torch.float32).denoiser.state_dict()
    for name, tensor in stored.items():
        assert (weights_read[name] - tensor).norm() <= 0.05 * tensor.norm(), name
    plain = saved(
        {n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in stored.items()}, tmp_path / "p.safetensors"
    )
    config = {"fp8_base": True, "mixed_precision": "bf16"}
    eight_bit = family(files | {"qwen_image": plain}, **config).load(torch.bfloat16).denoiser.state_dict()
    assert eight_bit["transformer_blocks.0.attn.to_q.weight"].dtype == torch.float8_e4m3fn
    encoder = {n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in load_file(files["text_encoder"]).items()}
    encoder |= {
        f"{n.removesuffix('weight')}{ending}": torch.tensor(2.0) for n in list(encoder) if n.endswith("proj.weight")
    }
    own_family = family(files | {"text_encoder": saved(encoder, tmp_path / "t.safetensors")}).load(torch.float32)
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(own_family.encoders["text_encoder"].state_dict()[name], 2 * encoder[f"model.{name}"].float())


def test_every_name_of_a_text_encoder_is_read(files, tmp_path):
    own = {name.removeprefix("model."): tensor for name, tensor in load_file(files["text_encoder"]).items()}
    before = family(files).load(torch.float32).encoders["text_encoder"].state_dict()
    for prefix in ("model.language_model.", "language_model.model."):
        tensors = {prefix + name: tensor for name, tensor in own.items()}
        tensors |= {"visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
        path = saved(tensors, tmp_path / f"{prefix}safetensors")  # Windows writes over no file that is mapped
        assert said(files, text_encoder=path) == []
        weights_read = family(files | {"text_encoder": path}).load(torch.float32).encoders["text_encoder"].state_dict()
        assert all(torch.equal(weights_read[name], tensor) for name, tensor in before.items())


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, others, stored, tmp_path):
    lora = saved(
        {"lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight": torch.zeros(2, 2)}, tmp_path / "l.safetensors"
    )
    layered = stored | {"time_text_embed.addition_t_embedding.weight": torch.zeros(2, 64)}
    edit = stored | {"__index_timestep_zero__": torch.zeros(0)}
    newer = {"txt_in.text_norm.weight": torch.zeros(2)}
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(files["qwen_image"].read_bytes()[:-100])
    cases = [
        ({"qwen_image": others["flux"]}, "is a FLUX.1 transformer; train it with flux_train_network"),
        ({"qwen_image": lora}, "is a LoRA file, not a model: give it as --network_weights"),
        ({"qwen_image": files["vae"]}, "is a Qwen-Image VAE; expected a Qwen-Image transformer"),
        (
            {"qwen_image": saved(layered, tmp_path / "a.safetensors")},
            "is Qwen-Image-Layered, which is not trained here",
        ),
        ({"qwen_image": saved(edit, tmp_path / "b.safetensors")}, "is Qwen-Image-Edit-2511: set model_version"),
        (
            {"qwen_image": saved(newer, tmp_path / "c.safetensors")},
            "is a Qwen-Image-2.1 transformer; train it with qwen_image_21_train",
        ),
        ({"qwen_image": saved(stored, tmp_path / "qwen_image_edit_bf16.safetensors")}, "Qwen-Image-Edit by its name"),
        ({"qwen_image": cut}, "was cut short"),
        ({"vae": others["ae"]}, "is a VAE; expected the Qwen-Image VAE"),
        ({"vae": files["text_encoder"]}, "is a Qwen2.5-VL text encoder; expected the Qwen-Image VAE"),
        ({"text_encoder": others["t5xxl"]}, "is a T5 text encoder; expected the Qwen2.5-VL text encoder"),
        ({"text_encoder": files["qwen_image"]}, "is a Qwen-Image transformer; expected the Qwen2.5-VL text encoder"),
        ({"text_encoder": tmp_path / "nowhere.safetensors"}, "does not exist"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))
    flux = families.family_for(config_of_flux(others, pretrained_model_name_or_path=files["qwen_image"]))
    assert "is a Qwen-Image transformer; train it with qwen_image_train_network" in str(next(iter(flux.problems())))
    narrow = narrowed(load_file(files["text_encoder"]), 128, 64)
    (problem,) = said(files, text_encoder=saved(narrow, tmp_path / "n.safetensors"))
    assert "has 64 channels where this model expects 128" in problem


def config_of_flux(others, **values):
    from library.config.building import build_config

    options = {name: str(others[name]) for name in ("clip_l", "t5xxl", "ae")}
    return build_config(families.config_class("flux_train_network"), options | {n: str(v) for n, v in values.items()})


def test_a_name_with_edit_is_taken_when_it_is_reported_to_be_the_original(files, stored, tmp_path):
    path = saved(stored, tmp_path / "my_edit_of_qwen.safetensors")
    assert not list(family(files | {"qwen_image": path}, model_version="original").problems())


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk, of captions of several lengths; and one with the modulation."""
    data, made = alike.short_trainings(demo, SCRIPT, tmp_path_factory.mktemp("learnt"))
    (data / "0.txt").write_text("a red circle on the sea, " * 12, encoding="utf-8")
    return data, made("plain"), made("modulated", network_args=["train_modulation=True"]), made


def test_caches_have_the_names_and_keys_of_musubi_tuner(learnt):
    folder, done, _, run = learnt
    cache_names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert cache_names == [
        "0_0064x0064_qi.safetensors",
        "0_qi_te.safetensors",
        "1_0064x0128_qi.safetensors",
        "1_qi_te.safetensors",
    ]
    with safe_open(folder / cache_names[2], "pt") as file:
        (name,), facts = file.keys(), file.metadata()
        assert name == "latents_1x16x8_float32" and file.get_tensor(name).shape == (16, 1, 16, 8)
        assert (facts["architecture"], facts["width"], facts["height"]) == ("qwen_image", "64", "128")
        assert facts["format_version"] == "1.0.1"
    lengths = alike.text_lengths(folder, cache_names[1::2], "varlen_vl_embed_float32", "qwen_image")
    assert lengths[0] > 64 > lengths[1]

    def text_in_half(name, tensors):
        halves = {key.replace("float32", "bfloat16"): t.bfloat16() for key, t in tensors.items()}
        return halves if "_te" in name else tensors

    alike.leave_as_musubi_tuner(folder, cache_names, text_in_half)
    before = {name: (folder / name).read_bytes() for name in cache_names}
    again = run("again")
    assert {name: (folder / name).read_bytes() for name in cache_names} == before
    assert again.losses == pytest.approx(done.losses, rel=1e-2)


def test_loras_load_in_diffusers_with_and_without_modulation(demo, learnt):
    from library.demo import summary

    _, plain, modulated, _ = learnt
    for done, layers in ((plain, 3 * 12), (modulated, 3 * 14)):
        tensors = done.tensors()
        assert sum(name.endswith("lora_down.weight") for name in tensors) == layers
        assert summary.check_lora_layers(done.file, config_of(demo, SCRIPT)) == (layers, [])
    assert "lora_unet_transformer_blocks_2_txt_mod_1.lora_up.weight" in modulated.tensors()
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "qwen_image"
        assert file.metadata()["modelspec.architecture"] == "Qwen-Image/lora"


def test_training_goes_on_from_a_file_of_either_kind(learnt):
    _, plain, modulated, run = learnt
    for number, (start, args) in enumerate(((plain, []), (modulated, ["train_modulation=True"]), (modulated, []))):
        done = run(f"on{number}", network_weights=start.file, network_args=args, learning_rate=1e-12)
        tensors = done.tensors()
        assert all(
            torch.allclose(tensors[name], start.tensors()[name], atol=1e-6) for name in tensors if "lora_" in name
        )
    whole = run("whole", network_weights=modulated.file, dim_from_weights=True)
    assert whole.tensors().keys() == modulated.tensors().keys()


def test_names_tell_it_from_flux_in_diffusers():
    def told(*paths, **about):
        return names.find_lora_family([f"transformer.{path}" for path in paths], about)

    assert told("transformer_blocks.0.img_mlp.net.0.proj") == "qwen_image"
    assert told("transformer_blocks.59.attn.to_q") == "qwen_image"
    assert told("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_q") == "flux"
    assert told("transformer_blocks.0.attn.to_q", ss_base_model_version="qwen_image") == "qwen_image"
    assert names.find_lora_family(["lora_unet_transformer_blocks_0_txt_mod_1"], {}) == "qwen_image"
    assert names.find_lora_family(["lora_unet_double_blocks_0_img_attn_qkv"], {}) == "flux"


def test_a_full_model_has_720_layers_or_840():
    from library.families.qwen_image.keys import LORA_NAMES

    blocks = random.make_networks(random.FULL).denoiser().transformer_blocks
    shapes = {f"transformer_blocks.{name}": tuple(t.shape) for name, t in blocks.state_dict().items()}
    paths = [path for _, path in LORA_NAMES.layers(shapes, convolutions=False)]
    assert len(paths) == 720 and sum("_mod.1.weight" in name for name in shapes) == 120


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    from library.adapter_files import verify
    from library.tools import convert, extract, merge, resize

    _, plain, modulated, _ = learnt
    base = demo.models["qwen_image"]["qwen_image"]
    done = merge.merge_into_checkpoint(base, [(plain.file, 1.0)], tmp_path / "merged.safetensors")
    assert done.modules == 36 and not verify.verify_lora(modulated.file, base).problems
    back = extract.extract_lora(
        done.path, base, tmp_path / "back.safetensors", choices=extract.ExtractOptions(rank=8, min_diff=0)
    )
    assert any("to_q" in name for name in load_file(back.path))
    small = resize.resize_lora(plain.file, tmp_path / "small.safetensors", choices=resize.ResizeOptions(rank=2))
    assert {t.shape[0] for name, t in load_file(small.path).items() if name.endswith("down.weight")} <= {1, 2}
    for style, name in (
        ("diffusers", "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"),
        ("comfy", "diffusion_model.transformer_blocks.0.attn.to_q.lora_A.weight"),
    ):
        there = convert.convert_lora(plain.file, tmp_path / f"{style}.safetensors", to=style)
        assert name in load_file(there)
        assert load_file(convert.convert_lora(there, tmp_path / f"kohya_{style}.safetensors", to="kohya")).keys() >= {
            n for n in plain.tensors() if "lora_" in n
        }
