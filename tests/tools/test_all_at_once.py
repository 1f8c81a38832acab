"""Each tool names all that is wrong with its files at once, before it computes anything."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.adapter_files.verify import verify_lora
from library.config.problems import ConfigError
from library.tools import extract, merge, resize, shell
from library.tools.convert import convert_lora
from tests.tools.conftest import file_of

RESIZED = resize.ResizeOptions(2)


@pytest.fixture(scope="module")
def files(bases, lora_files, tmp_path_factory):
    """A model that is stored oddly, a file that is no LoRA, a LoRA of another family, and an existing file."""
    folder = tmp_path_factory.mktemp("odd")
    tensors = load_file(file_of(bases["flux"]))
    name = next(name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[name.replace(".weight", ".weight_scale")] = torch.ones((), dtype=torch.float64)
    save_file(tensors, folder / "scaled.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "none.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "there.safetensors")
    paths = {name: folder / f"{name}.safetensors" for name in ("scaled", "none", "there", "new")}
    return paths | {"flux": file_of(bases["flux"]), "good": lora_files["flux"][0], "other": lora_files["sdxl"][0]}


SCALED, NO_LORA, THERE, OTHER = "scaled fp8", "no LoRA in this file", "exists already", "is of another family"
# What is called -> words of each of its problems.
CALLS = {
    "merged into a checkpoint": (
        lambda f: merge.merge_into_checkpoint(f["scaled"], [(f["none"], 1.0)], f["there"], dtype="int3"),
        [SCALED, NO_LORA, THERE, "dtype is 'int3'"],
    ),
    "merged files that do not fit": (
        lambda f: merge.merge_into_checkpoint(f["flux"], [(f["other"], 1.0), (f["other"], 2.0)], f["new"]),
        [OTHER, OTHER],
    ),
    "joined": (
        lambda f: merge.join_loras([(f["none"], 1.0), (f["scaled"], 1.0)], f["there"], trained_on=f["scaled"]),
        [NO_LORA, NO_LORA, THERE, SCALED],
    ),
    "extracted": (
        lambda f: extract.extract_lora(f["scaled"], f["none"], f["there"]),
        [SCALED, "none.safetensors is", THERE],
    ),
    "resized": (lambda f: resize.resize_lora(f["none"], f["there"], choices=RESIZED), [NO_LORA, THERE]),
    "converted": (lambda f: convert_lora(f["none"], f["there"], to="kohya"), [NO_LORA, THERE]),
    "with weights that are no numbers": (
        lambda f: shell.main(["merge", f"{f['good']}=x", f"{f['other']}=y", "--out", str(f["new"])]),
        ["which is not a number", "which is not a number"],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_all_problems_are_named_at_once(files, call):
    run, words = CALLS[call]
    with pytest.raises(ConfigError) as refused:
        run(files)
    said = [str(problem) for problem in refused.value.problems]
    assert len(said) == len(words) and all(any(word in text for text in said) for word in words), said
    assert not files["new"].exists()


def test_a_check_names_the_model_and_the_lora(files):
    said = [str(problem) for problem in verify_lora(files["none"], files["scaled"]).problems]
    assert len(said) == 2 and SCALED in said[0] and "no LoRA" in said[1]
