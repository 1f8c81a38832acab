"""FLUX.1's files: every layout that is read, what is refused, and what is fetched."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from library.config.problems import ConfigError
from library.families.flux import random
from tests import flux_files
from tests.families.flux import family, step

# ---- loading


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=0, msg=name)


def test_every_layout_of_the_transformer_loads_alike(files, tmp_path):
    tensors = flux_files.load(files["flux"])
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    prefixed["vae.decoder.conv_in.weight"] = torch.zeros(1)
    compiled = {name.replace("_blocks.0.", "_blocks.0._orig_mod."): tensor for name, tensor in tensors.items()}
    sharded = flux_files.write_diffusers(files["flux"], tmp_path / "many", shards=5)
    single = flux_files.write_diffusers(files["flux"], tmp_path / "one", shards=1)
    for path in (
        files["flux"],
        flux_files.save(prefixed, tmp_path / "prefixed.safetensors"),
        flux_files.save(compiled, tmp_path / "compiled.safetensors"),
        sharded,
        sharded.parent,
        sharded / "diffusion_pytorch_model-00002-of-00005.safetensors",
        sharded / "diffusion_pytorch_model.safetensors.index.json",
        single,
        single.parent,
        single / "diffusion_pytorch_model.safetensors",
    ):
        of = family(files, pretrained_model_name_or_path=path)
        assert list(of.problems()) == []
        loaded = of.load(torch.float32)
        wanting = family(files, pretrained_model_name_or_path=path, compile=True, compile_blocks="double:all,single:9")
        assert [str(problem).split("; ")[1] for problem in wanting.problems()] == [
            f"the last is single:{of.depth[1] - 1}"
        ]
        same(loaded.denoiser.state_dict(), expected)


def test_parts_are_taken_from_a_whole_diffusers_folder(files, tmp_path, dev, parts):
    whole = flux_files.write_diffusers(files["flux"], tmp_path).parent
    for encoder, folder in (("clip_l", "text_encoder"), ("t5xxl", "text_encoder_2")):
        parts.encoders[encoder].save_pretrained(whole / folder)
    parts.vae.save_pretrained(whole / "vae")
    for folder in ("tokenizer", "tokenizer_2"):
        shutil.copytree(files[folder], whole / folder)
    of = family(files, pretrained_model_name_or_path=whole, clip_l=None, t5xxl=None, ae=None, t5xxl_max_token_length=16)
    assert list(of.problems()) == []
    loaded = of.load(torch.float32)
    same(loaded.vae.state_dict(), parts.vae.state_dict())
    for encoder in ("clip_l", "t5xxl"):
        same(loaded.encoders[encoder].state_dict(), parts.encoders[encoder].state_dict())
    with torch.no_grad():
        same(of.text(loaded, ["a red circle"]), dev.text(parts, ["a red circle"]))


def test_an_autoencoder_that_was_cut_out_of_a_checkpoint_is_read(files, tmp_path, parts):
    path = tmp_path / "ae.safetensors"
    save_file({f"first_stage_model.{name}": tensor for name, tensor in flux_files.load(files["ae"]).items()}, path)
    of = family(files, ae=path)
    assert list(of.problems()) == []
    same(of.load(torch.float32).vae.state_dict(), parts.vae.state_dict())


def test_autoencoder_names_are_those_of_diffusers_own_conversion(files, parts):
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    config = {**parts.vae.config, "down_block_types": parts.vae.config["down_block_types"]}
    theirs = convert_ldm_vae_checkpoint(flux_files.load(files["ae"]), config)
    same(parts.vae.state_dict(), {name: tensor.float() for name, tensor in theirs.items()})
    assert parts.vae.config["scaling_factor"] == 0.3611 and parts.vae.config["shift_factor"] == 0.1159


def test_everything_is_frozen_on_the_cpu_and_in_the_type_that_was_asked_for(files):
    parts = family(files).load(torch.bfloat16)
    for network in (parts.denoiser, parts.vae, *parts.encoders.values()):
        assert not network.training
        assert {(p.dtype, p.device.type, p.requires_grad) for p in network.parameters()} == {
            (torch.bfloat16, "cpu", False)
        }
    for exact in (family(files, no_half_vae=True).load(torch.bfloat16), family(files).load(torch.float16)):
        assert next(exact.vae.parameters()).dtype == torch.float32


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_8_bits_stay_where_they_are_asked_for(files, tmp_path, prefix):
    eight = flux_files.write_fp8(files["flux"], tmp_path / "fp8.safetensors", prefix)
    t5 = flux_files.write_fp8(files["t5xxl"], tmp_path / "t5xxl_fp8_e4m3fn.safetensors")
    of = family(files, pretrained_model_name_or_path=eight, t5xxl=t5, fp8_base=True, mixed_precision="bf16")
    parts = of.load(torch.bfloat16)
    types = {name: p.dtype for name, p in parts.denoiser.named_parameters()}
    matrices = {name for name, p in parts.denoiser.named_parameters() if "_blocks." in name and p.ndim == 2}
    assert matrices == {name for name, dtype in types.items() if dtype == torch.float8_e4m3fn}
    assert set(types.values()) == {torch.bfloat16, torch.float8_e4m3fn}
    assert {p.dtype for p in parts.encoders["t5xxl"].parameters()} == {torch.bfloat16}
    noised, text = step(of, parts)
    with torch.autocast("cpu", torch.bfloat16):
        answer = of.predict(parts.denoiser, noised, text, None)

    wide = family(files, pretrained_model_name_or_path=eight, t5xxl=t5)
    loaded = wide.load(torch.bfloat16)
    assert {p.dtype for p in loaded.denoiser.parameters()} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(wide.predict(loaded.denoiser, noised, text, None), answer)


def test_export_gives_the_file_back(files, parts, dev, tmp_path):
    saved = dev.export(parts)
    same(saved, {name: tensor.float() for name, tensor in flux_files.load(files["flux"]).items()})
    path = flux_files.save(saved, tmp_path / "out.safetensors")
    same(family(files, pretrained_model_name_or_path=path).load(torch.float32).denoiser.state_dict(), saved)


# ---- what is refused


def only(of, *words):
    """The one problem there is, which has to say all of these."""
    problems = list(of.problems())
    assert len(problems) == 1, problems
    assert all(word in str(problems[0]) for word in words), problems[0]


def changed(files, part, path, change):
    tensors = flux_files.load(files[part])
    change(tensors)
    return flux_files.save(tensors, path)


def test_everything_that_is_missing_is_reported_at_once(files, tmp_path):
    problems = list(family(files, clip_l=None, t5xxl=tmp_path / "nowhere.safetensors", ae=None).problems())
    assert len(problems) == 3
    assert str(problems[0]).startswith("clip_l: ") and "clip_l.safetensors" in str(problems[0])
    assert (
        str(problems[1]).startswith("t5xxl: ")
        and "nowhere" in str(problems[1])
        and "t5xxl_fp16.safetensors" in str(problems[1])
    )
    assert str(problems[2]).startswith("ae: ") and "ae.safetensors" in str(problems[2])


@pytest.mark.parametrize(
    ("option", "paths", "words"),
    [
        ("pretrained_model_name_or_path", "t5xxl", ("a T5 text encoder", "flux1-dev.safetensors")),
        ("pretrained_model_name_or_path", "ae", ("a VAE", "flux1-dev.safetensors")),
        ("clip_l", "t5xxl", ("a T5 text encoder", "clip_l.safetensors")),
        ("t5xxl", "clip_l", ("a CLIP text encoder", "t5xxl_fp16.safetensors")),
        ("ae", "flux", ("a FLUX.1 transformer", "ae.safetensors")),
    ],
)
def test_files_in_the_wrong_place_are_named(files, option, paths, words):
    only(family(files, **{option: files[paths]}), f"{option}: ", *words)


def test_other_models_and_loras_are_named(files, tmp_path):
    cases = {
        ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.x"): (
            "an SDXL",
            "sdxl_train_network",
        ),
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",): ("a LoRA file", "--network_weights"),
        ("joint_blocks.0.x",): ("an SD3 checkpoint",),
        ("something",): ("unknown kind",),
    }
    for i, (names, words) in enumerate(cases.items()):
        path = flux_files.save({name: torch.zeros(1) for name in names}, tmp_path / f"{i}.safetensors")
        only(family(files, pretrained_model_name_or_path=path), "pretrained_model_name_or_path: ", *words)


def test_storage_that_is_not_read_is_refused(files, tmp_path):
    def scales(tensors):  # of four bits, which have scales of scales
        tensors["double_blocks.0.img_attn.qkv.weight_scale"] = torch.ones(1).to(torch.float8_e4m3fn)

    def coarse(tensors):
        tensors["img_in.weight"] = tensors["img_in.weight"].to(torch.float8_e5m2)

    def other(tensors):
        tensors["img_in.weight"] = tensors["img_in.weight"].to(torch.float8_e4m3fnuz)

    def four_bits(tensors):
        tensors["img_in.weight"] = torch.zeros(8, 1, dtype=torch.uint8)

    for change, word in (
        (scales, "scaled fp8"),
        (coarse, "e5m2"),
        (other, "fnuz"),
        (four_bits, "4 bits"),
    ):
        path = changed(files, "flux", tmp_path / f"{change.__name__}.safetensors", change)
        only(family(files, pretrained_model_name_or_path=path), word, "bf16")


def test_fp8_with_scales_is_what_it_was_made_of(files, tmp_path):
    """As ComfyUI's files have it: a scale for a matrix, its rows, or blocks of rows, under old and new names."""

    def scaled(path, prefix=""):
        stored, expected = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
        shapes = itertools.cycle((lambda w: (), lambda w: (len(w), 1), lambda w: (len(w), w.shape[1] // 16, 1)))
        for name, weight in flux_files.load(path).items():
            expected[name] = weight.float()
            if weight.ndim != 2 or not name.endswith(".weight"):
                stored[prefix + name] = weight
                continue
            shape = next(shapes)(weight)
            scale = torch.full(shape, 0.01) + 0.01 * torch.rand(shape)
            blocks = scale.view(len(weight), -1, 1) if shape else scale
            parts = weight.float().view(len(weight), -1, 16) if len(shape) == 3 else weight.float()[:, None]
            small = (parts / blocks).to(torch.float8_e4m3fn)
            expected[name] = (small.float() * blocks).view(weight.shape)
            stored[prefix + name] = small.view(weight.shape)
            layer = prefix + name.removesuffix(".weight")
            stored[f"{layer}.{'scale_weight' if shape else 'weight_scale'}"] = scale
            stored[f"{layer}.{'scale_input' if shape else 'comfy_quant'}"] = torch.zeros(1, dtype=torch.uint8)
        return flux_files.save(stored, tmp_path / Path(path).name), expected

    flux, tensors = scaled(files["flux"], "model.diffusion_model.")
    t5, words = scaled(files["t5xxl"])
    model = family(files, pretrained_model_name_or_path=flux, t5xxl=t5)
    assert not list(model.problems())
    loaded = model.load(torch.float32)
    same(loaded.denoiser.state_dict(), tensors)
    read = loaded.encoders["t5xxl"].state_dict()
    same({name: read[name] for name in words}, words)


def test_variants_and_halves_are_refused(files, tmp_path):
    def fill(tensors):
        tensors["img_in.weight"] = torch.zeros(64, 384)

    def depth(tensors):
        tensors["img_in.weight"] = torch.zeros(64, 128)

    def half(tensors):
        del tensors["final_layer.linear.weight"]

    named = {fill: "use model_type = fill", depth: "takes 128 channels (Depth, Canny)"}
    for change, word in (named | {half: "final_layer.linear.weight is missing"}).items():
        path = changed(files, "flux", tmp_path / f"{change.__name__}.safetensors", change)
        only(family(files, pretrained_model_name_or_path=path), word)


@pytest.mark.parametrize(
    ("option", "part", "name"),
    [
        ("pretrained_model_name_or_path", "flux", "single_blocks.2.linear1.bias"),
        ("clip_l", "clip_l", "text_model.encoder.layers.1.mlp.fc1.bias"),
        ("t5xxl", "t5xxl", "encoder.block.1.layer.0.SelfAttention.k.weight"),
        ("ae", "ae", "decoder.up.1.block.0.conv1.bias"),
    ],
)
def test_a_tensor_that_is_missing_or_crooked_is_named_while_loading(files, tmp_path, option, part, name):
    def hole(tensors):
        del tensors[name]

    def crooked(tensors):
        tensors[name] = torch.zeros(3)

    for change in (hole, crooked):
        path = changed(files, part, tmp_path / f"{change.__name__}.safetensors", change)
        end = ".".join(name.split(".")[-2:])  # the autoencoder is named as diffusers does
        with pytest.raises(ConfigError, match=f"{change.__name__}.safetensors .*{end}"):
            family(files, **{option: path}).load(torch.float32)


def test_a_file_that_was_cut_short_is_refused(files, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(files["flux"].read_bytes()[:-1000])
    only(family(files, pretrained_model_name_or_path=path), "cut short")


def test_encoders_of_another_size_are_refused(files, tmp_path):
    other = random.write_random_model(tmp_path, sizes=random.FluxSizes(clip_l=128, t5xxl=96, channels=4))
    problems = list(family(files, clip_l=other["clip_l"], t5xxl=other["t5xxl"], ae=other["ae"]).problems())
    assert [str(problem).split(":")[0] for problem in problems] == ["clip_l", "t5xxl", "ae"]
    assert "128" in str(problems[0]) and "64" in str(problems[0])


# ---- what a hub has


def test_only_the_needed_files_of_a_repository_are_fetched():
    from library.families.flux.checkpoint import PART_FILES

    parts = PART_FILES["flux"]

    whole = [
        *("README.md", "ae.safetensors", "flux1-dev.safetensors", "model_index.json", "text_encoder/config.json"),
        *("text_encoder/model.safetensors", "text_encoder_2/model-00001-of-00002.safetensors"),
        *("transformer/config.json", "transformer/diffusion_pytorch_model-00001-of-00003.safetensors"),
        *("transformer/diffusion_pytorch_model.safetensors.index.json", "vae/diffusion_pytorch_model.safetensors"),
    ]
    assert parts.files_to_download(whole, "denoiser") == [name for name in whole if name.startswith("transformer/")]
    assert parts.files_to_download(whole, "ae") == ["vae/diffusion_pytorch_model.safetensors"]
    encoders = ["clip_l.safetensors", "t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn.safetensors"]
    assert parts.files_to_download(encoders, "t5xxl") == ["t5xxl_fp16.safetensors"]
    assert parts.files_to_download(encoders, "clip_l") == ["clip_l.safetensors"]
    with pytest.raises(ValueError, match=r"ae.safetensors"):
        parts.files_to_download(encoders, "ae")


def test_a_hub_id_is_enough_for_all_parts_and_is_not_fetched_to_be_checked(files, monkeypatch):
    there = [f"{folder}/model.safetensors" for folder in ("transformer", "text_encoder", "text_encoder_2", "vae")]
    monkeypatch.setattr("library.families.shared.hub.list_repository", lambda name, token=None: there)
    options = {
        "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
        "clip_l": None,
        "t5xxl": None,
        "ae": None,
    }
    of = family(files, **options, tokenizer_cache_dir=files["ae"].parent)
    assert all("tokenizer" in str(problem) for problem in of.problems())
    assert list(of.notes()) == []  # neither are its shapes known


def test_a_hub_id_that_cannot_be_reached_is_one_sentence(files):
    options = {"pretrained_model_name_or_path": "someone/flux", "clip_l": None, "t5xxl": None, "ae": None}
    (said,) = family(files, **options).problems()
    assert str(said).startswith("pretrained_model_name_or_path: someone/flux is not in the Hugging Face cache")


def test_an_absent_tokenizer_is_one_clear_sentence(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    moved = {part: shutil.copy(files[part], tmp_path) for part in ("flux", "clip_l", "t5xxl", "ae")}
    problems = list(family({part: Path(path) for part, path in moved.items()}).problems())
    assert len(problems) == 2
    assert "openai/clip-vit-large-patch14" in str(problems[0]) and "google/t5-v1_1-xxl" in str(problems[1])


@pytest.mark.parametrize("layers", [1, 3])
def test_sizes_of_t5_xxl_are_read_from_its_tensors(layers):
    from transformers import T5Config, T5EncoderModel

    from library.families.shared import t5

    real = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": layers}
    with torch.device("meta"):
        model = T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **real))
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "shared.weight"}
    config = t5.t5_config(shapes)
    assert {name: getattr(config, name) for name in real} == real
    assert config.is_gated_act and config.dense_act_fn == "gelu_new" and config.relative_attention_num_buckets == 32
