"""Z-Image's files: every layout is read, what is something else is named, caches and LoRA are known elsewhere."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import names, verify
from library.demo import summary
from library.families import recognition
from library.families.flux import random as random_flux
from library.families.zimage import keys, random
from library.families.zimage.keys import LORA_NAMES
from library.methods.lora_files import by_name, file_of
from library.tools import convert, merge
from tests import links
from tests.families import alike
from tests.families.test_zimage_model import family
from tests.training import config_of, narrowed

SCRIPT = "zimage_train_network"
INSIDE = (
    "attention.to_q",
    "attention.to_k",
    "attention.to_v",
    "attention.to_out.0",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("zimage"), dtype=torch.float32)


@pytest.fixture(scope="module")
def stored(files):
    return load_file(files["zimage"])


@pytest.fixture(scope="module")
def own(files):
    return family(files).load(torch.float32).denoiser.state_dict()


def saved(tensors, path):
    save_file(tensors, path)
    return path


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def loaded(files, path, dtype=torch.float32, **values):
    return family(files | {"zimage": path}, **values).load(dtype).denoiser.state_dict()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_single_file_is_read_with_any_prefix_and_in_the_layout_of_diffusers(files, stored, own, tmp_path, prefix):
    assert own["layers.0.attention.to_k.weight"].equal(stored["layers.0.attention.qkv.weight"].chunk(3)[1])
    for tensors in (stored | {"norm_final.weight": torch.zeros(96)}, own):
        path = saved({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "m.safetensors")
        assert recognition.recognise_file(path)[:2] == ("zimage", "a Z-Image transformer")
        assert said(files, zimage=path) == []
        weights_read = loaded(files, path)
        assert weights_read.keys() == own.keys() and all(torch.equal(weights_read[name], own[name]) for name in own)
        spread = loaded(files, path, disable_mmap_load_safetensors=True)
        assert all(torch.equal(spread[name], own[name]) for name in own)


def test_a_diffusers_folder_has_all_parts_and_its_scheduler_tells_turbo(files, own, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "ZImagePipeline"}')
    for part, name in (("transformer", "zimage"), ("text_encoder", "text_encoder"), ("vae", "vae")):
        (tmp_path / part).mkdir()
        saved(own if name == "zimage" else load_file(files[name]), tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    (tmp_path / "scheduler").mkdir()
    assert recognition.recognise_file(tmp_path)[0] == "zimage"
    whole = {"zimage": tmp_path, "text_encoder": None, "vae": None}
    for shift, version, wrong in ((6.0, None, False), (3.0, None, True), (3.0, "turbo", False), (3.0, "base", False)):
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(f'{{"shift": {shift}}}')
        problems = said(files, {"model_version": version}, **whole)
        assert [("seems to be Turbo" in problem) for problem in problems] == [True] * wrong
    components = family(files | whole).load(torch.float32)
    assert torch.equal(components.denoiser.state_dict()["x_pad_token"], own["x_pad_token"])


def test_which_model_a_file_is_is_asked_where_only_its_name_tells_and_reported_where_nothing_does(
    files, stored, tmp_path
):
    turbo = saved(stored, tmp_path / "z_image_turbo_bf16.safetensors")
    (problem,) = said(files, {"model_version": None}, zimage=turbo)
    assert "seems to be Turbo, whose files look the same: set model_version = turbo" in problem
    assert said(files, {"model_version": None}, zimage=saved(stored, tmp_path / "z_image_de_turbo.safetensors")) == []
    (note,) = family(files, model_version=None).notes()
    assert "trained as base; files of Turbo look the same" in str(note)
    assert list(family(files, model_version="base").notes()) == []
    (note,) = family(files, model_version="turbo").notes()
    assert "forgets how to generate in few steps" in str(note)
    for option, value in (("base_weights", ["adapter.safetensors"]), *note.fix.items()):
        assert list(family(files, model_version="turbo", **{option: value}).notes()) == []


def test_fp8_is_read_with_scales_and_kept_without(files, stored, own, tmp_path):
    tensors = {}
    for name, tensor in stored.items():
        if tensor.ndim == 2 and "layers." in name:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name.removesuffix('weight')}weight_scale"] = scale.reshape(())
        else:
            tensors[name] = tensor
    path = saved(tensors, tmp_path / "m.safetensors")
    assert said(files, zimage=path) == []
    weights_read = loaded(files, path)
    for name, tensor in own.items():
        assert (weights_read[name] - tensor).norm() <= 0.05 * tensor.norm(), name
    plain = saved({n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in stored.items()}, path)
    eight_bit = loaded(files, plain, torch.bfloat16, fp8_base=True, mixed_precision="bf16")
    assert eight_bit["layers.0.attention.to_q.weight"].dtype == torch.float8_e4m3fn
    assert eight_bit["cap_embedder.1.weight"].dtype == torch.bfloat16


def test_every_name_of_a_text_encoder_is_read(files, tmp_path):
    own = {name.removeprefix("model."): tensor for name, tensor in load_file(files["text_encoder"]).items()}
    before = family(files).load(torch.float32).encoders["text_encoder"].state_dict()
    assert not any(name.startswith(("layers.2.", "norm.")) for name in before)  # of three layers two are needed
    for prefix in ("", "model.language_model."):
        tensors = {prefix + name: tensor for name, tensor in own.items()} | {"lm_head.weight": torch.zeros(2, 2)}
        path = saved(tensors, tmp_path / "t.safetensors")
        assert said(files, text_encoder=path) == []
        weights_read = family(files | {"text_encoder": path}).load(torch.float32).encoders["text_encoder"].state_dict()
        assert weights_read.keys() == before.keys() and all(
            torch.equal(weights_read[name], before[name]) for name in before
        )


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, stored, tmp_path):
    others = random_flux.write_random_model(tmp_path / "flux")
    adapter = saved(
        {"diffusion_model.layers.0.attention.to_q.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "l.safetensors"
    )
    omni = saved(stored | {"siglip_embedder.1.weight": torch.zeros(2, 2)}, tmp_path / "o.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(files["zimage"].read_bytes()[:-100])
    words = narrowed(load_file(files["text_encoder"]), 64, 32)
    cases = [
        ({"zimage": others["flux"]}, "is a FLUX.1 transformer; train it with flux_train_network"),
        ({"zimage": adapter}, "is a LoRA file, not a model: give it as --network_weights"),
        ({"zimage": files["vae"]}, "is a VAE; expected a Z-Image transformer"),
        ({"zimage": omni}, "is a Z-Image-Omni transformer, which is not trained here: use Z-Image or Z-Image Turbo"),
        ({"zimage": cut}, "was cut short"),
        ({"vae": files["text_encoder"]}, "is a Qwen3 text encoder; expected the FLUX.1 autoencoder"),
        ({"text_encoder": others["t5xxl"]}, "is a T5 text encoder; expected the Qwen3-4B text encoder"),
        ({"text_encoder": saved(words, tmp_path / "n.safetensors")}, "has 32 channels where this model expects 64"),
        ({"text_encoder": tmp_path / "nowhere.safetensors"}, "does not exist"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk, of captions of several lengths, and what later trainings read of them."""
    data, made = alike.short_trainings(demo, SCRIPT, tmp_path_factory.mktemp("learnt"))
    (data / "0.txt").write_text("a red circle on the sea, " * 12, encoding="utf-8")
    return data, made("plain"), made


def test_caches_have_the_names_and_keys_of_musubi_tuner(demo, learnt):
    folder, done, run = learnt
    cache_names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert cache_names == [
        "0_0064x0064_zi.safetensors",
        "0_zi_te.safetensors",
        "1_0064x0128_zi.safetensors",
        "1_zi_te.safetensors",
    ]
    with safe_open(folder / cache_names[2], "pt") as file:
        (name,), facts = file.keys(), file.metadata()
        assert name == "latents_1x16x8_float32" and file.get_tensor(name).shape == (16, 16, 8)
        assert (facts["architecture"], facts["width"], facts["height"]) == ("z_image", "64", "128")
    lengths = alike.text_lengths(folder, cache_names[1::2], "varlen_llm_embed_float32", "z_image")
    assert lengths[0] > 64 > lengths[1]
    alike.leave_as_musubi_tuner(folder, cache_names)
    before = {name: (folder / name).read_bytes() for name in cache_names}
    assert run("again").losses == done.losses
    assert {name: (folder / name).read_bytes() for name in cache_names} == before


def test_a_lora_file_is_loaded_whole_by_diffusers_and_comfyui(demo, learnt):
    _, plain, run = learnt
    tensors = plain.tensors()
    layers = {name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")}
    # ComfyUI maps these paths of diffusers onto its own layers, query, key and value onto rows of one.
    assert layers == {f"diffusion_model.layers.{n}.{inside}" for n in range(3) for inside in INSIDE}
    assert summary.check_lora_layers(plain.file, config_of(demo, SCRIPT)) == (21, [])
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "z_image"
        assert file.metadata()["modelspec.architecture"] == "Z-Image/lora"
    more = run("more", network_args=["train_refiners=True", "train_modulation=True"])
    assert summary.check_lora_layers(more.file, config_of(demo, SCRIPT)) == (3 * 8 + 8 + 7, [])


def test_lokr_is_saved_under_the_same_names_and_goes_on(demo, learnt):
    from diffusers.loaders import ZImageLoraLoaderMixin

    _, _, run = learnt
    lokr = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr", "factor=4", "preset=attn-mlp"]}
    first = run("lokr", **lokr)
    tensors = first.tensors()
    layers = {name.rpartition(".")[0] for name in ZImageLoraLoaderMixin.lora_state_dict(dict(tensors))}
    names_in_diffusers = {f"transformer.{name}" for name in random.make_networks().denoiser().state_dict()}
    assert len(layers) > 21 and {f"{layer}.weight" for layer in layers} <= names_in_diffusers
    assert all(name.startswith("diffusion_model.") for name in tensors)
    narrow = run("attention", **lokr | {"network_args": ["algo=lokr", "factor=4", "preset=attn-only"]}).tensors()
    assert narrow and all(".attention.to_" in name for name in narrow)
    again = run("lokr on", **lokr, network_weights=first.file, learning_rate=1e-12).tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.allclose(again[name], tensors[name], atol=1e-6) for name in tensors)


def test_training_goes_on_from_files_of_every_naming(learnt, tmp_path):
    _, plain, run = learnt
    start = plain.tensors()
    kohya = load_file(convert.convert_lora(plain.file, tmp_path / "kohya.safetensors", to="kohya"))
    assert "lora_unet_layers_0_attention_to_out_0.lora_down.weight" in kohya
    fused = {}  # as the original tree has the layers
    for name, tensors in by_name(kohya).items():
        down, up, alpha = (tensors[key] for key in ("lora_down.weight", "lora_up.weight", "alpha"))
        block = name.partition("_attention_")[0]
        if name.endswith("_to_q"):
            parts = [by_name(kohya)[f"{block}_attention_to_{letter}"] for letter in "qkv"]
            down = torch.cat([part["lora_down.weight"] for part in parts])
            up, alpha = torch.block_diag(*(part["lora_up.weight"] for part in parts)), alpha * 3
            name = f"{block}_attention_qkv"
        elif name.endswith(("_to_k", "_to_v")):
            continue
        own = {"lora_down.weight": down, "lora_up.weight": up, "alpha": alpha}
        fused |= {f"{name.replace('_to_out_0', '_out')}.{key}": tensor.clone() for key, tensor in own.items()}
    peft = load_file(convert.convert_lora(plain.file, tmp_path / "peft.safetensors", to="diffusers"))
    toolkit = {name.replace("transformer.", "diffusion_model."): tensor for name, tensor in peft.items()}
    for number, tensors in enumerate((kohya, fused, peft, toolkit)):
        path = saved(tensors, tmp_path / f"{number}.safetensors")
        assert by_name(file_of(path, "zimage")).keys() == by_name(kohya).keys()
        assert (
            names.find_lora_family([key.rpartition(".lora_")[0] for key in tensors if ".lora_" in key], {}) == "zimage"
        )
    continued = run("on", network_weights=tmp_path / "1.safetensors", learning_rate=1e-12).tensors()
    assert continued.keys() == start.keys()
    assert all(torch.allclose(continued[name].float(), start[name].float(), atol=1e-6) for name in start)


def test_a_full_model_has_210_layers():
    shapes = {name: tuple(t.shape) for name, t in random.make_networks(random.FULL).denoiser().state_dict().items()}
    assert len([*LORA_NAMES.layers(shapes, convolutions=False)]) == 210
    fused = keys.zimage_to_single({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    stored = {f"model.diffusion_model.{name}": tuple(tensor.shape) for name, tensor in fused.items()}
    assert len([*LORA_NAMES.layers(stored, convolutions=False)]) == 210
    place = LORA_NAMES.slice_of("denoiser", "layers.7.attention.to_v", stored)
    assert (place.key, place.part, place.parts) == ("model.diffusion_model.layers.7.attention.qkv.weight", 2, 3)


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    _, plain, _ = learnt
    base = demo.models["zimage"]["zimage"]
    done = merge.merge_into_checkpoint(base, [(plain.file, 1.0)], tmp_path / "merged.safetensors", dtype="float")
    assert done.modules == 21 and not verify.verify_lora(plain.file, base).problems
    before, after = load_file(base), load_file(done.path)
    change = (after["layers.1.attention.qkv.weight"] - before["layers.1.attention.qkv.weight"].float()).chunk(3)
    own = {
        key: plain.tensors()[f"diffusion_model.layers.1.attention.to_v.{key}"]
        for key in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    expected = own["lora_up.weight"] @ own["lora_down.weight"] * (own["alpha"] / own["lora_down.weight"].shape[0])
    torch.testing.assert_close(change[2], expected, rtol=1e-3, atol=1e-6)
    alike.extract_and_resize(done.path, base, plain.file, tmp_path)
