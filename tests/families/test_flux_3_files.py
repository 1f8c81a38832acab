"""FLUX.3's files: both layouts are read, what is something else is named, caches and LoRA are known elsewhere."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import names, verify
from library.demo import summary
from library.families import recognition
from library.families.flux_2 import random as random_flux_2
from library.families.flux_3 import keys, random
from library.families.flux_3.keys import LORA_NAMES
from library.families.zimage import random as random_zimage
from library.methods.lora_files import by_name, file_of
from library.tools import convert, merge
from tests import links
from tests.families import alike
from tests.families.test_flux_3_model import family, for_diffusers
from tests.training import config_of, pictures, train

SCRIPT = "flux_3_train_network"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux_3"), dtype=torch.float32)


def saved(tensors, path):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def change_of(parts):
    """What a plain LoRA adds to a weight."""
    down = parts["lora_down.weight"]
    return parts["lora_up.weight"] @ down * (parts["alpha"] / down.shape[0])


def test_a_folder_of_diffusers_has_all_parts_in_its_own_layout(files, tmp_path):
    own = load_file(files["flux_3"])
    encoder = load_file(files["text_encoder"]).items()
    stored = {
        "transformer": for_diffusers(own),
        "vae": load_file(files["vae"]),
        "text_encoder": {
            f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model."): tensor
            for name, tensor in encoder
        },
    }
    for part, tensors in stored.items():
        (tmp_path / part).mkdir()
        saved(tensors, tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    index = tmp_path / "modular_model_index.json"
    index.write_text(json.dumps({"_class_name": "Flux3ModularPipeline"}), encoding="utf-8")
    whole = {"flux_3": tmp_path, "text_encoder": None, "vae": None}
    assert said(files, **whole) == [] and recognition.recognise_file(tmp_path)[0] == "flux_3"
    assert "mode_blocks.image.0.attn.to_out.0.weight" in stored["transformer"]
    parts = family(files | whole).load(torch.float32)
    assert all(torch.equal(tensor, own[name]) for name, tensor in parts.denoiser.state_dict().items())
    tokens = parts.encoders["text_encoder"].state_dict()["embed_tokens.weight"]
    assert torch.equal(tokens, load_file(files["text_encoder"])["model.embed_tokens.weight"])


def test_a_distilled_model_is_recognised_by_its_header_and_training_it_is_warned_of(files, tmp_path):
    sizes = replace(random.TINY, distilled=True)
    distilled = random.write_random_model(tmp_path / "distilled", dtype=torch.float32, sizes=sizes)
    own = load_file(distilled["flux_3"])
    for path in (distilled["flux_3"], saved(for_diffusers(own), tmp_path / "diffusers.safetensors")):
        assert recognition.recognise_file(path)[:2] == ("flux_3", "a distilled FLUX.3 transformer")
        found = family(distilled | {"flux_3": path})
        assert list(found.problems()) == [] and found.architecture == "Flux.3-klein"
        assert found.sample_defaults["sample_steps"] == 16 and found.sample_defaults["scale"] == 1.0
        (note,) = found.notes()
        assert "forgets how to generate in few steps" in str(note) and "SimpleTuner/flux-3-klein-image-LoRA" in str(
            note
        )
        assert list(family(distilled, assistant_lora="assistant.safetensors").notes()) == []
        weights_read = found.load(torch.float32).denoiser.state_dict()
        assert all(torch.equal(weights_read[name], own[name]) for name in own)
    base = family(files)
    assert list(base.notes()) == [] and base.architecture == "Flux.3-klein-base"
    assert base.sample_defaults["sample_steps"] == 50


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, tmp_path):
    """Among others FLUX.2, whose transformer has names like these in diffusers, and half of a text encoder."""
    flux_2 = random_flux_2.write_random_model(tmp_path / "flux_2")
    zimage = random_zimage.write_random_model(tmp_path / "zimage", sizes=replace(random_zimage.TINY, text=40))
    wide = random.write_random_model(tmp_path / "wide", sizes=replace(random.TINY, text=56))
    half = {n: t for n, t in load_file(files["text_encoder"]).items() if not n.startswith("model.layers.8.")}
    cases = [
        ({"flux_3": flux_2["flux_2"]}, "is a FLUX.2 transformer; train it with flux_2_train_network"),
        ({"flux_3": files["vae"]}, "is a FLUX.2 VAE; expected a FLUX.3 transformer"),
        ({"vae": zimage["vae"]}, "is a VAE; expected the FLUX.2 VAE"),
        ({"text_encoder": zimage["text_encoder"]}, "is a Qwen3 text encoder; expected the Qwen3-VL-4B text encoder"),
        ({"text_encoder": saved(half, tmp_path / "half.safetensors")}, "lacks 1 of its"),
        ({"text_encoder": wide["text_encoder"]}, "has 56 channels where this model expects 40"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk, of captions of several lengths and none at all."""
    data, made = alike.short_trainings(demo, SCRIPT, tmp_path_factory.mktemp("learnt"))
    (data / "0.txt").write_text("a red circle on the sea, " * 12, encoding="utf-8")
    (data / "1.txt").write_text("", encoding="utf-8")
    return data, made("plain"), made


def test_caches_hold_whole_windows_and_are_read_again(learnt):
    folder, done, run = learnt
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    assert found == ["0_0064x0064_f3.safetensors", "0_f3_te.safetensors", "1_0064x0128_f3.safetensors"] + [
        "1_f3_te.safetensors"
    ]
    lengths = []
    for name in (found[1], found[3]):
        with safe_open(folder / name, "pt") as file:
            (key,) = file.keys()
            assert key == "varlen_ctx_vec_float32" and file.get_tensor(key).shape[1:] == (320,)
            lengths.append(len(file.get_tensor(key)))
    assert lengths[0] % 80 == 0 and lengths[0] > lengths[1] == 80
    assert run("again").losses == done.losses


def test_a_lora_file_is_loaded_whole_by_diffusers_and_has_the_names_of_comfyui(demo, learnt, tmp_path):
    from diffusers.loaders import Flux3LoraLoaderMixin

    _, plain, run = learnt
    tensors = plain.tensors()
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "flux_3_klein_base"
        assert file.metadata()["modelspec.architecture"] == "Flux.3-klein-base/lora"
    kohya = {name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")}
    shapes = {n: t.shape for n, t in load_file(demo.models["flux_3"]["flux_3"]).items()}
    linear = {path for _, path in LORA_NAMES.layers(shapes, False) if ".image_cond." not in path}
    assert kohya == {f"lora_unet_{path.replace('.', '_')}" for path in linear} and len(kohya) == 6 * 6
    comfy = convert.convert_lora(plain.file, tmp_path / "comfy.safetensors", to="comfy")
    stored = load_file(comfy)
    assert {n.removesuffix(".lora_A.weight") for n in stored if "lora_A" in n} == {
        f"diffusion_model.{path}" for path in linear
    }
    loaded = Flux3LoraLoaderMixin.lora_state_dict(dict(stored))
    assert {n.removesuffix(".lora_A.weight") for n in loaded if "lora_A" in n} == {
        f"transformer.{keys.diffusers_flux_3_path(path)}" for path in linear
    }
    assert all("lora" in name for name in loaded)
    for file in (plain.file, comfy):
        assert summary.check_lora_layers(file, config_of(demo, SCRIPT)) == (len(linear), [])
    for to in ("diffusers", "kohya"):
        path = convert.convert_lora(comfy, tmp_path / f"{to}.safetensors", to=to)
        assert by_name(file_of(path, "flux_3")).keys() == kohya
        layers = [key.rpartition(".lora_")[0] for key in load_file(path) if ".lora_" in key]
        assert names.find_lora_family(layers, {}) == "flux_3"
    on = run("on", network_weights=comfy, learning_rate=1e-12).tensors()
    for name, parts in by_name(on).items():  # the strength is part of a matrix in one file, and a number in the other
        torch.testing.assert_close(change_of(parts), change_of(by_name(tensors)[name]), rtol=1e-3, atol=1e-6)


def test_blocks_are_chosen_by_kind_and_references_train_their_own(demo, learnt, tmp_path):
    """With a reference image of another size."""
    folder, _, run = learnt
    shown = tmp_path / "shown"
    pictures(tmp_path / "other", ((96, 64), (64, 64)), repeats=1)
    (tmp_path / "other" / "1_zorb toy").rename(shown)
    chosen = ["train_reference_blocks=True", "train_text_block_indices=none", "train_joint_block_indices=1-2"]
    done = run("shown", control_directory=shown, network_args=chosen)
    blocks = {name.split(".")[0].rpartition("_0_" if "mode" in name else "_q_")[0] for name in done.tensors()}
    blocks = {name for name in blocks if name}
    assert {n for n in blocks if "mode" in n} == {f"lora_unet_content_mode_blocks_{k}" for k in ("image", "image_cond")}
    assert {n for n in blocks if "single" in n} == {"lora_unet_single_blocks_1", "lora_unet_single_blocks_2"}
    assert all(t.abs().max() > 0 for n, t in done.tensors().items() if n.endswith("lora_up.weight"))


def test_a_whole_model_learns_without_references_and_leaves_their_layers_as_they_are(demo, learnt):
    folder, _, run = learnt
    before = load_file(demo.models["flux_3"]["flux_3"])
    script = "flux_3_train"
    data = {"train_data_dir": folder.parent, "output_dir": folder.parent.parent / "full", "resolution": "96"}
    done = train(config_of(demo, script, max_train_steps=2, learning_rate=1e-2, optimizer_type="SGD", **data))
    after = load_file(done.file)
    assert after.keys() == before.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor.float(), before[name].float())}
    assert not any("image_cond" in name for name in changed)
    assert {"emb_in.image.weight", "single_blocks.3.mlp_out.weight", "txt_in.weight"} <= changed


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    _, plain, _ = learnt
    base = demo.models["flux_3"]["flux_3"]
    own = load_file(base)
    folder = saved(for_diffusers(own), tmp_path / "diffusers.safetensors")
    assert recognition.recognise_file(folder)[:2] == ("flux_3", "a FLUX.3 transformer")
    count = len(by_name(plain.tensors()))
    expected = change_of(by_name(plain.tensors())["lora_unet_single_blocks_1_k_proj"])
    for number, path in enumerate((base, folder)):
        out = tmp_path / f"{number}.safetensors"
        done = merge.merge_into_checkpoint(path, [(plain.file, 1.0)], out, dtype="float")
        assert done.modules == count and not verify.verify_lora(plain.file, path).problems
        merged = load_file(done.path)
        change = merged["single_blocks.1.k_proj.weight"] - own["single_blocks.1.k_proj.weight"].float()
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-6)
        name = "final_layer.image.adaLN_modulation.1.weight"
        assert torch.equal(merged[name], own[name].float())


def test_a_full_model_has_258_layers_in_its_blocks():
    stored = {name: tuple(t.shape) for name, t in random.make_networks(random.FULL).denoiser().state_dict().items()}
    stored = {f"model.diffusion_model.{name}": shape for name, shape in stored.items()}
    assert len([*LORA_NAMES.layers(stored, convolutions=False)]) == 43 * 6
