"""Krea 2's files: every layout is read, what is something else is named, caches and LoRA are known elsewhere."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import names, verify
from library.demo import summary
from library.families import recognition
from library.families.krea_2 import keys, random
from library.families.krea_2.keys import LORA_NAMES
from library.families.qwen_image import random as random_qwen
from library.families.zimage import random as random_zimage
from library.methods.lora_files import by_name, file_of
from library.tools import convert, merge
from tests import links
from tests.families import alike
from tests.families.test_krea_2_model import family, for_diffusers
from tests.training import config_of

SCRIPT = "krea_2_train_network"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("krea_2"), dtype=torch.float32)


def saved(tensors, path):
    save_file(tensors, path)
    return path


def change_of(parts):
    """What a plain LoRA adds to a weight."""
    down = parts["lora_down.weight"]
    return parts["lora_up.weight"] @ down * (parts["alpha"] / down.shape[0])


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def test_a_folder_of_diffusers_has_all_parts_in_its_own_layout_and_its_index_tells_turbo(files, tmp_path):
    own = load_file(files["krea_2"])
    stored = {"transformer": for_diffusers(own), "vae": load_file(files["vae"])}
    encoder = load_file(files["text_encoder"]).items()
    stored["text_encoder"] = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model."): tensor
        for name, tensor in encoder
    }
    for part, tensors in stored.items():
        (tmp_path / part).mkdir()
        saved(tensors, tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    assert stored["transformer"]["transformer_blocks.0.scale_shift_table"].shape == (6, 64)
    whole = {"krea_2": tmp_path, "text_encoder": None, "vae": None}
    for distilled, version, is_wrong in ((False, None, False), (True, None, True), (True, "turbo", False)):
        (tmp_path / "model_index.json").write_text(
            json.dumps({"_class_name": "Krea2Pipeline", "is_distilled": distilled}), encoding="utf-8"
        )
        problems = said(files, {"model_version": version}, **whole)
        assert [("seems to be Turbo" in problem) for problem in problems] == [True] * is_wrong
    assert recognition.recognise_file(tmp_path)[0] == "krea_2"
    for spread in (False, True):
        parts = family(files | whole, disable_mmap_load_safetensors=spread).load(torch.float32)
        assert all(torch.equal(tensor, own[name]) for name, tensor in parts.denoiser.state_dict().items())
    tokens = parts.encoders["text_encoder"].state_dict()["embed_tokens.weight"]
    assert torch.equal(tokens, load_file(files["text_encoder"])["model.embed_tokens.weight"])


def test_which_model_a_file_is_is_asked_where_only_its_name_tells(files, tmp_path):
    turbo = saved(load_file(files["krea_2"]), tmp_path / "krea2_turbo_bf16.safetensors")
    (problem,) = said(files, {"model_version": None}, krea_2=turbo)
    assert "seems to be Turbo, whose files look the same: set model_version = turbo" in problem
    (note,) = family(files, model_version=None).notes()
    assert "trained as Raw; files of Turbo look the same" in str(note)
    assert list(family(files, model_version="raw").notes()) == []
    (note,) = family(files, model_version="turbo").notes()
    assert "forgets how to generate in few steps" in str(note) and "ostris/krea2_turbo_training_adapter/" in str(note)
    for option, value in (("base_weights", ["adapter.safetensors"]), *note.fix.items()):
        assert list(family(files, model_version="turbo", **{option: value}).notes()) == []


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, tmp_path):
    """Among others Qwen3 of the same sizes, which lacks the vision encoder alone."""
    qwen = random_qwen.write_random_model(tmp_path / "qwen")
    zimage = random_zimage.write_random_model(tmp_path / "zimage", sizes=replace(random_zimage.TINY, text=48))
    narrow = random.write_random_model(tmp_path / "narrow", sizes=replace(random.TINY, text=32))
    cases = [
        ({"krea_2": qwen["qwen_image"]}, "is a Qwen-Image transformer; train it with qwen_image_train_network"),
        ({"krea_2": files["vae"]}, "is a Qwen-Image VAE; expected a Krea 2 transformer"),
        ({"vae": zimage["vae"]}, "is a VAE; expected the Qwen-Image VAE"),
        ({"text_encoder": zimage["text_encoder"]}, "is a Qwen3 text encoder; expected the Qwen3-VL-4B text encoder"),
        ({"text_encoder": qwen["text_encoder"]}, "is a Qwen2.5-VL text encoder; expected the Qwen3-VL-4B"),
        ({"text_encoder": narrow["text_encoder"]}, "has 32 channels where this model expects 48"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk, of captions of several lengths, with adapters on every linear layer."""
    every = ["train_text_fusion=True", "train_embedders=True"]
    data, made = alike.short_trainings(demo, SCRIPT, tmp_path_factory.mktemp("learnt"), network_args=every)
    (data / "0.txt").write_text("a red circle on the sea, " * 12, encoding="utf-8")
    return data, made("plain"), made


def test_caches_have_the_names_and_keys_of_musubi_tuner(learnt):
    folder, done, run = learnt
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    assert found == ["0_0064x0064_kr2.safetensors", "0_kr2_te.safetensors", "1_0064x0128_kr2.safetensors"] + [
        "1_kr2_te.safetensors"
    ]
    with safe_open(folder / found[2], "pt") as file:
        (name,), facts = file.keys(), file.metadata()
        assert name == "latents_1x16x8_float32" and file.get_tensor(name).shape == (16, 1, 16, 8)
        assert (facts["architecture"], facts["width"], facts["height"]) == ("krea2", "64", "128")
    lengths = []
    for name in (found[1], found[3]):
        with safe_open(folder / name, "pt") as file:
            (key,) = file.keys()
            assert key == "varlen_krea2_vl_embed_float32" and file.metadata()["architecture"] == "krea2"
            assert file.get_tensor(key).shape[1:] == (2, 48)
            lengths.append(file.get_tensor(key).shape[0])
    assert lengths[0] > 64 > lengths[1]
    alike.leave_as_musubi_tuner(folder, found)
    assert run("again").losses == done.losses


def test_a_lora_file_is_loaded_whole_by_diffusers_and_has_the_names_of_comfyui(demo, learnt, tmp_path):
    from diffusers.loaders import Krea2LoraLoaderMixin

    _, plain, run = learnt
    tensors = plain.tensors()
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "krea2"
        assert file.metadata()["modelspec.architecture"] == "Krea-2/lora"
    kohya = {name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")}
    linear = {n for n, t in load_file(demo.models["krea_2"]["krea_2"]).items() if n.endswith(".weight")}
    assert kohya == {f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}" for name in linear}
    comfy = convert.convert_lora(plain.file, tmp_path / "comfy.safetensors", to="comfy")
    stored = load_file(comfy)
    assert {n.removesuffix(".lora_A.weight") for n in stored if "lora_A" in n} == {
        f"diffusion_model.{name.removesuffix('.weight')}" for name in linear
    }
    loaded = Krea2LoraLoaderMixin.lora_state_dict(dict(stored))
    assert {n.removesuffix(".lora_A.weight") for n in loaded if "lora_A" in n} == {
        f"transformer.{keys.diffusers_krea_2_path(name.removesuffix('.weight'))}" for name in linear
    }
    assert summary.check_lora_layers(comfy, config_of(demo, SCRIPT)) == (len(linear), [])
    for to in ("diffusers", "kohya"):
        path = convert.convert_lora(comfy, tmp_path / f"{to}.safetensors", to=to)
        assert by_name(file_of(path, "krea_2")).keys() == kohya
        layers = [key.rpartition(".lora_")[0] for key in load_file(path) if ".lora_" in key]
        assert names.find_lora_family(layers, {}) == "krea_2"
    usual = run("usual", network_args=[]).tensors()
    inside = {n.partition(".")[0] for n in usual}
    assert inside == {name for name in kohya if name.startswith("lora_unet_blocks_")} and len(inside) == 3 * 8
    on = run("on", network_weights=comfy, learning_rate=1e-12).tensors()
    for name, parts in by_name(on).items():  # the strength is part of a matrix in one file, and a number in the other
        torch.testing.assert_close(change_of(parts), change_of(by_name(tensors)[name]), rtol=1e-3, atol=1e-6)


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    _, plain, _ = learnt
    base = demo.models["krea_2"]["krea_2"]
    own, tables = load_file(base), load_file(base)
    folder = saved(for_diffusers(tables), tmp_path / "diffusers.safetensors")
    assert recognition.recognise_file(folder)[:2] == ("krea_2", "a Krea 2 transformer")
    count = len(by_name(plain.tensors()))
    for number, path in enumerate((base, folder)):
        out = tmp_path / f"{number}.safetensors"
        done = merge.merge_into_checkpoint(path, [(plain.file, 1.0)], out, dtype="float")
        assert done.modules == count and not verify.verify_lora(plain.file, path).problems
        name = ("blocks.1.attn.wk.weight", "transformer_blocks.1.attn.to_k.weight")[number]
        expected = change_of(by_name(plain.tensors())["lora_unet_blocks_1_attn_wk"])
        change = load_file(done.path)[name] - own["blocks.1.attn.wk.weight"].float()
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-6)


def test_a_full_model_has_224_layers_in_its_blocks():
    shapes = {name: tuple(t.shape) for name, t in random.make_networks(random.FULL).denoiser().state_dict().items()}
    stored = {f"model.diffusion_model.{name}": shape for name, shape in shapes.items()}
    assert len([*LORA_NAMES.layers(stored, convolutions=False)]) == 28 * 8
    linear = sum(len(shape) == 2 and name.endswith(".weight") for name, shape in shapes.items())
    assert linear == 264  # as many as musubi-tuner adapts
