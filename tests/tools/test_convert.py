"""Names in files: round trips are exact, and diffusers loads what is written for it."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.adapter_files import adapters, names
from library.adapter_files.verify import verify_lora
from library.config.problems import ConfigError
from library.tools.convert import convert_lora
from tests import flux_files
from tests.families.expectations import diffusers_loader, expected
from tests.tools.conftest import asked, file_of, loaded, saved, trained

FAMILIES = ("sdxl", "flux")


def same(first, two):
    first, two = load_file(first), load_file(two)
    assert first.keys() == two.keys()
    return all(torch.equal(first[key], two[key]) and first[key].dtype == two[key].dtype for key in first)


@pytest.fixture(scope="module")
def adapted(bases):
    """A function: family and alpha -> a method with adapters of all kinds, made once."""

    @functools.cache
    def make(name, alpha):
        args = ["conv_dim=4", "conv_alpha=2"] if name == "sdxl" else ["train_t5xxl=True", "in_dims=[4,4,4,4,4]"]
        return trained(bases[name], network_dim=4, network_alpha=alpha, network_args=args)[0]

    return make


@pytest.mark.parametrize("through", ["comfy", "diffusers"])
@pytest.mark.parametrize(("alpha", "dtype"), [(1, torch.float32), (2.0, torch.bfloat16), (4.0, torch.bfloat16)])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_the_same_to_the_bit(name, alpha, dtype, through, adapted, tmp_path):
    file = saved(adapted(name, alpha), tmp_path / "a.safetensors", {"ss_network_dim": "4"}, dtype)
    there = convert_lora(file, tmp_path / "there.safetensors", to=through)
    renamed = (name, through) != ("sdxl", "comfy")  # where kohya's names are those that all programs read
    assert bool(load_file(there).keys() & load_file(file).keys()) != renamed
    back = convert_lora(there, tmp_path / "back.safetensors", to="kohya")
    assert same(file, back)
    about = adapters.read_lora(back).metadata
    assert about["ss_network_dim"] == "4" and adapters.FOLDED not in about


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_an_odd_strength_comes_back_from_half_precision_exactly(alpha, bases, tmp_path):
    method, _ = trained(bases["flux"], network_dim=3, network_alpha=alpha)
    file = saved(method, tmp_path / "a.safetensors", dtype=torch.bfloat16)
    there = convert_lora(file, tmp_path / "there.safetensors", to="diffusers")
    assert {t.dtype for t in load_file(there).values()} == {torch.bfloat16, torch.float32}
    assert same(file, convert_lora(there, tmp_path / "back.safetensors", to="kohya"))


def test_split_adapters_of_fused_layers_stay_apart(bases, tmp_path):
    options = {"network_dim": 4, "network_alpha": 2.0, "network_train_unet_only": True}
    method, _ = trained(bases["flux"], **options, network_args=["split_qkv=True"])
    file = saved(method, tmp_path / "a.safetensors")
    there = convert_lora(file, tmp_path / "there.safetensors", to="diffusers")
    stored = load_file(there)
    for module, rank in (("transformer_blocks.0.attn.to_q", 4), ("single_transformer_blocks.1.proj_mlp", 4)):
        assert stored[f"transformer.{module}.lora_A.weight"].shape[0] == rank
    assert same(file, convert_lora(there, tmp_path / "back.safetensors", to="kohya"))


def test_pieces_of_other_ranks_and_missing_ones_are_joined_exactly(tmp_path):
    torch.manual_seed(0)
    pieces = {"attn.to_q": (2, 8), "attn.to_v": (3, 8), "attn.add_q_proj": (1, 8)}
    stored, width = {}, 8
    for name, (rank, rows) in pieces.items():
        stored[f"transformer.transformer_blocks.0.{name}.lora_A.weight"] = torch.randn(rank, width)
        stored[f"transformer.transformer_blocks.0.{name}.lora_B.weight"] = torch.randn(rows, rank)
    stored["transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight"] = torch.randn(2, width)
    stored["transformer.single_transformer_blocks.0.attn.to_k.lora_B.weight"] = torch.randn(width, 2)
    save_file(stored, tmp_path / "d.safetensors")
    kohya = convert_lora(tmp_path / "d.safetensors", tmp_path / "k.safetensors", to="kohya")
    adapters_by_name = {module.kohya: adapter for module, adapter in adapters.read_lora(kohya).adapters.items()}
    qkv = adapters_by_name["lora_unet_double_blocks_0_img_attn_qkv"]
    assert (qkv.rank, qkv.up.shape[0], qkv.strength) == (5, 24, 1)
    for i, piece in enumerate(("q", "k", "v")):
        base = f"transformer.transformer_blocks.0.attn.to_{piece}"
        if f"{base}.lora_A.weight" in stored:
            wanted = stored[f"{base}.lora_B.weight"] @ stored[f"{base}.lora_A.weight"]
        else:
            wanted = torch.zeros(8, 8)
        torch.testing.assert_close(qkv.product().chunk(3)[i], wanted)
    assert adapters_by_name["lora_unet_single_blocks_0_linear1"].up.shape == (7 * width, 2)
    assert same(tmp_path / "d.safetensors", convert_lora(kohya, tmp_path / "back.safetensors", to="diffusers"))


def test_alphas_in_the_metadata_of_diffusers_count(tmp_path):
    base = "unet.down_blocks.1.attentions.0"
    stored = {f"{base}.{m}.lora_{x}.weight": torch.ones(4, 4) for m in ("proj_in", "proj_out") for x in "AB"}
    about = {"unet.r": 4, "unet.lora_alpha": 2, "unet.alpha_pattern": {"down_blocks.1.attentions.0.proj_out": 8}}
    save_file(stored, tmp_path / "d.safetensors", {"lora_adapter_metadata": json.dumps(about)})
    alphas = {m.kohya: a for m, a in adapters.read_lora(tmp_path / "d.safetensors").adapters.items()}
    assert alphas["lora_unet_input_blocks_4_1_proj_in"].strength == 0.5
    assert alphas["lora_unet_input_blocks_4_1_proj_out"].strength == 2
    assert sorted(row.strength for row in verify_lora(tmp_path / "d.safetensors").modules) == [0.5, 2]
    convert_lora(tmp_path / "d.safetensors", tmp_path / "again.safetensors", to="diffusers")
    up = load_file(tmp_path / "again.safetensors")[f"{base}.proj_out.lora_B.weight"]
    assert torch.equal(up, torch.full((4, 4), 2.0))
    assert "lora_adapter_metadata" not in adapters.read_lora(tmp_path / "again.safetensors").metadata


@pytest.mark.parametrize("style", ["diffusers", "kohya"])
def test_diffusers_generates_the_same_with_a_converted_sdxl_file(style, bases, lora_files, tmp_path):
    from diffusers import StableDiffusionXLPipeline

    base, (first, _, expected) = bases["sdxl"], lora_files["sdxl"]
    there = convert_lora(first, tmp_path / "there.safetensors", to="diffusers")
    file = there if style == "diffusers" else convert_lora(there, tmp_path / "k.safetensors", to="kohya")
    parts = loaded(base)[2]
    unet, clip_g = parts.denoiser, parts.encoders["clip_g"]
    state, alphas = StableDiffusionXLPipeline.lora_state_dict(load_file(file), unet_config=unet.config)
    StableDiffusionXLPipeline.load_lora_into_unet(state, alphas, unet)
    if style == "diffusers":
        StableDiffusionXLPipeline.load_lora_into_text_encoder(state, alphas, clip_g, prefix="text_encoder_2")
        torch.testing.assert_close(asked(base, parts)[1], expected[1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(asked(base, parts)[0], expected[0], rtol=1e-3, atol=1e-4)


def test_diffusers_generates_the_same_with_a_converted_flux_file(bases, lora_files, tmp_path):
    from diffusers import FluxPipeline, FluxTransformer2DModel

    base, (first, _, _) = bases["flux"], lora_files["flux"]
    file = convert_lora(first, tmp_path / "there.safetensors", to="diffusers")
    folder = flux_files.write_diffusers(base["flux"], tmp_path / "model")
    model = FluxTransformer2DModel.from_pretrained(folder)
    state, alphas = FluxPipeline.lora_state_dict(load_file(file), return_alphas=True)
    FluxPipeline.load_lora_into_transformer(state, alphas, model)
    layers = dict(model.named_modules())
    checked = 0
    for module, adapter in adapters.read_lora(first).adapters.items():
        if module.part == "denoiser":
            made_of = names.lora_names_of("flux").pieces(module.path)
            deltas = [layers[name].get_delta_weight("default_0") for name in made_of]
            torch.testing.assert_close(torch.cat(deltas), adapter.product(), rtol=1e-4, atol=1e-5)
            checked += len(made_of)
    assert checked == 2 * 14 + 4 * 6


# ComfyUI (April 2026) and diffusers 0.42.1 both read names with the expected prefixes and endings, of all layers at
# full size: by ComfyUI's own map of names, of models on the device "meta", and by diffusers' loaders.
@pytest.mark.parametrize("family", families.FAMILIES)
def test_names_of_comfy_are_those_that_comfy_and_diffusers_read(family, tmp_path):
    torch.manual_seed(0)
    stored = {}
    comfy = expected(family, "comfy")
    for layer, (outputs, inputs) in comfy["layers"].items():
        base = f"lora_unet_{layer}"
        stored |= {
            f"{base}.lora_down.weight": torch.randn(2, inputs),
            f"{base}.lora_up.weight": torch.randn(outputs, 2),
        }
        stored[f"{base}.alpha"] = torch.tensor(1.0)
    about = {"ss_base_model_version": families.facts_of(family).base_model_version}
    save_file(stored, tmp_path / "a.safetensors", about)
    there = load_file(convert_lora(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="comfy"))
    assert all(key.startswith(comfy["prefixes"]) and key.endswith(comfy["endings"]) for key in there)
    assert all(any(key.endswith(f".{ending}") for key in there) for ending in comfy["endings"])
    back = load_file(convert_lora(tmp_path / "b.safetensors", tmp_path / "c.safetensors", to="kohya"))
    assert back.keys() == stored.keys() and all(torch.equal(back[key], stored[key]) for key in back)


@pytest.mark.parametrize("name", [facts.name for facts in families.all_families() if not facts.denoiser_prefix])
def test_diffusers_reads_the_names_of_comfy(name, tmp_path):
    stored, layers = {}, expected(name, "comfy")["layers"]
    for layer, (outputs, inputs) in layers.items():
        base = f"lora_unet_{layer}"
        stored |= {
            f"{base}.lora_down.weight": torch.randn(2, inputs),
            f"{base}.lora_up.weight": torch.randn(outputs, 2),
        }
        stored[f"{base}.alpha"] = torch.tensor(1.0)
    save_file(stored, tmp_path / "a.safetensors", {"ss_base_model_version": families.facts_of(name).base_model_version})
    there = load_file(convert_lora(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="comfy"))
    converted = diffusers_loader(name).lora_state_dict(there)
    converted = converted[0] if isinstance(converted, tuple) else converted
    pieces = {"qkv": 3, "linear1": 4 if name == "flux" else 1}
    assert len(converted) == 2 * sum(pieces.get(layer.rpartition("_")[2], 1) for layer in layers)
    assert all(key.startswith("transformer.") and key.endswith(("lora_A.weight", "lora_B.weight")) for key in converted)
    norm = sum(
        float((converted[key.replace("lora_A", "lora_B")] @ converted[key]).square().sum())
        for key in converted
        if "lora_A" in key
    )
    wanted = sum(
        float((stored[key.replace("down", "up")] @ stored[key] / 2).square().sum()) for key in stored if "down" in key
    )
    assert norm == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("title", ["SDXL networks.lora default", "SDXL extra modules", "FLUX.1 networks.lora_flux"])
def test_every_name_of_sd_scripts_is_understood(title):
    from tests.methods.test_files import golden

    family = "flux" if "FLUX" in title else "sdxl"
    rows = golden(title)
    assert len(rows) > 60
    for name in rows:
        module = names.parse_name(name, family).module
        assert module.kohya == name
        for style in names.FORMATS:
            spelled = names.spelled(module, family, style)
            assert {names.parse_name(piece, family).module for piece in spelled} == {module}
            assert len(spelled) == 1 or (style != "kohya" and family == "flux")


def test_other_spellings_are_read(tmp_path):
    old = {
        "lora_unet_down_blocks_1_attentions_0_proj_in": "lora_unet_input_blocks_4_1_proj_in",
        "base_model.model.down_blocks.1.attentions.0.proj_in": "lora_unet_input_blocks_4_1_proj_in",
        "down_blocks.1.attentions.0.proj_in": "lora_unet_input_blocks_4_1_proj_in",
        "lora_te_text_model_encoder_layers_0_mlp_fc1": "lora_te1_text_model_encoder_layers_0_mlp_fc1",
    }
    for name, wanted in old.items():
        assert names.parse_name(name, "sdxl").module.kohya == wanted
    parsed = names.parse_name("lora_transformer_single_transformer_blocks_3_proj_mlp", "flux")
    assert parsed[:3] == (names.Module("denoiser", "single_blocks.3.linear1"), 3, 4)


def test_what_is_no_adapter_is_refused(bases, lora_files, tmp_path):
    name = "lora_unet_input_blocks_4_1_proj_in"
    plain = {f"{name}.lora_down.weight": torch.ones(2, 4), f"{name}.lora_up.weight": torch.ones(4, 2)}
    cases = [
        ({f"{name}.dora_scale": torch.ones(4)}, "lacks its down matrix"),
        ({f"{name}.hada_w1_a": torch.ones(4, 2)}, "of LoHa, lacks hada_w1_b, hada_w2_a, hada_w2_b"),
        ({f"{name}.on_input": torch.tensor(True)}, "of iA3, lacks weight"),
        ({f"{name}.a1.weight": torch.ones(2, 4)}, "of GLoRA, lacks a2.weight"),
        ({"lllite_unet_x.down.0.weight": torch.ones(2, 4)}, "belongs to ControlNet-LLLite"),
        ({f"{name}.other": torch.ones(2, 4)}, "other is not a part of a known adapter"),
        ({f"{name}.lora_down.weight": torch.ones(2, 4)}, "lacks its up matrix"),
        ({**plain, f"{name}.lora_up.weight": torch.ones(4, 3)}, "do not fit together"),
        (
            {k.replace("input_blocks_4_1_proj_in", "layers_0_attention_qkv"): t for k, t in plain.items()},
            "a fused layer",
        ),
        ({k.replace("input_blocks_4_1_proj_in", "towers_0_attention"): t for k, t in plain.items()}, "only those"),
    ]
    for i, (tensors, match) in enumerate(cases):
        save_file(tensors, tmp_path / f"{i}.safetensors")
        with pytest.raises(ConfigError, match=match):
            convert_lora(tmp_path / f"{i}.safetensors", tmp_path / "o.safetensors", to="comfy")
    unknown = {key.replace(name, "lora_unet_nowhere"): tensor for key, tensor in plain.items()}
    save_file(load_file(lora_files["flux"][0]) | unknown, tmp_path / "flux.safetensors")
    with pytest.raises(ConfigError, match="lora_unet_nowhere has no name in diffusers"):
        convert_lora(tmp_path / "flux.safetensors", tmp_path / "o.safetensors", to="diffusers")
    with pytest.raises(ConfigError, match="use one of"):
        convert_lora(lora_files["sdxl"][0], tmp_path / "o.safetensors", to="peft")
    with pytest.raises(ConfigError, match=r"sdxl.*there is no LoRA in this file"):
        convert_lora(file_of(bases["sdxl"]), tmp_path / "o.safetensors", to="kohya")
    assert not (tmp_path / "o.safetensors").exists()
