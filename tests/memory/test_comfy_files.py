"""Models in 8 bits with scales, as ComfyUI's files have them: read as they are, and trained on as they are."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.check import meta_model
from library.families.stored_weights import restore_layer
from library.memory.compile_targets import blocks_by_class
from library.memory.quantization import fp8_matmul, fp8_storage, int8_matmul
from tests import training

CPU = torch.device("cpu")
FLUX = "flux_train_network"
GROUP = 16
KEPT = {"int8": {"int8_base": True}, "fp8": {"fp8_base_unet": True}}


def rotation():
    """Of comfy-kitchen's ConvRot: Kronecker powers of the regular Hadamard matrix of four."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    return functools.reduce(torch.kron, [four] * 2) / GROUP**0.5


def rotated(weight):
    return (weight.view(len(weight), -1, GROUP) @ rotation().T).view(weight.shape)


def is_scaled(name, tensor):
    in_blocks = any(part in name for part in ("blocks.", "layers.", "refiner."))
    return tensor.ndim == 2 and name.endswith(".weight") and in_blocks and not name.startswith("conditioner.")


def write_scaled(source, path, kind):
    """Write a model whose matrices are in 8 bits: by matrix, by row, and in int8 rotated. Returns its numbers."""
    stored, numbers, ways = {}, {}, itertools.cycle(("tensor", "rows", "rotated" if kind == "int8" else "tensor"))
    for name, tensor in load_file(source).items():
        stored[name] = tensor
        if not is_scaled(name, tensor):
            continue
        way, layer = next(ways), name.removesuffix(".weight")
        way = "rows" if way == "rotated" and tensor.shape[1] % GROUP else way
        weight = rotated(tensor.float()) if way == "rotated" else tensor.float()
        largest = 127 if kind == "int8" else 448
        scale = (weight.abs().max() if way == "tensor" else weight.abs().amax(1, keepdim=True)) / largest
        small = (weight / scale).round().to(torch.int8) if kind == "int8" else (weight / scale).to(torch.float8_e4m3fn)
        about = {"format": "int8_tensorwise"} if kind == "int8" else {"format": "float8_e4m3fn"}
        about |= {"convrot": True, "convrot_groupsize": GROUP} if way == "rotated" else {}
        stored |= {name: small, f"{layer}.weight_scale": scale}
        stored[f"{layer}.comfy_quant"] = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)
        numbers[name] = rotated(small.float() * scale) if way == "rotated" else small.float() * scale
    save_file(stored, path)
    return stored, numbers


def formats_into_header(stored, path, cut=""):
    """Write a file whose formats are in the metadata of its header alone, as other converters write them."""
    marks = {name: bytes(stored[name].tolist()) for name in stored if name.endswith(".comfy_quant")}
    layers = {name.removesuffix(".comfy_quant").removeprefix(cut): json.loads(mark) for name, mark in marks.items()}
    rest = {name: tensor for name, tensor in stored.items() if name not in marks}
    save_file(rest, path, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})})


@pytest.fixture
def beside(demo):
    """A function: the file of a script's model, and a name for another beside it, where its tokenizers are found."""
    made = []

    def place(script, name="scaled"):
        source = Path(training.config_of(demo, script).model.pretrained_model_name_or_path)
        made.append(source.with_name(f"{name}.safetensors"))
        return source, made[-1]

    yield place
    for path in made:
        path.unlink(missing_ok=True)


def opened(demo, script, path, **options):
    """The denoiser of a file, in the layers' own names."""
    config = training.config_of(demo, script, pretrained_model_name_or_path=path, mixed_precision="bf16", **options)
    family = families.family_for(config)
    assert list(family.problems()) == []
    return config, family, family.load(torch.float32).denoiser


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_formats_in_the_header_count_as_marks_beside_the_weights(demo, beside, prefix):
    """Rotated matrices would be read as if they were not."""
    (source, path), (_, plain) = beside(FLUX), beside(FLUX, "plain")
    stored, numbers = write_scaled(source, path, "int8")
    save_file({name: tensor for name, tensor in load_file(source).items()} | numbers, plain)
    formats_into_header({prefix + name: tensor for name, tensor in stored.items()}, path, prefix)
    whole = opened(demo, FLUX, plain)[2].state_dict()
    for name, tensor in opened(demo, FLUX, path)[2].state_dict().items():
        torch.testing.assert_close(tensor, whole[name], msg=name)


def test_a_model_in_several_files_is_looked_at_in_each(demo, beside, tmp_path):
    source, _ = beside(FLUX)
    stored, _ = write_scaled(source, tmp_path / "whole.safetensors", "int8")
    (tmp_path / "whole.safetensors").unlink()
    names = sorted(stored)
    half = names[len(names) // 2].removesuffix(".weight_scale").removesuffix(".comfy_quant")
    for damage, count in ((1.0, 0), (float("nan"), 1)):
        for number in (1, 2):
            part = {name: tensor for name, tensor in stored.items() if (name < half) == (number == 1)}
            last = max(name for name in part if name.endswith(".weight_scale"))
            part[last] = part[last] * (damage if number == 2 else 1.0)
            save_file(part, tmp_path / f"model-0000{number}-of-00002.safetensors")
        path = tmp_path / "model-00001-of-00002.safetensors"
        config = training.config_of(demo, FLUX, pretrained_model_name_or_path=path)
        problems = [str(problem) for problem in families.family_for(config).problems()]
        found = [problem for problem in problems if "tokenizer" not in problem]
        assert len(found) == count and all("is NaN or infinite" in problem for problem in found), found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"layers": {"%s": {"format": "asym_w4a8_int8"}}}', "stored as asym_w4a8_int8"),
        ('{"layers": {"%s": {"convrot": true, "convrot_groupsize": 8}}}', "which is impossible"),
        ('{"layers": {"%s": 1}}', "a damaged _quantization_metadata"),
        ('{"layers": [1]}', "a damaged _quantization_metadata"),
        ("[]", "a damaged _quantization_metadata"),
        ("{broken", "a damaged _quantization_metadata"),
    ],
)
def test_a_header_with_other_formats_gets_one_sentence(demo, beside, text, words):
    source, path = beside(FLUX)
    stored, _ = write_scaled(source, path, "int8")
    layer = next(name for name in stored if name.endswith(".comfy_quant")).removesuffix(".comfy_quant")
    save_file(stored, path, {"_quantization_metadata": text.replace("%s", layer)})
    config = training.config_of(demo, FLUX, pretrained_model_name_or_path=path)
    (problem,) = families.family_for(config).problems()
    assert words in str(problem)


@pytest.mark.parametrize("script", training.LORAS)
@pytest.mark.parametrize("kind", KEPT)
def test_every_family_reads_them_and_keeps_their_bits(demo, beside, script, kind):
    (source, path), (_, plain) = beside(script), beside(script, "plain")
    stored, numbers = write_scaled(source, path, kind)
    save_file({name: tensor for name, tensor in load_file(source).items()} | numbers, plain)
    _, _, wanted = opened(demo, script, plain)
    _, _, read = opened(demo, script, path)
    whole = wanted.state_dict()
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, whole[name], msg=name)
    config, family, kept = opened(demo, script, path, **KEPT[kind])
    blocks = blocks_by_class(kept, family.block_classes)
    fp8_storage.store_blocks(blocks, config, CPU)
    bits = b"".join(stored[name].view(torch.uint8).numpy().tobytes() for name in numbers)
    layers = {name: layer for name, layer in kept.named_modules() if "weight_scale" in layer._buffers}
    matrices = {name: layer for name, layer in layers.items() if layer.weight.dim() == 2}
    assert matrices
    x = torch.Generator().manual_seed(0)
    for name, layer in matrices.items():
        assert layer.weight.view(torch.uint8).numpy().tobytes() in bits, name  # rows of a fused matrix, too
        rows = torch.randn(2, 3, layer.in_features, generator=x)
        exact = torch.nn.functional.linear(rows, whole[f"{name}.weight"].float(), layer.bias)
        assert (layer(rows) - exact).norm() <= 1e-3 * exact.norm(), name
        restore_layer(layer, torch.float32)  # nothing waits any more
        assert layer.weight.itemsize == 1


@pytest.mark.parametrize("kind", KEPT)
def test_products_in_their_own_format_give_nearly_the_same(demo, squares, beside, tmp_path, monkeypatch, kind):
    source, path = beside(FLUX)
    write_scaled(source, path, kind)
    options = {"train_data_dir": squares, "max_train_steps": 2, "mixed_precision": "bf16"}
    options |= {"pretrained_model_name_or_path": path}

    def losses(name, **more):
        config = training.config_of(demo, FLUX, **options, **more, output_dir=tmp_path / name)
        return training.train(config).losses

    wide = losses("wide")
    assert losses("kept", **KEPT[kind]) == pytest.approx(wide, rel=0.01)
    monkeypatch.setattr(int8_matmul, "supports_int8", lambda device: True)
    monkeypatch.setattr(fp8_matmul, "supports_fp8", lambda device: True)
    compiled = {"compile": True, "compile_backend": "aot_eager", "compile_fullgraph": True, "blocks_to_swap": 2}
    compiled |= {"compile_blocks": training.FEW[FLUX], "network_args": training.ONE_ADAPTER}
    multiplied = losses("products", **KEPT[kind], **{f"{kind}_compute": True}, **compiled)
    assert multiplied == pytest.approx(wide, rel=0.03)
    assert losses("four", base_bits=4) == pytest.approx(wide, rel=0.05)


def as_format(**format):
    return torch.tensor([*json.dumps(format).encode()], dtype=torch.uint8)


SIDEWAYS = "one of each column"
# kind -> changes of a layer's tensors, by the end of their names -> words of the sentence
UNREADABLE = {
    "int8": (
        ({"weight_scale": None}, "in int8 without their scales"),
        ({"weight_scale": torch.ones(3)}, "do not fit its"),
        ({"weight_scale": torch.ones(7, 5)}, "do not fit its"),
        ({"weight_scale": torch.zeros(0)}, "do not fit its"),
        ({"weight_scale": SIDEWAYS}, "do not fit its"),
        ({"weight_scale": torch.tensor(float("nan"))}, "is NaN or infinite"),
        ({"weight_scale": torch.tensor(0.0)}, "is 0, and its weight is not"),
        ({"weight_scale": torch.tensor(-0.0, dtype=torch.float16)}, "is 0, and its weight is not"),
        ({"weight_scale": torch.ones((), dtype=torch.float64)}, "scales are in F64"),
        ({"comfy_quant": as_format(format="int8_blockwise")}, "int8_blockwise"),
        ({"comfy_quant": as_format(format="asym_w4a8_int8"), "weight_scale": None}, "asym_w4a8_int8"),
        ({"comfy_quant": as_format(format="float8_e4m3fn")}, "stored in int8 and marked as float8_e4m3fn"),
        ({"comfy_quant": as_format(format=None)}, "a damaged comfy_quant"),
        ({"comfy_quant": torch.tensor([*b"{broken"], dtype=torch.uint8)}, "a damaged comfy_quant"),
        ({"comfy_quant": as_format(convrot=True, convrot_groupsize="64")}, "which is impossible"),
        ({"comfy_quant": as_format(convrot=True, convrot_groupsize=8)}, "which is impossible"),
    ),
    "fp8": (
        ({"weight_scale": None}, "in fp8 without their scales"),
        ({"weight_scale": None, "comfy_quant": None, "input_scale": torch.ones(())}, "in fp8 without their scales"),
        ({"weight_scale": torch.ones(3)}, "do not fit its"),
        ({"weight_scale": torch.tensor(float("inf"), dtype=torch.bfloat16)}, "is NaN or infinite"),
        ({"weight_scale": SIDEWAYS}, "do not fit its"),
        ({"weight_scale": torch.tensor(float("nan"), dtype=torch.float16)}, "is NaN or infinite"),
        ({"weight_scale": torch.tensor(0.0)}, "is 0, and its weight is not"),
        ({"weight_scale": torch.ones((), dtype=torch.float64)}, "scales are in F64"),
        ({"weight_scale": torch.ones(4, 2).to(torch.float8_e8m0fnu)}, "stored as mxfp8"),
        ({"weight_scale": torch.ones(4, 2, dtype=torch.uint8)}, "stored as mxfp8"),
        ({"comfy_quant": as_format(format="int8_tensorwise")}, "stored in fp8 and marked as int8_tensorwise"),
        ({"comfy_quant": as_format(format="float8_e4m3fn_blockwise")}, "stored as float8_e4m3fn_blockwise"),
    ),
}


def test_a_file_that_says_it_is_scaled_needs_scales(demo, beside):
    source, path = beside(FLUX)
    stored, _ = write_scaled(source, path, "fp8")
    left = {name: tensor for name, tensor in stored.items() if not name.endswith((".weight_scale", ".comfy_quant"))}
    config = training.config_of(demo, FLUX, pretrained_model_name_or_path=path)
    for marks, count in (({}, 0), ({"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, 1)):
        save_file(left | marks, path)
        problems = [str(problem) for problem in families.family_for(config).problems()]
        assert len(problems) == count and all("in fp8 without their scales" in problem for problem in problems)


ROUNDED_TWICE = {
    "int8": {
        "fp8_base": ({"fp8_base": True}, {"fp8_base": False, "int8_base": True}),
        "fp8_base_unet": (
            {"fp8_base_unet": True, "fp8_compute": True},
            {"fp8_base_unet": False, "int8_base": True, "fp8_compute": False, "int8_compute": True},
        ),
        "base_bits": ({"base_bits": 4}, {}),
        "": ({"int8_base": True}, {}),
    },
    "fp8": {
        "int8_base": ({"int8_base": True}, {"int8_base": False, "fp8_base": True}),
        "base_bits": ({"base_bits": 4}, {}),
        "": ({"fp8_base_unet": True}, {}),
    },
}


@pytest.mark.parametrize("kind", ROUNDED_TWICE)
def test_the_check_says_where_numbers_in_8_bits_are_rounded_again(demo, beside, kind):
    source, path = beside(FLUX)
    write_scaled(source, path, kind)
    for option, (options, fix) in ROUNDED_TWICE[kind].items():
        values = {"pretrained_model_name_or_path": path, "mixed_precision": "bf16", **options}
        remarks = [*meta_model.find_second_rounding(training.config_of(demo, FLUX, **values))]
        for remark in remarks:  # pressing the fix leaves nothing to say
            mended = values | (remark.fix or {"base_bits": None})
            assert not [*meta_model.find_second_rounding(training.config_of(demo, FLUX, **mended))]
        assert [(remark.option, remark.fix or {}) for remark in remarks] == [(option, fix)] * bool(option)
    config = training.config_of(demo, "flux_train", pretrained_model_name_or_path=path)
    (remark,) = meta_model.find_second_rounding(config)
    assert f"in {kind}, which are already rounded" in str(remark)
    assert not [*meta_model.find_second_rounding(training.config_of(demo, "flux_train"))]


def test_only_the_image_model_counts_as_rounded(tmp_path):
    """Not a text encoder in 8 bits in the same file, or in a folder of diffusers."""
    wide, small = torch.ones(4, 4).bfloat16(), torch.ones(4, 4).to(torch.float8_e4m3fn)
    for name in ("transformer", "text_encoder"):
        (tmp_path / "model" / name).mkdir(parents=True)
        save_file({"a.weight": small if name == "text_encoder" else wide}, tmp_path / "model" / name / "a.safetensors")
    save_file({"text_encoders.a.weight": small, "blocks.0.weight": wide}, tmp_path / "one.safetensors")
    assert [meta_model._eight_bits_of(tmp_path / name) for name in ("model", "one.safetensors")] == ["", ""]
    save_file({"a.weight": small}, tmp_path / "model" / "transformer" / "a.safetensors")
    save_file({"text_encoders.a.weight": wide, "blocks.0.weight": small}, tmp_path / "one.safetensors")
    assert [meta_model._eight_bits_of(tmp_path / name) for name in ("model", "one.safetensors")] == ["fp8", "fp8"]


@pytest.mark.parametrize("kind", KEPT)
def test_a_scale_of_0_is_right_where_the_weight_is_0(demo, beside, kind):
    source, path = beside(FLUX)
    stored, _ = write_scaled(source, path, kind)
    layer = next(name for name in stored if name.endswith(".weight_scale")).removesuffix(".weight_scale")
    weight = stored[f"{layer}.weight"].view(torch.int8).clone()
    scales = torch.ones(len(weight), 1)
    weight[:2], scales[:2] = 0, 0.0
    problems = []
    for count in (2, 3):  # the third row has numbers
        scales[:count] = 0.0
        weight[2] = 1
        changed = {f"{layer}.weight": weight.view(stored[f"{layer}.weight"].dtype), f"{layer}.weight_scale": scales}
        save_file(stored | changed, path)
        config = training.config_of(demo, FLUX, pretrained_model_name_or_path=path)
        problems.append([str(problem) for problem in families.family_for(config).problems()])
    assert problems[0] == [] and "is 0, and its weight is not" in problems[1][0]


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("script", training.LORAS)
def test_a_file_with_damaged_scales_or_in_another_format_gets_one_sentence(demo, beside, script, kind):
    source, path = beside(script)
    stored, _ = write_scaled(source, path, kind)
    layer = next(name for name in stored if name.endswith(".weight_scale")).removesuffix(".weight_scale")
    few = script not in training.LORA_OF_EACH_KIND
    for changes, words in UNREADABLE[kind][: 2 if few else None]:
        if changes.get("weight_scale") is SIDEWAYS:  # of a square matrix they are as many as its rows
            changes = {"weight_scale": torch.ones(1, len(stored[f"{layer}.weight"]))}
        changed = stored | {f"{layer}.{ending}": tensor for ending, tensor in changes.items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)
        config = training.config_of(demo, script, pretrained_model_name_or_path=path)
        (problem,) = families.family_for(config).problems()
        of_file = "comfy_quant" in changes or words in ("scales are in F64", "stored as mxfp8")
        assert words in str(problem) and (of_file or layer in str(problem))


INTEGERS = {"a.weight": torch.ones(4, 4, dtype=torch.uint8)}
NO_SCALE = {"a.weight": torch.ones(4, 4, dtype=torch.int8)}
MISFIT = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3)}
COARSE = {"a.weight": torch.ones(4, 4).to(torch.float8_e5m2)}
FOUR_BITS = {"a.weight": torch.ones(8, 1), "a.weight.absmax": torch.ones(1)}


@pytest.mark.parametrize("script", ["sdxl_train_network", "train_network"])
@pytest.mark.parametrize(
    ("part", "weights", "words"),
    [
        ("unet", NO_SCALE, "without their scales"),
        ("unet", INTEGERS, "quantised to integers or 4 bits"),
        ("unet", COARSE, "stored as f8_e5m2, which is too coarse here"),
        ("vae", COARSE, "stored as f8_e5m2, which is too coarse here"),
        ("text_encoder", MISFIT, "do not fit its weight"),
        ("vae", FOUR_BITS, "quantised to integers or 4 bits"),
    ],
)
def test_every_folder_of_a_stable_diffusion_is_looked_at(demo, tmp_path, script, part, weights, words):
    """They would be trained on as plain numbers, or end with a traceback."""
    for name in ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        (tmp_path / name).mkdir()
        file = "model.safetensors" if name.startswith("text") else "diffusion_pytorch_model.safetensors"
        save_file(weights if name == part else {"a.weight": torch.ones(4, 4)}, tmp_path / name / file)
    config = training.config_of(demo, script, pretrained_model_name_or_path=tmp_path)
    (problem,) = (str(problem) for problem in families.family_for(config).problems())
    assert words in problem and str(tmp_path / part) in problem and "--pretrained_model_name_or_path" in problem
    if part == "vae":
        path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
        (problem,) = (
            str(problem) for problem in families.family_for(training.config_of(demo, script, vae=path)).problems()
        )
        assert words in problem and "--vae" in problem


@pytest.mark.parametrize("script", ["sdxl_train_network", "train_network"])
def test_a_stable_diffusion_in_integers_or_bits_of_another_kind_gets_one_sentence(demo, beside, script):
    source, path = beside(script)
    tensors = load_file(source)
    name = next(name for name in tensors if name.endswith("attn1.to_q.weight"))
    config = training.config_of(demo, script, pretrained_model_name_or_path=path)
    kinds = ((torch.uint8, "quantised to integers or 4 bits"), (torch.float8_e5m2, "f8_e5m2, which is too coarse"))
    for dtype, words in kinds:
        for changed, count in ((name, 1), ("notes", 0)):  # what is no weight may be anything
            save_file(tensors | {changed: torch.ones(tensors[name].shape).to(dtype)}, path)
            problems = [str(problem) for problem in families.family_for(config).problems()]
            assert len(problems) == count and all(words in problem for problem in problems)
