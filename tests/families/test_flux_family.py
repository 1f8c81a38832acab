"""FLUX.1 from files to a training step, with a tiny model in the real formats."""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from library import families
from library.config.schema import ConfigError, build
from library.families import clip
from library.families.base import Noised
from library.families.flux import keys, packing, tiny
from library.families.flux.model import Flux, Sizes

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("schnell"), guidance=False)


def family(files, script="flux_train_network", **values):
    given = {"clip_l": files["clip_l"], "t5xxl": files["t5xxl"], "ae": files["ae"]}
    given |= {"pretrained_model_name_or_path": files["flux"], "model_prediction_type": "raw", **values}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return families.of(build(families.config_class(script), given))


@pytest.fixture(scope="module")
def dev(files):
    return family(files, t5xxl_max_token_length=16)


@pytest.fixture(scope="module")
def parts(dev):
    return dev.load(torch.float32)


def step(of, parts, captions=("a red circle", "a blue square"), seed=0, **given):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(captions), 16, 8, 12, generator=generator)
    noised = of.noised(latents, generator, **given)
    with torch.no_grad():
        text = of.text(parts, list(captions))
    return noised, text


# ---- what the family is


def test_the_protocol_is_answered(dev):
    from library.families.base import Family

    assert all(hasattr(dev, name) for name in Family.__annotations__)
    assert dev.grid == 64 and type(dev).regions == ("DoubleStreamBlock", "SingleStreamBlock")


def test_dev_and_schnell_are_told_apart_by_their_tensors(files, schnell):
    for given, architecture, length in ((files, "flux-1-dev", 512), (schnell, "flux-1-schnell", 256)):
        of = family(given)
        assert (of.architecture, of.text_length) == (architecture, length)
        assert (of.load(torch.float32).denoiser.guidance_in is None) == (architecture == "flux-1-schnell")
    assert family(files, t5xxl_max_token_length=77).text_length == 77


def test_adapter_names_and_sizes_are_the_reference_at_full_size(dev):
    rows = [r for r in csv.reader((GOLDEN / "sd_scripts_lora_keys.tsv").open(encoding="utf-8"), delimiter="\t")]
    names = [row[0] for row in rows]
    start = next(i for i, name in enumerate(names) if name.startswith("# FLUX.1"))
    expected = {row[0]: (int(row[1]), int(row[2])) for row in rows[start + 1 :] if not row[0].startswith("#")}
    assert len(expected) == 376

    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        denoiser = Flux(Sizes(64, 64, 768, 4096, 3072, 128, 12288, 19, 38, True))
        encoder = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
    blocks = [("denoiser", path, m) for path, m in denoiser.named_modules() if "_blocks." in path]
    layers = [("clip_l", path, m) for path, m in encoder.named_modules() if "layers." in path]
    made = {
        dev.adapter_name(part, path): (m.in_features, m.out_features)
        for part, path, m in (*blocks, *layers)
        if isinstance(m, torch.nn.Linear)
    }
    assert made == expected


def test_names_of_t5_and_embedder_adapters(dev, parts):
    linear = [path for path, m in parts.encoders["t5xxl"].named_modules() if isinstance(m, torch.nn.Linear)]
    assert dev.adapter_name("t5xxl", linear[0]) == "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    assert dev.adapter_name("denoiser", "time_in.in_layer") == "lora_unet_time_in_in_layer"


@pytest.mark.parametrize(("number", "expected"), [(1, (0, 2)), (2, (1, 2)), (3, (1, 4)), (9, (2, 4))])
def test_blocks_to_swap_counts_a_double_block_as_two_single_ones(dev, parts, number, expected):
    assert tuple(dev.swapped(number).values()) == expected


# ---- loading


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=0, msg=name)


def test_every_layout_of_the_transformer_loads_alike(files, tmp_path):
    tensors = tiny.load(files["flux"])
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    prefixed["vae.decoder.conv_in.weight"] = torch.zeros(1)
    compiled = {name.replace("_blocks.0.", "_blocks.0._orig_mod."): tensor for name, tensor in tensors.items()}
    sharded = tiny.write_diffusers(files["flux"], tmp_path / "many", shards=5)
    single = tiny.write_diffusers(files["flux"], tmp_path / "one", shards=1)
    for path in (
        files["flux"],
        tiny.save(prefixed, tmp_path / "prefixed.safetensors"),
        tiny.save(compiled, tmp_path / "compiled.safetensors"),
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
        same(of.load(torch.float32).denoiser.state_dict(), expected)


def test_parts_are_taken_from_a_whole_diffusers_folder(files, tmp_path, dev, parts):
    whole = tiny.write_diffusers(files["flux"], tmp_path).parent
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


def test_autoencoder_names_are_those_of_diffusers_own_conversion(files, parts):
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    config = {**parts.vae.config, "down_block_types": parts.vae.config["down_block_types"]}
    theirs = convert_ldm_vae_checkpoint(tiny.load(files["ae"]), config)
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
    eight = tiny.write_fp8(files["flux"], tmp_path / "fp8.safetensors", prefix)
    t5 = tiny.write_fp8(files["t5xxl"], tmp_path / "t5xxl_fp8_e4m3fn.safetensors")
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
    same(saved, {name: tensor.float() for name, tensor in tiny.load(files["flux"]).items()})
    path = tiny.save(saved, tmp_path / "out.safetensors")
    same(family(files, pretrained_model_name_or_path=path).load(torch.float32).denoiser.state_dict(), saved)


# ---- what is refused


def only(of, *words):
    """The one problem there is, which has to say all of these."""
    found = list(of.problems())
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found[0]


def changed(files, part, path, change):
    tensors = tiny.load(files[part])
    change(tensors)
    return tiny.save(tensors, path)


def test_everything_that_is_missing_is_said_at_once(files, tmp_path):
    found = list(family(files, clip_l=None, t5xxl=tmp_path / "nowhere.safetensors", ae=None).problems())
    assert len(found) == 3
    assert found[0].startswith("clip_l: ") and "clip_l.safetensors" in found[0]
    assert found[1].startswith("t5xxl: ") and "nowhere" in found[1] and "t5xxl_fp16.safetensors" in found[1]
    assert found[2].startswith("ae: ") and "ae.safetensors" in found[2]


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("pretrained_model_name_or_path", "t5xxl", ("a T5 text encoder", "flux1-dev.safetensors")),
        ("pretrained_model_name_or_path", "ae", ("a VAE", "flux1-dev.safetensors")),
        ("clip_l", "t5xxl", ("a T5 text encoder", "clip_l.safetensors")),
        ("t5xxl", "clip_l", ("a CLIP text encoder", "t5xxl_fp16.safetensors")),
        ("ae", "flux", ("a FLUX.1 transformer", "ae.safetensors")),
    ],
)
def test_files_in_the_wrong_place_are_named(files, option, given, words):
    only(family(files, **{option: files[given]}), f"{option}: ", *words)


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
        path = tiny.save({name: torch.zeros(1) for name in names}, tmp_path / f"{i}.safetensors")
        only(family(files, pretrained_model_name_or_path=path), "pretrained_model_name_or_path: ", *words)


def test_storage_that_is_not_read_is_refused(files, tmp_path):
    def scaled(tensors):
        tensors["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)

    def scales(tensors):
        tensors["double_blocks.0.img_attn.qkv.scale_weight"] = torch.ones(1)

    def coarse(tensors):
        tensors["img_in.weight"] = tensors["img_in.weight"].to(torch.float8_e5m2)

    def other(tensors):
        tensors["img_in.weight"] = tensors["img_in.weight"].to(torch.float8_e4m3fnuz)

    def four_bits(tensors):
        tensors["img_in.weight"] = torch.zeros(8, 1, dtype=torch.uint8)

    for change, word in (
        (scaled, "scaled fp8"),
        (scales, "scaled fp8"),
        (coarse, "e5m2"),
        (other, "fnuz"),
        (four_bits, "4 bits"),
    ):
        path = changed(files, "flux", tmp_path / f"{change.__name__}.safetensors", change)
        only(family(files, pretrained_model_name_or_path=path), word, "bf16")
    path = changed(files, "t5xxl", tmp_path / "t5.safetensors", scaled)
    only(family(files, t5xxl=path), "t5xxl: ", "scaled fp8")


def test_variants_and_halves_are_refused(files, tmp_path):
    def fill(tensors):
        tensors["img_in.weight"] = torch.zeros(64, 384)

    def chroma(tensors):
        tensors["distilled_guidance_layer.in_proj.weight"] = torch.zeros(1)

    def half(tensors):
        del tensors["final_layer.linear.weight"]

    for change, word in ((fill, "384 channels"), (chroma, "Chroma"), (half, "final_layer.linear.weight is missing")):
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
    other = tiny.write(tmp_path, tiny_sizes=tiny.Tiny(clip_l=128, t5xxl=96, channels=4))
    found = list(family(files, clip_l=other["clip_l"], t5xxl=other["t5xxl"], ae=other["ae"]).problems())
    assert [problem.split(":")[0] for problem in found] == ["clip_l", "t5xxl", "ae"]
    assert "128" in found[0] and "64" in found[0]


def test_chroma_is_refused(files):
    with pytest.raises(ValueError, match="Chroma"):
        family(files, model_type="chroma")


# ---- captions and images


def test_text_has_the_shapes_and_names_of_the_cache(dev, parts):
    with torch.no_grad():
        text = dev.text(parts, ["a red circle", "a blue square, " * 40])
    assert tuple(text) == dev.text_cache.keys
    assert text["l_pooled"].shape == (2, 64) and text["t5_out"].shape == (2, 16, 64)
    assert text["txt_ids"].shape == (2, 16, 3) and not text["txt_ids"].any()
    assert text["t5_attn_mask"].shape == (2, 16)
    assert text["t5_attn_mask"][1].all() and not text["t5_attn_mask"][0].all()


def test_text_of_some_encoders_only(dev, parts):
    with torch.no_grad():
        whole = dev.text(parts, ["a red circle"])
        assert tuple(dev.text(parts, ["a red circle"], ("clip_l",))) == ("l_pooled",)
        rest = dev.text(parts, ["a red circle"], ("t5xxl",))
    assert tuple(rest) == ("t5_out", "txt_ids", "t5_attn_mask")
    assert torch.equal(rest["t5_out"], whole["t5_out"])


def test_pooled_text_is_the_state_at_the_first_end_mark(dev, parts):
    tokenizer, encoder = parts.tokenizers["clip_l"], parts.encoders["clip_l"]
    ids = clip.tokens(tokenizer, ["a red circle on a white background"])[:, 0]
    end = ids[0].tolist().index(tokenizer.eos_token_id)
    with torch.no_grad():
        states = encoder(input_ids=ids).last_hidden_state
        pooled = dev.text(parts, ["a red circle on a white background"], ("clip_l",))["l_pooled"]
    assert 1 < end < 76
    torch.testing.assert_close(pooled[0], states[0, end])


def test_the_mask_keeps_padding_out_of_t5_and_of_the_denoiser(files, dev, parts):
    masked = family(files, t5xxl_max_token_length=16, apply_t5_attn_mask=True)
    noised, text = step(dev, parts)
    _, seen = step(masked, parts)
    assert not torch.allclose(text["t5_out"], seen["t5_out"])
    sizes = torch.zeros(2, 6)
    before = masked.predict(parts.denoiser, noised, seen, sizes)
    changed = {**seen, "t5_out": torch.where(seen["t5_attn_mask"][..., None] > 0, seen["t5_out"], 7.0)}
    torch.testing.assert_close(masked.predict(parts.denoiser, noised, changed, sizes), before)
    assert not torch.allclose(dev.predict(parts.denoiser, noised, changed, sizes), before)


def test_gradients_reach_the_text_encoders(files):
    of = family(files, t5xxl_max_token_length=16)
    parts = of.load(torch.float32)
    noised, _ = step(of, parts)
    for encoder in parts.encoders.values():
        encoder.requires_grad_(True)
    text = of.text(parts, ["a red circle", "a blue square"])
    of.predict(parts.denoiser, noised, text, None).sum().backward()
    assert parts.encoders["clip_l"].get_submodule("encoder.layers.0.mlp.fc1").weight.grad.abs().sum() > 0
    assert parts.encoders["t5xxl"].shared.weight.grad.abs().sum() > 0


def test_latents_are_scaled_and_shifted_samples(dev, parts):
    pixels = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = dev.latents(parts, pixels, torch.Generator().manual_seed(5))
    with torch.no_grad():
        sample = parts.vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(5))
    assert latents.shape == (2, 16, 8, 12) and latents.dtype == torch.float32
    torch.testing.assert_close(latents, (sample - 0.1159) * 0.3611)
    one_by_one = dev.latents(parts, pixels, [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)])
    again = dev.latents(parts, pixels[1:], [torch.Generator().manual_seed(6)])
    torch.testing.assert_close(one_by_one[1:], again, rtol=1e-4, atol=1e-4)


# ---- a step


def test_packing_equals_the_reference():
    import json

    golden = json.loads((GOLDEN / "sd_scripts_vectors.json").read_text(encoding="utf-8"))
    latents = torch.arange(32.0).view(1, 2, 4, 4)
    assert packing.pack(latents).tolist() == golden["pack"]
    assert packing.image_positions(2, 3, torch.device("cpu"))[None].tolist() == golden["img_ids_2x3"]


def test_packing_and_unpacking_cancel():
    latents = torch.randn(2, 16, 6, 10)
    assert torch.equal(packing.unpack(packing.pack(latents), 3, 5), latents)


@pytest.mark.parametrize("kind", ["raw", "additive", "sigma_scaled"])
def test_prediction_is_the_models_answer_by_its_type(files, parts, kind):
    of = family(files, t5xxl_max_token_length=16, model_prediction_type=kind, guidance_scale=2.0)
    noised, text = step(of, parts)
    answer = parts.denoiser(
        packing.pack(noised.latents),
        packing.image_positions(4, 6, torch.device("cpu")),
        text["t5_out"],
        torch.zeros(16, 3),
        noised.sigmas,
        text["l_pooled"],
        torch.full((2,), 2.0),
    )
    raw = packing.unpack(answer, 4, 6)
    sigmas = noised.sigmas.view(-1, 1, 1, 1)
    expected = {"raw": raw, "additive": raw + noised.latents, "sigma_scaled": noised.latents - sigmas * raw}[kind]
    made = of.predict(parts.denoiser, noised, text, None)
    assert made.dtype == torch.float32 and made.shape == noised.target.shape
    torch.testing.assert_close(made, expected)


def test_guidance_matters_to_dev_and_not_to_schnell(files, schnell, parts):
    low, high = (family(files, t5xxl_max_token_length=16, guidance_scale=scale) for scale in (1.0, 8.0))
    noised, text = step(low, parts)
    first, second = (of.predict(parts.denoiser, noised, text, None) for of in (low, high))
    assert not torch.allclose(first, second)
    low, high = (family(schnell, t5xxl_max_token_length=16, guidance_scale=scale) for scale in (1.0, 8.0))
    other = low.load(torch.float32)
    assert torch.equal(*(of.predict(other.denoiser, noised, text, None) for of in (low, high)))


def test_position_tensors_are_made_once_for_each_size(dev, parts):
    noised, text = step(dev, parts)
    dev.predict(parts.denoiser, noised, text, None)
    tables = len(parts.denoiser._tables)
    dev.predict(parts.denoiser, noised, text, None)
    assert len(parts.denoiser._tables) == tables
    device = torch.device("cpu")
    with torch.inference_mode():
        made = dev.positions.image(9, 9, device)
    assert not made.is_inference() and dev.positions.image(9, 9, device) is made


def test_a_step_does_not_make_the_host_wait(files):
    """Fake tensors have no values: reading one (.item(), nonzero, a branch) would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    of = family(files, timestep_sampling="flux_shift", apply_t5_attn_mask=True)
    denoiser = of.load(torch.float32).denoiser.requires_grad_(True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        text = {"l_pooled": torch.zeros(2, 64), "t5_out": torch.zeros(2, 16, 64), "t5_attn_mask": torch.ones(2, 16)}
        noised = of.noised(torch.zeros(2, 16, 8, 12), None)
        wrong = (of.predict(denoiser, noised, text, torch.zeros(2, 6)) - noised.target).square().mean()
        wrong.backward()


def test_a_tiny_model_learns(files):
    of = family(files, t5xxl_max_token_length=16, timestep_sampling="sigmoid")
    parts = of.load(torch.float32)
    noised, text = step(of, parts)
    parts.denoiser.requires_grad_(True)
    optimizer = torch.optim.AdamW(parts.denoiser.parameters(), lr=2e-3)
    losses = []
    for _ in range(15):
        loss = (of.predict(parts.denoiser, noised, text, None) - noised.target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] < 10 and losses[-1] < 0.7 * losses[0]


# ---- previews


def test_previews_repeat_and_leave_random_state_alone(dev, parts):
    draw = dev.sampler(parts)
    before = torch.get_rng_state()
    first = draw("a red circle", "blurry", 130, 96, 3, 2.0, 3.5, 7, "euler")
    assert first.size == (128, 96) and torch.equal(before, torch.get_rng_state())
    assert draw("a red circle", "blurry", 128, 96, 3, 2.0, 3.5, 7).tobytes() == first.tobytes()
    assert draw("a red circle", "blurry", 128, 96, 3, 2.0, 3.5, 8).tobytes() != first.tobytes()
    assert draw("a red circle", "blurry", 128, 96, 3, 1.0, 3.5, 7).tobytes() != first.tobytes()
    assert draw("a red circle", "sharp", 128, 96, 3, 2.0, 3.5, 7).tobytes() != first.tobytes()


def test_previews_work_after_the_encoders_have_left(dev, parts):
    draw = dev.sampler(parts)
    expected = draw("a red circle", "blurry", 64, 64, 2, 2.0, 3.5, 1).tobytes()
    draw.remember([("a red circle", "blurry")])
    encoders = dict(parts.encoders)
    parts.encoders.clear()
    try:
        assert draw("a red circle", "blurry", 64, 64, 2, 2.0, 3.5, 1).tobytes() == expected
    finally:
        parts.encoders.update(encoders)


def test_previews_equal_the_diffusers_pipeline(dev, parts):
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    config = tiny.diffusers_config(parts.denoiser.state_dict())
    config.pop("_class_name")
    transformer = diffusers.FluxTransformer2DModel(**config)
    transformer.load_state_dict(keys.to_diffusers(parts.denoiser.state_dict()))
    pipeline = diffusers.FluxPipeline(scheduler, parts.vae, None, None, None, None, transformer)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text = dev.text(parts, ["a red circle"])
        ours = dev.sampler(parts).drawn(text, (4, 6), 4, 1.0, 3.5, seed=3)
        theirs = pipeline(
            prompt_embeds=text["t5_out"],
            pooled_prompt_embeds=text["l_pooled"],
            latents=torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(3)),
            height=64,
            width=96,
            num_inference_steps=4,
            guidance_scale=3.5,
            output_type="latent",
        ).images
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_noised_is_what_the_protocol_says(dev, parts):
    noised, _ = step(dev, parts, timesteps=torch.tensor([0.25, 0.75]))
    assert isinstance(noised, Noised) and noised.timesteps.tolist() == [0.25, 0.75]


def test_only_the_needed_files_of_a_repository_are_fetched():
    from library.families.flux.source import wanted_files

    whole = [
        *("README.md", "ae.safetensors", "flux1-dev.safetensors", "model_index.json", "text_encoder/config.json"),
        *("text_encoder/model.safetensors", "text_encoder_2/model-00001-of-00002.safetensors"),
        *("transformer/config.json", "transformer/diffusion_pytorch_model-00001-of-00003.safetensors"),
        *("transformer/diffusion_pytorch_model.safetensors.index.json", "vae/diffusion_pytorch_model.safetensors"),
    ]
    assert wanted_files(whole, "denoiser") == [name for name in whole if name.startswith("transformer/")]
    assert wanted_files(whole, "ae") == ["vae/diffusion_pytorch_model.safetensors"]
    encoders = ["clip_l.safetensors", "t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn.safetensors"]
    assert wanted_files(encoders, "t5xxl") == ["t5xxl_fp16.safetensors"]
    assert wanted_files(encoders, "clip_l") == ["clip_l.safetensors"]
    with pytest.raises(ValueError, match=r"ae.safetensors"):
        wanted_files(encoders, "ae")


def test_a_hub_id_is_enough_for_all_parts_and_is_not_fetched_to_be_checked(files):
    given = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "clip_l": None, "t5xxl": None, "ae": None}
    of = family(files, **given, tokenizer_cache_dir=files["ae"].parent)
    assert all("tokenizer" in problem for problem in of.problems())


def test_an_absent_tokenizer_is_one_clear_sentence(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    moved = {part: shutil.copy(files[part], tmp_path) for part in ("flux", "clip_l", "t5xxl", "ae")}
    found = list(family({part: Path(path) for part, path in moved.items()}).problems())
    assert len(found) == 2
    assert "openai/clip-vit-large-patch14" in found[0] and "google/t5-v1_1-xxl" in found[1]


@pytest.mark.parametrize("layers", [1, 3])
def test_sizes_of_t5_xxl_are_read_from_its_tensors(layers):
    from transformers import T5Config, T5EncoderModel

    from library.families import t5

    real = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": layers}
    with torch.device("meta"):
        model = T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **real))
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "shared.weight"}
    found = t5.config(shapes)
    assert {name: getattr(found, name) for name in real} == real
    assert found.is_gated_act and found.dense_act_fn == "gelu_new" and found.relative_attention_num_buckets == 32
