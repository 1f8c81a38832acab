"""Anima's files: every layout is read, what is something else is named, caches and LoRA are known elsewhere."""

import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library import families, methods
from library.adapter_files import names, verify
from library.demo import summary
from library.families import recognition
from library.families.anima import random
from library.families.anima.keys import LORA_NAMES
from library.families.anima.options import AnimaArgs
from library.families.flux import random as random_flux
from library.methods import targets
from library.tools import convert, merge
from tests import links
from tests.families import alike
from tests.families.test_anima_model import family, in_diffusers
from tests.training import config_of, narrowed, pictures, train

SCRIPT = "anima_train_network"
PARTS = [f"{part}_{name}_proj" for part in ("self_attn", "cross_attn") for name in ("q", "k", "v", "output")]
INSIDE = [*PARTS, "mlp_layer1", "mlp_layer2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("anima"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    return family(files).load(torch.float32).denoiser.state_dict()


def saved(tensors, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def loaded(files, path, dtype=torch.float32, **values):
    return family(files | {"anima": path}, **values).load(dtype).denoiser.state_dict()


def same(tensors, own):
    return tensors.keys() == own.keys() and all(torch.equal(tensors[name], own[name]) for name in own)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_is_read_with_any_prefix(files, own, tmp_path, prefix):
    tensors = own | {"pos_embedder.seq": torch.zeros(4)}
    path = saved({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "m.safetensors")
    assert recognition.recognise_file(path)[:2] == ("anima", "an Anima transformer")
    assert said(files, anima=path) == [] and same(loaded(files, path), own)


def test_a_diffusers_folder_and_an_adapter_of_its_own_are_read(files, own, tmp_path):
    apart = in_diffusers(own)
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "AnimaModularPipeline"}')
    for part, tensors in {**apart, "text_encoder": load_file(files["text_encoder"])}.items():
        saved(tensors, tmp_path / part / "model.safetensors")
    saved(load_file(files["vae"]), tmp_path / "vae" / "model.safetensors")
    for name in ("tokenizer", "t5_tokenizer"):
        links.link_or_copy(tmp_path / name, files[name])
    assert recognition.recognise_file(tmp_path)[0] == "anima"
    whole = {"anima": tmp_path, "text_encoder": None, "vae": None}
    assert said(files, **whole) == []
    assert same(family(files | whole).load(torch.float32).denoiser.state_dict(), own)

    bare = saved(
        {k: t for k, t in own.items() if not k.startswith("llm_adapter.")},
        tmp_path / "else" / "where" / "bare.safetensors",
    )
    assert recognition.recognise_file(bare)[:2] == ("", "a Cosmos-Predict2 transformer")
    (problem,) = said(files, anima=bare)
    assert "llm_adapter_path is not set, and" in problem and "has no text adapter" in problem
    for tensors in (
        apart["text_conditioner"],
        {f"net.llm_adapter.{k}": t for k, t in apart["text_conditioner"].items()},
    ):
        beside = {"llm_adapter_path": saved(tensors, tmp_path / "adapter.safetensors")}
        assert said(files, beside, anima=bare) == [] and same(loaded(files, bare, **beside), own)
    (problem,) = said(files, {"llm_adapter_path": files["vae"]}, anima=bare)
    assert "is a Qwen-Image VAE; expected the text adapter of Anima" in problem


def test_fp8_is_read_with_scales_and_kept_without(files, own, tmp_path):
    tensors = {}
    for name, tensor in own.items():
        if tensor.ndim == 2 and name.startswith("blocks."):
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name.removesuffix('weight')}weight_scale"] = scale.reshape(())
        else:
            tensors[name] = tensor
    path = saved(tensors, tmp_path / "m.safetensors")
    assert said(files, anima=path) == []
    weights_read = loaded(files, path)
    assert all((weights_read[name] - tensor).norm() <= 0.05 * tensor.norm() for name, tensor in own.items())
    saved({n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in own.items()}, path)
    eight_bit = loaded(files, path, torch.bfloat16, fp8_base=True, mixed_precision="bf16")
    assert eight_bit["blocks.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert eight_bit["x_embedder.proj.1.weight"].dtype == eight_bit["llm_adapter.embed.weight"].dtype == torch.bfloat16


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, tmp_path):
    others = random_flux.write_random_model(tmp_path / "flux")
    adapter = saved({"lora_unet_blocks_0_mlp_layer1.lora_down.weight": torch.zeros(2, 2)}, tmp_path / "l.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(files["anima"].read_bytes()[:-100])
    words = narrowed(load_file(files["text_encoder"]), 48, 32)
    cases = [
        ({"anima": others["flux"]}, {}, "is a FLUX.1 transformer; train it with flux_train_network"),
        ({"anima": adapter}, {}, "is a LoRA file, not a model: give it as --network_weights"),
        ({"anima": files["vae"]}, {}, "is a Qwen-Image VAE; expected an Anima transformer"),
        ({"anima": cut}, {}, "was cut short"),
        ({"vae": others["ae"]}, {}, "is a VAE; expected the Qwen-Image VAE"),
        ({"text_encoder": others["t5xxl"]}, {}, "is a T5 text encoder; expected the Qwen3-0.6B text encoder"),
        ({"text_encoder": saved(words, tmp_path / "n.safetensors")}, {}, "has 32 channels where this model expects 48"),
        ({}, {"t5_tokenizer_path": files["tokenizer"]}, "does not hold the tokenizer google/t5-v1_1-xxl"),
        ({}, {"qwen3": tmp_path / "nowhere.safetensors"}, "does not exist"),
    ]
    for paths, values, sentence in cases:
        problems = said(files, values, **paths)
        assert len(problems) == 1 and sentence in problems[0] and "\n" not in problems[0], (paths, problems)


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk, and what later trainings read of them."""
    folder = tmp_path_factory.mktemp("learnt")
    data, made = alike.short_trainings(demo, SCRIPT, folder, network_train_unet_only=True)
    return data, made("plain", caption_dropout_rate=0.25), made


def test_caches_are_those_of_sd_scripts_and_captions_are_dropped_with_them(learnt):
    folder, done, run = learnt
    cache_names = sorted(path.name for path in folder.glob("*.npz"))
    assert cache_names == ["0_0064x0064_anima.npz", "0_anima_te.npz", "1_0064x0128_anima.npz", "1_anima_te.npz"]
    with np.load(folder / cache_names[2]) as file:
        assert file["latents_16x8"].shape == (16, 16, 8) and list(file["original_size_16x8"]) == [64, 128]
    with np.load(folder / cache_names[1]) as file:
        about = {name: (file[name].shape, file[name].dtype.name) for name in file.files if name != "made_from"}
        assert float(file["caption_dropout_rate"]) == 0.25
    assert about == {
        "prompt_embeds": ((64, 48), "float32"),
        "attn_mask": ((64,), "int64"),
        "t5_input_ids": ((64,), "int32"),
        "t5_attn_mask": ((64,), "int32"),
        "caption_dropout_rate": ((), "float32"),
    }
    for name in cache_names:  # as sd-scripts leaves them: without ours, and once with a frame
        with np.load(folder / name) as file:
            arrays = {key: file[key] for key in file.files if not key.startswith("made_from")}
        np.savez(folder / name, **arrays)
    before = {name: (folder / name).read_bytes() for name in cache_names}
    assert run("again", caption_dropout_rate=0.25).losses == done.losses
    assert {name: (folder / name).read_bytes() for name in cache_names} == before
    never, always = run("never").losses, run("always", caption_dropout_rate=1.0).losses
    for caption in folder.glob("*.txt"):
        caption.unlink()
    assert never != always
    assert run("empty", cache_text_encoder_outputs_to_disk=False, caption_dropout_rate=1.0).losses == pytest.approx(
        always, rel=1e-5
    )


def test_a_lora_file_has_the_names_of_sd_scripts_and_its_conversion_loads_in_diffusers(demo, learnt, tmp_path):
    from diffusers.loaders import AnimaLoraLoaderMixin

    _, plain, run = learnt
    layers = {name.partition(".")[0] for name in plain.tensors()}
    assert layers == {f"lora_unet_blocks_{n}_{inside}" for n in range(3) for inside in INSIDE}
    assert summary.check_lora_layers(plain.file, config_of(demo, SCRIPT)) == (30, [])
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "anima"
        assert file.metadata()["modelspec.architecture"] == "anima-preview/lora"
    more = run("more", network_args=["train_llm_adapter=True", "include_patterns=['.*final_layer.*']"])
    layers = {name.partition(".")[0] for name in more.tensors()}
    assert len(layers) == 30 + 2 * 10 + 3 and "lora_unet_llm_adapter_blocks_0_cross_attn_o_proj" in layers
    done = load_file(convert.convert_lora(more.file, tmp_path / "peft.safetensors", to="diffusers"))
    assert "diffusion_model.blocks.0.self_attn.q_proj.lora_A.weight" in done
    names_in_diffusers = {
        f"{part}.{name}"
        for part, tensors in in_diffusers(random.make_networks().denoiser().state_dict()).items()
        for name in tensors
    }
    read = {name.rpartition(".lora_")[0] for name in AnimaLoraLoaderMixin.lora_state_dict(dict(done))}
    assert len(read) == 53 and {f"{name}.weight" for name in read} <= names_in_diffusers
    back = load_file(convert.convert_lora(tmp_path / "peft.safetensors", tmp_path / "kohya.safetensors", to="kohya"))
    assert {name.partition(".")[0] for name in back} == layers
    assert run("on", network_weights=tmp_path / "peft.safetensors", learning_rate=1e-12).file.is_file()


def test_a_full_model_has_the_layers_of_sd_scripts(files):
    """280, 60 of the adapter, 196 of the text encoder."""
    made, full = family(files, network_train_unet_only=False), random.make_networks(random.FULL)
    networks = {"denoiser": full.denoiser(), "text_encoder": full.encoders["text_encoder"]()}
    shapes = {name: tuple(t.shape) for name, t in networks["denoiser"].state_dict().items()}
    assert len([*LORA_NAMES.layers(shapes, convolutions=False)]) == 280

    def layers(part, **values):
        blocks, args = (made.adapter_targets if part == "denoiser" else made.text_adapter_targets), AnimaArgs(**values)
        found_layers = targets.find_target_layers(networks[part], part, made.adapter_name, blocks)
        return {layer.name: rank for layer in found_layers if (rank := args.rank_of(layer, 4, 1.0)[0])}

    assert len(layers("denoiser")) == 280 and len(layers("denoiser", train_llm_adapter=True)) == 340
    assert len(encoder := layers("text_encoder")) == 196 and "lora_te_layers_0_self_attn_q_proj" in encoder
    chosen = layers("denoiser", network_reg_dims=r".*self_attn.*=8,.*\.mlp\..*=0", exclude_patterns="['.*k_proj']")
    assert len(chosen) == 28 * 6 and chosen["lora_unet_blocks_3_self_attn_v_proj"] == 8


def test_the_text_encoder_learns_as_in_sd_scripts(demo, tmp_path):
    data = pictures(tmp_path / "data", ((64, 64),), repeats=1)
    options = {"train_data_dir": data, "output_dir": tmp_path, "max_train_steps": 2, "learning_rate": 1e-2}
    uncached = {"network_train_unet_only": False, "cache_text_encoder_outputs": False}
    out = train(config_of(demo, SCRIPT, **options, **uncached)).tensors()
    encoder = {name: t for name, t in out.items() if name.startswith("lora_te_") and name.endswith("up.weight")}
    assert len(encoder) == 2 * 7 and all(tensor.any() for tensor in encoder.values())
    assert names.find_lora_family([name.partition(".")[0] for name in encoder], {}) == "anima"


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    _, plain, _ = learnt
    base = demo.models["anima"]["anima"]
    done = merge.merge_into_checkpoint(base, [(plain.file, 1.0)], tmp_path / "merged.safetensors", dtype="float")
    assert done.modules == 30 and not verify.verify_lora(plain.file, base).problems
    alike.extract_and_resize(done.path, base, plain.file, tmp_path)


def test_attention_alone_in_lycoris_leaves_out_the_text_adapter(demo):
    pytest.importorskip("lycoris")
    args = ["algo=lokr", "preset=attn-only"]
    config = config_of(demo, SCRIPT, network_module="lycoris.kohya", network_args=args, network_train_unet_only=True)
    its = families.family_for(config)
    learned = methods.attach_method(its.load(torch.float32), its, config).state_dict()
    assert learned and all(re.match(r"lora_unet_blocks_\d+_(self|cross)_attn_", name) for name in learned)
