"""Files of every kind of adapter that can be trained, against the forward pass that trained them: checked, sampled,
merged, joined, converted and resized."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from library.adapter_files import adapters
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.verify import verify_lora
from library.config.problems import ConfigError
from library.methods.applied import AppliedLoras
from library.tools import merge, resize
from library.tools.convert import convert_lora
from tests.tools.conftest import asked, loaded, saved, trained

kohya = pytest.importorskip("lycoris.kohya")
# Kind -> its arguments, and what a file of it can be made into by `resize`.
EVERY = {
    "LoRA": (["conv_dim=2", "conv_alpha=1"], "LoRA"),
    "LoCon": (["algo=locon", "conv_dim=2"], "LoRA"),
    "LoCon, Tucker": (["algo=locon", "conv_dim=2", "use_tucker=True"], "LoRA"),
    "LoCon, scalar": (["algo=locon", "use_scalar=True", "rs_lora=True"], "LoRA"),
    "LoCon, bypass": (["algo=locon", "bypass_mode=True"], "LoRA"),
    "DoRA": (["algo=locon", "dora_wd=True", "conv_dim=2"], "DoRA"),
    "DoRA, inputs": (["algo=locon", "dora_wd=True", "wd_on_output=False"], "DoRA"),
    "LoHa": (["algo=loha", "conv_dim=2", "rs_lora=True"], "LoRA"),
    "LoHa, Tucker": (["algo=loha", "conv_dim=2", "use_tucker=True"], "LoRA"),
    "LoHa, DoRA": (["algo=loha", "dora_wd=True"], ""),
    "LoKr": (["algo=lokr", "factor=4", "conv_dim=2"], "LoRA"),
    "LoKr, Tucker": (["algo=lokr", "factor=4", "conv_dim=1", "use_tucker=True"], "LoRA"),
    "LoKr, both": (["algo=lokr", "factor=16", "decompose_both=True"], "LoRA"),
    "LoKr, whole": (["algo=lokr", "factor=4", "full_matrix=True"], "LoRA"),
    "LoKr, DoRA": (["algo=lokr", "factor=4", "dora_wd=True"], ""),
    "OFT": (["algo=diag-oft", "conv_dim=2"], ""),
    "OFT, rescaled": (["algo=diag-oft", "rescaled=True", "constraint=0.01"], ""),
    "BOFT": (["algo=boft"], ""),
    "BOFT, rescaled": (["algo=boft", "rescaled=True", "constraint=0.01"], ""),
    "DyLoRA": (["algo=dylora", "block_size=2"], "LoRA"),
    "GLoRA": (["algo=glora", "rs_lora=True"], ""),
    "iA3": (["algo=ia3"], ""),
    "iA3, inputs": (["algo=ia3", "train_on_input=True"], ""),
    "full": (["algo=full"], "LoRA"),
    "norms": (["algo=locon", "train_norm=True"], "LoRA"),
}
BOUND = ("DoRA", "OFT", "BOFT", "GLoRA", "iA3")  # whose change depends on the model
WHOLE = ("DoRA", "OFT, rescaled", "full", "norms")  # tried in a whole model
FLUX = {"lora_unet_input_blocks_4_1_proj_in": "lora_unet_double_blocks_0_img_mlp_0"}
NEAR = {"rtol": 2e-4, "atol": 2e-4}


class Transformer2DModel(nn.Module):
    """The package finds layers in what is called so."""

    def __init__(self):
        super().__init__()
        self.proj_in, self.norm = nn.Linear(32, 64), nn.LayerNorm(32)
        self.in_layers = nn.Sequential(nn.Identity(), nn.Identity(), nn.Conv2d(32, 64, 3))


@pytest.fixture
def file(kind, tmp_path):
    """A file of the kind with three modules, which are named as SDXL's."""
    torch.manual_seed(0)
    tree = {"input_blocks": nn.ModuleDict({"4": nn.ModuleDict({"1": Transformer2DModel()})})}
    named = [arg.split("=") for arg in EVERY[kind][0]]
    settings = {"algo": "locon", "conv_alpha": 1.0, **dict(named)}
    settings = {key: {"True": True, "False": False}.get(value, value) for key, value in settings.items()}
    root = nn.ModuleDict(tree)
    network = kohya.create_network(1.0, 4, 2.0, None, None, root, **settings)
    network.apply_to([], root, False, True)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    path = tmp_path / "a.safetensors"
    state = {
        key.replace("_1_in_layers", "_0_in_layers"): tensor.contiguous() for key, tensor in network.state_dict().items()
    }
    save_file(state, path, {"ss_base_model_version": "sdxl_base_v1-0"})
    return path


def changed(path):
    """What a file changes in each layer, where no model has to be known for it."""
    whole = adapters.read_lora(path)
    out = {}
    for module, part in {**whole.adapters, **whole.other_changes}.items():
        if isinstance(part, AdapterFactors):
            out[module] = part.product(), None
        else:
            shape = part.shape()
            delta = part.ready().delta(torch.zeros(shape)).flatten(1 if len(shape) > 1 else 0) if shape else None
            out[module] = delta, part.bias()
    return out


@pytest.mark.parametrize("kind", EVERY)
def test_checked_and_renamed(kind, file, tmp_path):
    findings = verify_lora(file)
    assert (findings.problems, findings.family) == ([], "sdxl") and not any(row.dead for row in findings.modules)
    assert all((row.norm is None) == (row.kind in BOUND or "DoRA" in kind) for row in findings.modules)
    stored = load_file(file)
    only = {
        FLUX[name] + key.removeprefix(name): tensor for name in FLUX for key, tensor in stored.items() if name in key
    }
    save_file(only, tmp_path / "f.safetensors", {"ss_base_model_version": "flux1"})
    if kind.startswith("iA3"):
        with pytest.raises(ConfigError, match="ComfyUI has no names for"):
            convert_lora(tmp_path / "f.safetensors", tmp_path / "no.safetensors", to="comfy")
        return
    there = convert_lora(tmp_path / "f.safetensors", tmp_path / "there.safetensors", to="comfy")
    keys, is_plain = load_file(there).keys(), kind in ("LoRA", "DyLoRA", "norms") or "LoCon" in kind
    wanted = (
        "transformer.transformer_blocks.0.ff.net.0.proj." if is_plain else "diffusion_model.double_blocks.0.img_mlp.0."
    )
    assert keys and all(key.startswith(wanted) for key in keys)
    back = load_file(convert_lora(there, tmp_path / "back.safetensors", to="kohya"))
    assert back.keys() == only.keys()
    if "rescaled" in kind:  # written as ComfyUI computes them
        paths = tmp_path / "f.safetensors", there
        (tensor,), (other,) = (adapters.read_lora(path).other_changes.values() for path in paths)
        weight = torch.randn(64, 32)
        torch.testing.assert_close(other.ready().delta(weight), tensor.ready().delta(weight), **NEAR)
    else:
        assert all(torch.equal(back[key], only[key]) for key in only)
    if not is_plain:
        with pytest.raises(ConfigError, match="diffusers has no names"):
            convert_lora(there, tmp_path / "no.safetensors", to="diffusers")


@pytest.mark.parametrize("kind", EVERY)
def test_joined_it_changes_as_much_as_its_parts(kind, file, tmp_path):
    loras = [(file, 0.5), (file, 0.25)]
    if any(change.uses_weight for change in adapters.read_lora(file).other_changes.values()):
        with pytest.raises(ConfigError, match="trained_on"):
            merge.join_loras(loras, tmp_path / "no.safetensors")
        return
    before, after = changed(file), changed(merge.join_loras(loras, tmp_path / "j.safetensors").path)
    assert before.keys() == after.keys() and len(after) == (3 if kind == "norms" else 2)
    for module, (delta, bias) in before.items():
        torch.testing.assert_close(after[module][0], 0.75 * delta, rtol=1e-4, atol=1e-5)
        assert bias is None or torch.equal(after[module][1], 0.75 * bias)


@pytest.mark.parametrize("kind", EVERY)
def test_resized_where_there_are_ranks(kind, file, tmp_path):
    options, becomes = resize.ResizeOptions(2, 1), EVERY[kind][1]
    if not becomes:
        with pytest.raises(ConfigError, match="no rank to cut"):
            resize.resize_lora(file, tmp_path / "r.safetensors", choices=options)
        return
    done = resize.resize_lora(file, tmp_path / "r.safetensors", choices=options)
    assert {after for _, after in done.ranks.values()} <= {1, 2} and 0 < done.kept_share < 1
    findings = verify_lora(done.path)
    assert findings.problems == [] and {row.kind for row in findings.modules} - {"norm"} == {becomes}
    if kind == "norms":
        assert any(row.kind == "norm" for row in findings.modules)
    if becomes == "LoRA" and kind != "full":  # whose noise has no largest values that a quick look finds
        for module, (delta, bias) in changed(file).items():
            if delta.ndim == 2:
                rank = 1 if "in_layers" in module.path else 2
                u, s, v = torch.linalg.svd(delta, full_matrices=False)
                actual, reduced = changed(done.path)[module]
                torch.testing.assert_close(actual, u[:, :rank] * s[:rank] @ v[:rank], rtol=1e-3, atol=1e-3)
                assert bias is None or torch.equal(bias, reduced)


@pytest.mark.parametrize("kind", [kind for kind in EVERY if "DoRA" in kind])
def test_whatever_refuses_a_dora_says_that_it_is_one(kind, file, tmp_path):
    """Joined, renamed for diffusers, resized and checked."""
    out, title = tmp_path / "r.safetensors", "DoRA" if kind.startswith("DoRA") else f"{kind[:4]} with DoRA"
    refused = [
        lambda: merge.join_loras([(file, 1.0)], out),
        lambda: convert_lora(file, out, to="diffusers"),
        *[lambda: resize.resize_lora(file, out, choices=resize.ResizeOptions(2, 1))] * (not EVERY[kind][1]),
    ]
    for refuse in refused:
        with pytest.raises(ConfigError, match=f"is {title},"):
            refuse()
    assert {row.kind for row in verify_lora(file).modules} == {title}


def near(actual, wanted):
    for first, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(first, other, **NEAR)


def applied(base, path, *strengths):
    _, family, parts = loaded(base)
    beside = AppliedLoras(parts, family)
    beside.add(path)
    for strength in strengths:
        beside.set({path: strength})
        yield asked(base, parts)


@pytest.mark.parametrize("kind", WHOLE)
def test_checked_merged_and_sampled_as_it_was_trained(kind, sdxl, tmp_path):
    options = {"network_dim": 4, "network_alpha": 2.0, "network_args": EVERY[kind][0]}
    method, parts = trained(sdxl, size=0.03, network_module="lycoris.kohya", **options)
    path = saved(method, tmp_path / "a.safetensors", {"ss_base_model_version": "sdxl_base_v1-0"})
    method.train(False)
    expected, plain = asked(sdxl, parts), asked(sdxl, loaded(sdxl)[2])
    assert not torch.allclose(plain[0], expected[0], atol=1e-3)
    findings = verify_lora(path, sdxl)
    assert (findings.problems, findings.family) == ([], "sdxl")
    off, on = applied(sdxl, path, 0.0, 1.0)
    near(on, expected)
    assert all(torch.equal(a, b) for a, b in zip(off, plain, strict=True))
    out = sdxl.with_name(f"merged-{kind}.safetensors")  # its tokenizers are there
    merge.merge_into_checkpoint(sdxl, [(path, 1.0)], out)
    near(asked(sdxl, loaded(out)[2]), expected)
    if kind not in ("DoRA", "OFT, rescaled"):
        return
    joined = merge.join_loras([(path, 0.5), (path, 0.5)], tmp_path / "j.safetensors", trained_on=sdxl).path
    again = load_file(merge.merge_into_checkpoint(sdxl, [(joined, 1.0)], tmp_path / "m.safetensors").path)
    half = load_file(merge.merge_into_checkpoint(sdxl, [(path, 0.5), (path, 0.5)], tmp_path / "h.safetensors").path)
    assert all(torch.allclose(again[key].float(), half[key].float(), rtol=1e-4, atol=1e-5) for key in half)


@pytest.mark.parametrize(
    "name, kohya",
    [
        ("lycoris_extra_0_ours.lokr_w1", "lora_unet_extra_0_ours.lokr_w1"),
        ("diffusion_model.extra.0.ours.lokr_w1", "lora_unet_extra_0_ours.lokr_w1"),
        ("transformer_blocks.0.ours.lokr_w1", "lora_unet_transformer_blocks_0_ours.lokr_w1"),
    ],
)
def test_layers_that_the_model_lacks_get_the_names_that_kohya_would_give_them(tmp_path, name, kohya):
    """The reader then names them among those it cannot place."""
    tensors = {name: torch.ones(2, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert [*adapters.rename_for_kohya(tmp_path / "x.safetensors", tensors, "flux")] == [kohya]
