"""Files of every kind of adapter of every family, as `--to comfy` writes them: each key is one of ComfyUI's own map of
names, the change of each layer stays the same, and diffusers loads what it reads.

golden/comfyui_names.json holds what ComfyUI made of such files: the names of layers that its map has for models at full
size, with # for the number of a block, the endings that it reads, and how many layers it found.
"""

import dataclasses
import functools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families, methods
from library.adapter_files import adapters, names
from library.adapter_files.changes import LayerChange
from library.adapter_files.factors import AdapterFactors
from library.bench import random_weights
from library.config.building import draft
from library.config.problems import ConfigError
from library.families.adapter_kinds import kinds
from library.families.base import ModelComponents
from library.tools import for_comfyui
from library.tools.convert import convert_lora
from tests.families.expectations import diffusers_loader, expected
from tests.source import ROOT

pytest.importorskip("lycoris.kohya")
KNOWN = json.loads((ROOT / "tests" / "golden" / "comfyui_names.json").read_text(encoding="utf-8"))
BLOCK = re.compile(r"(?<![a-z])((?:[a-z]+_)?(?:blocks|layers|block|refiner)[._])\d+(?=[._])")  # and its number
VARIANTS = (*families.FAMILIES, "chroma")
SHARED = ("dora", "loha", "diag-oft", "boft", "glora", "dylora", "ia3")  # kinds that say nothing new of a second U-Net
# Arguments that change which tensors a file has, beside those of a kind itself.
MORE = {
    "locon": (["train_norm=True"], ["use_tucker=True", "conv_dim=2"], ["use_scalar=True", "rs_lora=True"]),
    "dora": (["wd_on_output=False"],),
    "loha": (["dora_wd=True"], ["use_tucker=True", "conv_dim=2"]),
    "lokr": (
        ["factor=4"],
        ["factor=4", "full_matrix=True"],
        ["factor=16", "decompose_both=True"],
        ["dora_wd=True"],
        ["factor=4", "use_tucker=True", "conv_dim=2"],
    ),
    "diag-oft": (["rescaled=True", "constraint=0.001"],),
    "boft": (["rescaled=True", "constraint=0.001"],),
    "ia3": (["train_on_input=True"],),
}
WITH_ENCODERS = ("networks.lora", "networks.lora_flux", "lokr", "full")  # which all kinds name alike
CASES = [
    (variant, kind.id, tuple(more))
    for variant in VARIANTS
    for kind in kinds("flux" if variant == "chroma" else variant)
    for more in ((), *MORE.get(kind.id, ()))
    if variant == "sdxl" or "use_tucker=True" not in more
    if variant != "sd15" or (not more and kind.id not in SHARED)
]


def family_of(variant):
    return "flux" if variant == "chroma" else variant


@functools.cache
def networks(variant):
    """The denoiser and the text encoders, on the CPU, with their sizes."""
    family = family_of(variant)
    module = families.random_module(family)
    sizes = dataclasses.replace(
        module.VARIANTS["chroma"] if variant == "chroma" else module.TINY, **expected(family, "tiny")
    )
    builders = module.make_networks(sizes)
    encoders = builders.encoders if family in ("sdxl", "flux", "sd15") else {}
    place = torch.device("cpu"), torch.float32
    return (
        lambda: random_weights.fill_randomly(builders.denoiser(), *place),
        lambda: {name: random_weights.fill_randomly(make(), *place) for name, make in encoders.items()},
        sizes,
    )


def written(variant, kind_id, more, path):
    """A file of a kind with random numbers, as a training saves it."""
    family = family_of(variant)
    kind = next(kind for kind in kinds(family) if kind.id == kind_id)
    args = [f"{name}={value}" for name, value in {**kind.fixed, **kind.start}.items()] + list(more)
    args += ["train_t5xxl=True"] if family == "flux" and "train_t5xxl" in kind.names else []
    values = {
        "pretrained_model_name_or_path": "x.safetensors",
        "learning_rate": 1e-3,
        "network_module": kind.module,
        "network_args": args,
        "network_dim": 36 if kind_id == "boft" else 4,
        "network_alpha": 2.0,
        **({"model_type": "chroma"} if variant == "chroma" else {}),
    }
    config = draft(families.config_class(families.lora_script(family)), values)
    own_family, denoiser = families.family_for(config), networks(variant)[0]()
    encoders = networks(variant)[1]() if kind_id in WITH_ENCODERS and not more else {}
    families.adopt_denoiser(own_family, denoiser)
    method = methods.attach_method(ModelComponents(denoiser, None, encoders, {}), own_family, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_file(method.state_dict(), path, {"ss_base_model_version": own_family.base_model_version})
    return path


def is_known(variant, name):
    return BLOCK.sub(r"\1#", name) in KNOWN["names"][variant]


def change_of(part):
    """What a module changes of a weight and of a bias; of a weight of random numbers where that plays a part."""
    if isinstance(part, AdapterFactors):
        return part.product(), None
    torch.manual_seed(1)
    blocks = part.parts.get("oft_blocks")
    rows = blocks.shape[-3] * blocks.shape[-2] if blocks is not None else None
    shape = (rows, 8) if rows else part.shape()
    if shape is None and "a1.weight" in part.parts:
        shape = len(part.parts["b1.weight"]), len(part.parts["a1.weight"]), *part.parts["b2.weight"].shape[2:]
    weight = torch.randn(shape) if shape else None
    return None if weight is None else part.ready().delta(weight).flatten(1 if weight.ndim > 1 else 0), part.bias()


@pytest.mark.parametrize(("variant", "kind", "more"), CASES, ids=lambda value: str(value))
def test_every_key_is_one_that_comfyui_reads(variant, kind, more, tmp_path):
    file = written(variant, kind, more, tmp_path / "a.safetensors")
    if KNOWN["kinds"][kind] == "refused":
        with pytest.raises(ConfigError, match="ComfyUI has no names for: add it .* with kohya tools merge"):
            convert_lora(file, tmp_path / "b.safetensors", to="comfy")
        assert not (tmp_path / "b.safetensors").exists()
        return
    there = load_file(convert_lora(file, tmp_path / "b.safetensors", to="comfy"))
    layers = {}
    for key, tensor in there.items():
        name, _ = names.split_any(key, there)
        layers.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
    assert [name for name in layers if not is_known(variant, name)] == []
    assert {ending for parts in layers.values() for ending in parts} <= {*KNOWN["endings"]}
    for parts in layers.values():  # what ComfyUI leaves out of OFT, and where it would fail
        blocks = parts.get("oft_blocks")
        assert blocks is None or (float(parts["alpha"]) == 0 and (blocks.ndim == 4 or "rescale" not in parts))
    before, after = adapters.read_lora(file), adapters.read_lora(tmp_path / "b.safetensors")
    assert before.adapters.keys() == after.adapters.keys() and before.other_changes.keys() == after.other_changes.keys()
    for module, part in {**before.adapters, **before.other_changes}.items():
        (delta, bias), (there, its) = change_of(part), change_of({**after.adapters, **after.other_changes}[module])
        assert delta is None or (delta - there).norm() <= 1e-5 * delta.norm()
        assert bias is None or torch.equal(bias, its)


def test_every_family_and_every_kind_was_counted():
    """A new one is first read by ComfyUI, and its counts added to the file and to docs/tools.md."""
    assert {*families.FAMILIES} <= KNOWN["names"].keys() and {*VARIANTS} <= KNOWN["layers"].keys()
    assert {kind.id for family in families.FAMILIES for kind in kinds(family)} == KNOWN["kinds"].keys()
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    for counts in KNOWN["layers"].values():
        row = f"| {counts['title']} | {counts['saved']} | {counts['written']} | "
        row += " | ".join(f"{counts[who]:,}".replace(",", "") for who in ("lora", "lycoris", "diffusers"))
        assert row in page, row


def test_what_comfyui_computes_otherwise_is_reported(tmp_path):
    cases = {
        ("dora", ()): ("DoRA over outputs", "read DoRA"),
        ("dora", ("wd_on_output=False",)): ("read DoRA",),
        ("boft", ()): ("strength twice", "read BOFT"),
        ("loha", ()): ("read LoHa",),
        ("lokr", ()): (),
        ("dylora", ()): (),
    }
    for number, ((kind, more), wanted) in enumerate(cases.items()):
        said = []
        file = written("zimage", kind, more, tmp_path / f"{number}.safetensors")
        convert_lora(file, tmp_path / f"{number}-there.safetensors", to="comfy", note=said.append)
        assert len(said) == len(wanted) and all(
            part in str(sentence) for part, sentence in zip(wanted, said, strict=True)
        )


def test_rotations_are_written_as_comfyui_computes_them():
    """Its limit is not times the outputs, and it uses the learned scale of BOFT alone."""
    torch.manual_seed(0)
    module, weight = names.Module("denoiser", "blocks.0.mlp.layer1"), torch.randn(48, 20)
    for blocks in (torch.randn(6, 8, 8), torch.randn(2, 6, 8, 8), torch.randn(16, 3, 3)):
        for limit in (0.0, 0.003):
            parts = {"oft_blocks": blocks, "rescale": torch.rand(48, 1) + 1, "alpha": torch.tensor(limit)}
            lora = adapters.Lora("anima", {}, other_changes={module: LayerChange(parts)})
            rotations = for_comfyui.prepare_for_comfyui(lora, "a.safetensors").other_changes[module]
            assert rotations.parts["oft_blocks"].ndim == 4 and float(rotations.parts["alpha"]) == 0
            torch.testing.assert_close(rotations.delta(weight), LayerChange(parts).delta(weight), rtol=1e-4, atol=1e-4)


# ---- diffusers


def transformer(variant):
    """diffusers' own transformer of the sizes of ours."""
    import diffusers

    make, _, sizes = networks(variant)
    if variant in ("sdxl", "sd15"):  # whose U-Net is diffusers'
        return make()
    heads = {"num_attention_heads": sizes.hidden // sizes.head, "attention_head_dim": sizes.head}
    axes = (sizes.head // 4, sizes.head // 4, sizes.head // 2)
    if variant in ("flux_2", "flux_3", "krea_2", "qwen_image_21"):
        settings = families.random_module(variant).diffusers_settings(make().sizes)
        name = "QwenImage21" if variant == "qwen_image_21" else expected(variant, "lora_loader")
        return getattr(diffusers, f"{name}Transformer2DModel")(**settings)
    if variant == "qwen_image":
        return diffusers.QwenImageTransformer2DModel(
            in_channels=4 * sizes.channels,
            out_channels=sizes.channels,
            num_layers=1,
            joint_attention_dim=sizes.text,
            axes_dims_rope=axes,
            **heads,
        )
    if variant == "zimage":
        return diffusers.ZImageTransformer2DModel(
            in_channels=sizes.channels,
            dim=sizes.hidden,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=sizes.hidden // sizes.head,
            n_kv_heads=sizes.hidden // sizes.head,
            cap_feat_dim=sizes.text,
            axes_dims=[sizes.head // 4, 3 * sizes.head // 8, 3 * sizes.head // 8],
        )
    if variant == "anima":
        return diffusers.CosmosTransformer3DModel(
            in_channels=sizes.channels,
            out_channels=sizes.channels,
            num_layers=1,
            text_embed_dim=sizes.adapter,
            adaln_lora_dim=sizes.modulation,
            **heads,
        )
    cls = diffusers.ChromaTransformer2DModel if variant == "chroma" else diffusers.FluxTransformer2DModel
    own = {"pooled_projection_dim": sizes.clip_l, "guidance_embeds": True}
    if sizes.approximator:
        own = dict(
            zip(
                ("approximator_num_channels", "approximator_hidden_dim", "approximator_layers"),
                sizes.approximator,
                strict=True,
            )
        )
    return cls(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=sizes.t5xxl,
        axes_dims_rope=axes,
        **own,
        **heads,
    )


def paths_of(variant, module, is_lokr):
    """The layers of diffusers' transformer that a module of ours is, in the order of its rows."""
    from library.families.anima import keys

    if variant == "anima":
        block, _, inside = module.path.removeprefix("blocks.").partition(".")
        table = {new: f"transformer_blocks.{block}.{old}" for old, new in keys.INSIDE.items()}
        table |= {new: old for old, new in keys.OUTSIDE_OF_BLOCKS.items()}
        return (table[inside if module.path.startswith("blocks.") else module.path],)
    if is_lokr and module.path.endswith(".qkv"):  # which diffusers fuses for these
        stream = "to_qkv" if ".img_" in module.path else "to_added_qkv"
        return (f"transformer_blocks.{module.path.split('.')[1]}.attn.{stream}",)
    return names.lora_names_of(family_of(variant)).pieces(module.path)


def loaded_layers(variant, file, **encoders):
    """Load a file with the pipeline's own loader; return its layers, those of text encoders after their name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    mixin = diffusers_loader(family_of(variant))
    networks_by_name = {"unet" if variant in ("sdxl", "sd15") else "transformer": transformer(variant)}
    networks_by_name |= {"text_encoder": encoders.get("clip_l"), "text_encoder_2": encoders.get("clip_g")}
    pipeline = type("Pipeline", (mixin,), {"components": {}, "hf_device_map": None, **networks_by_name})()
    pipeline.load_lora_weights(file)
    prefixes = {"text_encoder": "clip_l.", "text_encoder_2": "clip_g."}
    return {
        prefixes.get(part, "") + name: layer
        for part, network in networks_by_name.items()
        if network is not None
        for name, layer in network.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


LOADED = [
    (variant, kind, ())
    for variant in VARIANTS
    for kind in (next(k.id for k in kinds(family_of(variant))), "locon", "dylora")
]
LOADED += [
    (variant, "lokr", more)
    for variant in families.FAMILIES
    if names.lora_names_of(variant).shared.has_lokr
    for more in (("factor=4",), ("factor=4", "full_matrix=True"))
]


@pytest.mark.parametrize(("variant", "kind", "more"), LOADED, ids=lambda value: str(value))
def test_diffusers_adds_the_same_to_every_layer(variant, kind, more, tmp_path):
    """Loaded by the pipeline's own loader; the strength counts, wherever the file has it."""
    file = written(variant, kind, more, tmp_path / "a.safetensors")
    whole = adapters.read_lora(file)
    parts = {
        module: part for module, part in {**whole.adapters, **whole.other_changes}.items() if module.part == "denoiser"
    }
    there = load_file(convert_lora(file, tmp_path / "b.safetensors", to="comfy"))
    layers = loaded_layers(variant, {key: tensor for key, tensor in there.items() if not key.startswith(names.TEXT)})
    paths = set()
    for module, part in parts.items():
        deltas = [layers[path].get_delta_weight("default_0") for path in paths_of(variant, module, kind == "lokr")]
        paths |= {*paths_of(variant, module, kind == "lokr")}
        torch.testing.assert_close(torch.cat(deltas).flatten(1), change_of(part)[0], rtol=1e-4, atol=1e-6)
    assert paths == layers.keys() and len(paths) >= 7


def test_what_diffusers_does_not_read_is_refused_with_what_to_write(tmp_path):
    cases = {
        ("qwen_image", "full"): "add the file to a checkpoint with kohya tools merge FILE --base MODEL",
        ("qwen_image", "loha"): "is LoHa, .* kohya tools merge FILE --rank 16 --out NEW",
        ("anima", "dora"): "is DoRA, .* --trained_on MODEL --rank 16",
    }
    for number, ((variant, kind), wanted) in enumerate(cases.items()):
        file = written(variant, kind, (), tmp_path / f"{number}.safetensors")
        with pytest.raises(ConfigError, match=wanted):
            convert_lora(file, tmp_path / "no.safetensors", to="diffusers")
