"""Files as trainings save them and as `--to comfy` writes them, in the loaders of diffusers' pipelines."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.adapter_files import adapters
from library.families.adapter_kinds import kinds
from library.tools.convert import convert_lora
from tests.source import ROOT
from tests.tools.test_comfyui_names import VARIANTS, family_of, loaded_layers, networks, paths_of, written


def plain_lora(variant, path):
    return written(variant, next(kind.id for kind in kinds(family_of(variant))), (), path)


def text_encoders(variant):
    """Those that diffusers loads a LoRA into."""
    made = networks(variant)[1]()
    return {name: made[name] for name in ("clip_l", "clip_g") if name in made and variant != "chroma"}


def uneven(file, path):
    """The same file with ranks and alphas that differ between its layers, as a resized one has them."""
    tensors, chance = load_file(file), torch.Generator().manual_seed(3)
    for name in [key.removesuffix(".alpha") for key in tensors if key.endswith(".alpha")]:
        down, up = f"{name}.lora_down.weight", f"{name}.lora_up.weight"
        rank, alpha = (int(torch.randint(1, most, (), generator=chance)) for most in (5, 9))
        tensors[down], tensors[up] = tensors[down][:rank].clone(), tensors[up][:, :rank].clone()
        tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, path, adapters.read_lora(file).metadata)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_and_alphas_may_differ_between_layers(variant, tmp_path):
    file = uneven(plain_lora(variant, tmp_path / "a.safetensors"), tmp_path / "u.safetensors")
    there = convert_lora(file, tmp_path / "b.safetensors", to="comfy")
    layers = loaded_layers(variant, str(there), **text_encoders(variant))
    paths = set()
    for module, part in adapters.read_lora(file).adapters.items():
        if module.part == "denoiser":
            own = paths_of(variant, module, is_lokr=False)
        else:
            inside = (module.path, module.path.removeprefix("text_model."))
            own = [name for path in inside if (name := f"{module.part}.{path}") in layers]
        if module.part != "t5xxl":
            deltas = [layers[path].get_delta_weight("default_0") for path in own]
            torch.testing.assert_close(torch.cat(deltas).flatten(1), part.product(), rtol=1e-4, atol=1e-6)
        paths |= {*own}
    assert paths == layers.keys()
    back = load_file(convert_lora(there, tmp_path / "back.safetensors", to="kohya"))
    alphas = {key: tensor.item() for key, tensor in load_file(file).items() if key.endswith(".alpha")}
    assert all(back[key].item() == alpha for key, alpha in alphas.items() if key in back)


# Names of FLUX.1's layers are read at their real sizes only: tests/methods/test_files.py reads these.
@pytest.mark.parametrize("family", [family for family in families.FAMILIES if family != "flux"])
def test_the_page_says_which_files_are_read_as_they_are_saved(family, tmp_path):
    file = plain_lora(family, tmp_path / "a.safetensors")
    layers = loaded_layers(family, str(file), **text_encoders(family))
    lines = (ROOT / "docs" / "use-your-lora.md").read_text(encoding="utf-8").splitlines()
    title = families.facts_of(family).title
    said = {
        cells[3]
        for line in lines
        if (cells := line.strip("| ").split(" | "))[0].split(",")[0] == title and len(cells) == 5
    }
    assert said <= {"loads"} if layers else said == {"no layer"}
