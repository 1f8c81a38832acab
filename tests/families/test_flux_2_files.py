"""FLUX.2's files: layouts, refusals, caches, LoRA files of every naming, and the tools."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import names, verify
from library.config.problems import ConfigError
from library.demo import summary
from library.families import recognition
from library.families.flux import random as random_flux
from library.families.flux_2 import random
from library.families.shared import autoencoder, statistics_vae
from library.tools import convert, merge
from tests import double_stream, links
from tests.families import alike
from tests.families.test_flux_2_model import family
from tests.training import config_of, narrowed, pictures

SCRIPT = "flux_2_train_network"
DOUBLE = tuple(
    f"{stream}_{layer}" for stream in ("img", "txt") for layer in ("attn_qkv", "attn_proj", "mlp_0", "mlp_2")
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux_2"), dtype=torch.float32)


@pytest.fixture(scope="module")
def stored(files):
    return load_file(files["flux_2"])


def saved(tensors, path):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def loaded(files, path, dtype=torch.float32, **values):
    return family(files | {"flux_2": path}, **values).load(dtype).denoiser.state_dict()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
def test_a_single_file_is_read_with_any_prefix_and_in_the_layout_of_diffusers(files, stored, tmp_path, prefix):
    for tensors in (stored, double_stream.flux_2_to_diffusers(stored)):
        path = saved({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "m.safetensors")
        assert recognition.recognise_file(path)[:2] == ("flux_2", "a FLUX.2 transformer")
        assert said(files, flux_2=path) == []
        weights_read = loaded(files, path)
        assert weights_read.keys() == stored.keys() and all(
            torch.equal(weights_read[name], stored[name]) for name in stored
        )


def test_a_vae_is_read_in_both_layouts_and_keeps_its_statistics(files, tmp_path):
    own = load_file(files["vae"])
    assert {"encoder.quant_conv.weight", "decoder.post_quant_conv.weight", "bn.running_var"} <= own.keys()
    path = saved(autoencoder.vae_to_diffusers(own), tmp_path / "v.safetensors")
    assert said(files, vae=path) == []
    read = [
        statistics_vae.load_statistics_vae("a VAE", path_of_vae, torch.bfloat16).state_dict()
        for path_of_vae in (files["vae"], path)
    ]
    assert read[0]["bn.running_mean"].dtype == torch.float32 and read[0]["quant_conv.weight"].dtype == torch.bfloat16
    assert all(torch.equal(tensor, read[1][name]) for name, tensor in read[0].items())
    assert family(files, vae_dtype="bfloat16").load(torch.float32).vae.dtype == torch.bfloat16


def test_a_diffusers_folder_has_all_parts_and_says_whether_it_is_distilled(files, stored, tmp_path):
    for part, name in (("transformer", "flux_2"), ("text_encoder", "text_encoder"), ("vae", "vae")):
        (tmp_path / part).mkdir()
        tensors = double_stream.flux_2_to_diffusers(stored) if name == "flux_2" else load_file(files[name])
        saved(tensors, tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    whole = {"flux_2": tmp_path, "text_encoder": None, "vae": None}
    for distilled, version, wrong in (("false", None, False), ("true", None, True), ("true", "klein-4b", False)):
        text = f'{{"_class_name": "Flux2KleinPipeline", "is_distilled": {distilled}}}'
        (tmp_path / "model_index.json").write_text(text)
        assert recognition.recognise_file(tmp_path)[0] == "flux_2"
        problems = said(files, {"model_version": version}, **whole)
        assert [("seems to be a distilled klein" in problem) for problem in problems] == [True] * wrong
    components = family(files | whole).load(torch.float32)
    assert torch.equal(components.denoiser.state_dict()["img_in.weight"], stored["img_in.weight"])


def test_which_model_a_file_is_is_told_read_or_asked(files, stored, tmp_path):
    distilled = saved(stored, tmp_path / "flux-2-klein-4b.safetensors")
    (problem,) = said(files, {"model_version": None}, flux_2=distilled)
    assert "set model_version = klein-4b, or klein-base-4b if it is not" in problem
    assert (
        said(files, {"model_version": None}, flux_2=saved(stored, tmp_path / "flux-2-klein-base-4b.safetensors")) == []
    )
    (note,) = family(files, model_version=None).notes()
    assert "trained as the base model; those of distilled kleins look the same" in str(note)
    (note,) = family(files, model_version="klein-4b").notes()
    assert "forgets how to generate in few steps" in str(note)
    assert family(files, model_version="klein-4b").sample_defaults["sample_steps"] == 4
    guided = random.write_random_model(tmp_path / "dev", sizes=random.replace(random.TINY, guidance=True))
    own_family = family(guided, model_version=None)
    assert (own_family.version.title, own_family.latent_cache.suffix) == ("FLUX.2 dev", "_f2d.safetensors")
    assert list(own_family.notes()) == [] and own_family.base_model_version == "flux_2_dev"
    (problem,) = said(guided, {"model_version": None})
    assert "is FLUX.2 dev: set model_version = dev" in problem
    (problem,) = said(guided)
    assert "is FLUX.2 dev: use model_version = dev" in problem
    (problem,) = said(files, {"model_version": "dev"})
    assert "is FLUX.2 klein base 4B: use model_version = klein-base-4b" in problem
    assert family(files, model_version="klein-base-9b").text_cache.suffix == "_f2k9b_te.safetensors"


def test_blocks_that_are_swapped_are_halves_of_both_kinds():
    own_family = family({"flux_2": "a", "text_encoder": "b", "vae": "c"})
    for sizes, number, plan in ((random.FULL, 13, (5, 16)), (random.FULL, 15, (5, 20)), (random.LARGE, 10, (5, 10))):
        own_family.sizes = random.flux_2_shape(sizes)
        assert tuple(own_family.swap_plan(number).values()) == plan


def test_fp8_is_kept_without_scales(files, stored, tmp_path):
    plain = {n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in stored.items()}
    path = saved(plain, tmp_path / "m.safetensors")
    eight_bit = loaded(files, path, torch.bfloat16, fp8_base=True, mixed_precision="bf16")
    assert eight_bit["single_blocks.0.linear1.weight"].dtype == torch.float8_e4m3fn
    assert eight_bit["double_stream_modulation_img.lin.weight"].dtype == torch.bfloat16


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, stored, tmp_path):
    others = random_flux.write_random_model(tmp_path / "flux")
    adapter = saved(
        {"diffusion_model.single_blocks.0.linear1.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "l.safetensors"
    )
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(files["flux_2"].read_bytes()[:-100])
    apart = double_stream.flux_2_to_diffusers(stored)
    del apart["transformer_blocks.1.attn.to_k.weight"]
    lacking = {name: tensor for name, tensor in stored.items() if not name.startswith("txt_in")}
    words = narrowed(load_file(files["text_encoder"]), 48, 32)
    cases = [
        ({"flux_2": others["flux"]}, "is a FLUX.1 transformer; train it with flux_train_network"),
        ({"flux_2": adapter}, "is a LoRA file, not a model: give it as --network_weights"),
        ({"flux_2": files["vae"]}, "is a FLUX.2 VAE; expected a FLUX.2 transformer"),
        ({"flux_2": cut}, "was cut short"),
        ({"flux_2": saved(apart, tmp_path / "a.safetensors")}, "transformer_blocks.1.attn.to_k.weight is missing"),
        ({"flux_2": saved(lacking, tmp_path / "i.safetensors")}, "txt_in.weight is missing"),
        ({"vae": others["ae"]}, "is a VAE; expected the FLUX.2 VAE"),
        ({"text_encoder": others["t5xxl"]}, "is a T5 text encoder; expected the Qwen3-4B (klein 4B) or Qwen3-8B"),
        ({"text_encoder": saved(words, tmp_path / "n.safetensors")}, "has 32 channels where this model expects 48"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with caches on disk and reference images, and what later trainings read of them."""
    folder = tmp_path_factory.mktemp("learnt")
    shown = pictures(folder / "shown", ((96, 64), (64, 64)), repeats=1) / "1_zorb toy"
    data, made = alike.short_trainings(demo, SCRIPT, folder, control_directory=shown)
    return data, made("plain"), made


def test_caches_have_the_names_and_keys_of_musubi_tuner(learnt):
    folder, done, run = learnt
    cache_names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert cache_names == [
        "0_0064x0064_f2k4b.safetensors",
        "0_f2k4b_te.safetensors",
        "1_0064x0128_f2k4b.safetensors",
        "1_f2k4b_te.safetensors",
    ]
    with safe_open(folder / cache_names[2], "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in list(file.keys())}
        assert shapes == {"latents_8x4_float32": (128, 8, 4), "latents_control_0_8x4_float32": (128, 8, 4)}
        facts = file.metadata()
        assert (facts["architecture"], facts["width"], facts["height"]) == ("flux_2_klein_4b", "64", "128")
    with safe_open(folder / cache_names[1], "pt") as file:
        assert list(file.keys()) == ["ctx_vec_float32"] and file.get_tensor("ctx_vec_float32").shape == (512, 144)
    alike.leave_as_musubi_tuner(folder, cache_names)
    before = {name: (folder / name).read_bytes() for name in cache_names}
    assert run("again").losses == done.losses
    assert {name: (folder / name).read_bytes() for name in cache_names} == before
    assert run("without", control_directory=None).losses != done.losses


def test_an_image_without_its_reference_is_named(learnt, demo, tmp_path):
    _, _, run = learnt
    pictures(tmp_path, ((64, 64),), repeats=1)
    with pytest.raises(ConfigError, match=r"has no reference image of 1 image: .*1\.png; add"):
        run("lonely", control_directory=tmp_path / "1_zorb toy")


def test_a_lora_file_is_loaded_whole_by_diffusers_and_has_comfyuis_names(demo, learnt):
    _, plain, _ = learnt
    layers = {name.removesuffix(".lora_down.weight") for name in plain.tensors() if name.endswith(".lora_down.weight")}
    single = {f"lora_unet_single_blocks_{n}_{layer}" for n in range(4) for layer in ("linear1", "linear2")}
    assert layers == single | {f"lora_unet_double_blocks_{n}_{layer}" for n in range(2) for layer in DOUBLE}
    assert summary.check_lora_layers(plain.file, config_of(demo, SCRIPT))[1] == []
    with safe_open(plain.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "flux_2_klein_4b"
        assert file.metadata()["modelspec.architecture"] == "Flux.2-klein-4b/lora"


def test_training_goes_on_from_files_of_every_naming(learnt, tmp_path):
    _, plain, run = learnt
    start = plain.tensors()
    peft = load_file(convert.convert_lora(plain.file, tmp_path / "peft.safetensors", to="diffusers"))
    assert "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight" in peft
    toolkit = {}
    for name, tensor in start.items():
        if ".lora_" in name:
            path = names.parse_name(name.partition(".")[0], "flux_2").module.path
            half = "A" if "down" in name else "B"
            toolkit[f"diffusion_model.{path}.lora_{half}.weight"] = tensor * (1 if half == "B" else 1 / 4)
    for number, tensors in enumerate((start, peft, toolkit)):
        path = saved(tensors, tmp_path / f"{number}.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        modules = {key.rpartition(".lora_")[0] for key in tensors if ".lora_" in key}
        assert names.find_lora_family(modules, {}, names.module_sizes(shapes)) == "flux_2"
        continued = run(f"on {number}", network_weights=path, learning_rate=1e-12).tensors()
        assert continued.keys() == start.keys()
        for name in start if number < 2 else ():
            torch.testing.assert_close(continued[name].float(), start[name].float(), atol=1e-5, rtol=1e-3)


def test_lycoris_trains(learnt):
    _, _, run = learnt
    lokr = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr", "factor=4", "preset=attn-mlp"]}
    tensors = run("lokr", **lokr).tensors()
    assert {name.rpartition(".")[0] for name in tensors} >= {"lora_unet_single_blocks_0_linear1"}


def test_its_lora_is_merged_verified_and_extracted(demo, learnt, tmp_path):
    _, plain, _ = learnt
    base = demo.models["flux_2"]["flux_2"]
    done = merge.merge_into_checkpoint(base, [(plain.file, 1.0)], tmp_path / "merged.safetensors", dtype="float")
    assert done.modules == 24 and not verify.verify_lora(plain.file, base).problems
    name = "single_blocks.1.linear1"
    change = load_file(done.path)[f"{name}.weight"] - load_file(base)[f"{name}.weight"].float()
    own = {
        key: plain.tensors()[f"lora_unet_{name.replace('.', '_')}.{key}"]
        for key in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    expected = own["lora_up.weight"] @ own["lora_down.weight"] * (own["alpha"] / own["lora_down.weight"].shape[0])
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-6)
    alike.extract_and_resize(done.path, base, plain.file, tmp_path)
