"""Merging, extracting and resizing, against exact products and against the model with the LoRA attached."""

import json
import math
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from library.adapter_files import adapters, storage
from library.adapter_files.joining import Ranks
from library.adapter_files.models import ModelFile
from library.config.problems import ConfigError
from library.families.sd15 import random as random_sd15
from library.methods.lora import Unmatched
from library.tools import extract, merge, resize, shell
from tests import flux_files
from tests.tools.conftest import asked, file_of, loaded

FAMILIES = ("sdxl", "flux")


def products(path):
    return {module.kohya: adapter.product() for module, adapter in adapters.read_lora(path).adapters.items()}


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_model_answers_as_the_model_with_the_lora_attached(name, bases, lora_files):
    base, (first, _, expected) = bases[name], lora_files[name]
    steps, out = [], file_of(base).with_name("merged.safetensors")  # its tokenizers are there
    done = merge.merge_into_checkpoint(file_of(base), [(first, 1.0)], out, report=lambda *s: steps.append(s))
    merged = {**base, "flux": done.path} if name == "flux" else done.path
    plain = asked(base, loaded(base)[2])
    for actual, wanted, before in zip(asked(base, loaded(merged)[2]), expected, plain, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
        assert not wanted.any() or not torch.allclose(before, wanted, atol=1e-2)
    assert steps[-1][1] == steps[-1][2] >= 100
    stored = load_file(file_of(base))
    assert load_file(done.path).keys() == stored.keys()
    assert done.left_out == [] or (name == "flux" and all("_te1_" in left for left in done.left_out))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_difference_of_a_merged_model_is_the_product(name, bases, lora_files, tmp_path):
    base, (first, _, _) = file_of(bases[name]), lora_files[name]
    done = merge.merge_into_checkpoint(base, [(first, 0.5)], tmp_path / "m.safetensors")
    new, old = ModelFile(done.path), ModelFile(base)
    for module, adapter in adapters.read_lora(first).adapters.items():
        if old.size(module) is not None:
            actual = extract.weight_difference(new, old, module).flatten(1)
            torch.testing.assert_close(actual, 0.5 * adapter.product(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ending", [".bias", "norm.weight", "time_embed.0.weight", "norm.query_norm.scale"])
def test_what_an_extracted_lora_cannot_hold_is_counted(name, ending, bases, lora_files, tmp_path, capsys):
    base, (first, _, _) = file_of(bases[name]), lora_files[name]
    tuned = merge.merge_into_checkpoint(base, [(first, 1.0)], tmp_path / "m.safetensors", dtype="float").path
    tensors = load(tuned.read_bytes())  # Windows writes over no file that is mapped
    changed = [key for key in tensors if key.endswith(ending)][:2]
    save_file(tensors | {key: tensors[key] + 1 for key in changed}, tuned)
    shell.main(["extract", str(tuned), str(base), f"--out={tmp_path / 'x.safetensors'}", "--conv_rank=4"])
    note = f"leaves as they are in the base: {len(changed)}"
    assert (note in capsys.readouterr().out) is bool(changed)


@pytest.mark.parametrize("name", FAMILIES)
def test_extracting_recovers_what_was_merged(name, bases, lora_files, tmp_path):
    base, (first, _, _) = file_of(bases[name]), lora_files[name]
    tuned = merge.merge_into_checkpoint(base, [(first, 1.0)], tmp_path / "m.safetensors").path
    choices = extract.ExtractOptions(rank=4, conv_rank=4 if name == "sdxl" else None, clamp=1, min_diff=0, iterations=6)
    done = extract.extract_lora(tuned, base, tmp_path / "x.safetensors", choices=choices)
    before, actual = products(first), products(done.path)
    assert actual.keys() == {n for n in before if name == "sdxl" or "_te1_" not in n}
    for module, product in actual.items():
        torch.testing.assert_close(product, before[module], rtol=1e-3, atol=2e-4)
    about = metadata(done.path)
    assert about["ss_network_dim"] == "4" and "x.safetensors" not in about["ss_training_comment"]
    assert about["ss_base_model_version"] == {"sdxl": "sdxl_base_v1-0", "flux": "flux1"}[name]


def test_the_quick_decomposition_is_as_good_as_the_exact_one():
    torch.manual_seed(0)
    change = torch.randn(200, 6) @ torch.randn(6, 150) + 1e-3 * torch.randn(200, 150)
    choices = [extract.ExtractOptions(rank=6, clamp=1, iterations=n) for n in (4, 0)]
    errors = [(change - extract.nearest_adapter(change, choice).product()).norm() for choice in choices]
    assert errors[0] < 1.01 * errors[1]
    assert torch.equal(extract.nearest_adapter(change, choices[0]).up, extract.nearest_adapter(change, choices[0]).up)


def test_clamping_cuts_to_the_quantile():
    torch.manual_seed(0)
    change = torch.randn(30, 20)
    free, clamped = (
        extract.nearest_adapter(change, extract.ExtractOptions(rank=8, clamp=c, iterations=0)) for c in (1, 0.9)
    )
    limit = float(torch.quantile(torch.cat([free.up.flatten(), free.down.flatten()]), 0.9))
    assert float(clamped.up.max()) == pytest.approx(limit, rel=0.05)
    assert float(clamped.down.abs().max()) <= float(clamped.up.max()) + 1e-6


def test_text_encoders_that_hardly_differ_are_left_out(bases, lora_files, tmp_path):
    base, (first, _, _) = bases["sdxl"], lora_files["sdxl"]
    tuned = merge.merge_into_checkpoint(base, [(first, 1e-3)], tmp_path / "m.safetensors").path
    done = extract.extract_lora(tuned, base, tmp_path / "x.safetensors", choices=extract.ExtractOptions(rank=3))
    assert done.left_out == ("clip_g", "clip_l")
    assert not any("_te" in name for name in products(done.path))
    with pytest.raises(ConfigError, match="do not differ"):
        extract.extract_lora(base, base, tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


def test_an_fp8_base_is_summed_in_float32_and_rounded_once(bases, lora_files, tmp_path):
    first = lora_files["flux"][0]
    base = flux_files.write_fp8(bases["flux"]["flux"], tmp_path / "fp8.safetensors", prefix="model.diffusion_model.")
    key = "double_blocks.0.img_attn.qkv.weight"
    stored = load_file(base)["model.diffusion_model." + key]
    change = products(first)["lora_unet_double_blocks_0_img_attn_qkv"]
    for dtype, kind in ((None, torch.float8_e4m3fn), ("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        path = merge.merge_into_checkpoint(base, [(first, 1.0)], tmp_path / f"to-{dtype}.safetensors", dtype=dtype).path
        actual = load_file(path)["model.diffusion_model." + key]
        assert actual.dtype == kind
        assert torch.equal(actual.float(), (stored.float() + change).to(kind).float())


def test_a_diffusers_transformer_becomes_a_single_file(bases, lora_files, tmp_path):
    first = lora_files["flux"][0]
    folder = flux_files.write_diffusers(bases["flux"]["flux"], tmp_path / "d")
    one = merge.merge_into_checkpoint(folder, [(first, 1.0)], tmp_path / "one.safetensors").path
    two = merge.merge_into_checkpoint(bases["flux"]["flux"], [(first, 1.0)], tmp_path / "two.safetensors").path
    one, two = load_file(one), load_file(two)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_become_one_exactly_or_cut(name, lora_files, tmp_path):
    first, second, _ = lora_files[name]
    loras = [(first, 0.7), (second, -0.3)]
    a, b = products(first), products(second)
    exact = products(merge.join_loras(loras, tmp_path / "exact.safetensors").path)
    full = products(merge.join_loras(loras, tmp_path / "full.safetensors", ranks=Ranks(7, 4)).path)
    small = adapters.read_lora(merge.join_loras(loras, tmp_path / "small.safetensors", ranks=Ranks(2)).path)
    for module in a.keys() | b.keys():
        wanted = 0.7 * a[module] - 0.3 * b[module]
        torch.testing.assert_close(exact[module], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(full[module], wanted, rtol=1e-4, atol=1e-5)
    for module, adapter in small.adapters.items():
        u, s, v = torch.linalg.svd(0.7 * a[module.kohya] - 0.3 * b[module.kohya], full_matrices=False)
        torch.testing.assert_close(adapter.product(), u[:, :2] * s[:2] @ v[:2], rtol=1e-3, atol=1e-4)
        assert adapter.rank == 2 and adapter.strength == 1
    assert metadata(tmp_path / "small.safetensors")["ss_network_dim"] == "2"
    assert metadata(tmp_path / "exact.safetensors")["modelspec.merged_from"] == f"{first.name}, {second.name}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_joined_lora_is_what_the_trainer_reads(name, bases, lora_files, tmp_path):
    from library.methods.lora import change_layers, merge_product, networks
    from library.methods.lora_files import file_of as tensors_of

    first, second, _ = lora_files[name]
    joined = merge.join_loras([(first, 1.0), (second, 1.0)], tmp_path / "j.safetensors").path
    answers = []
    for files in ([joined], [first, second]):
        _, family, parts = loaded(bases[name])
        merged = partial(merge_product, multiplier=1.0)
        left = [change_layers(networks(parts), family, tensors_of(path, name), merged) for path in files]
        assert left == [Unmatched()] * len(files)
        answers.append(asked(bases[name], parts)[0])
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def spectrum(path, values):
    """A LoRA whose one module has these singular values, at strength 1/2."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(20, len(values))).Q for _ in range(2))
    name = "lora_unet_input_blocks_4_1_proj_in"
    tensors = {"lora_up.weight": u * torch.tensor(values), "lora_down.weight": v.T, "alpha": torch.tensor(2.0)}
    save_file({f"{name}.{k}": t.contiguous() for k, t in tensors.items()}, path, {"ss_training_comment": "mine"})
    return path


@pytest.mark.parametrize(
    ("method", "parameter", "rank"),
    [
        ("fixed", None, 4),
        # As sd-scripts' tool, one more than these ask for, and no more than there are.
        ("sv_ratio", 3.0, 3),  # 8 / 3 = 2.67: 8 and 4 are above it
        ("sv_ratio", 5.0, 4),
        ("sv_ratio", 1.5, 2),
        ("sv_ratio", 100.0, 4),
        ("sv_cumulative", 0.75, 3),  # 12 / 15 = 0.8
        ("sv_cumulative", 0.9, 4),  # 14 / 15 = 0.93
        ("sv_fro", 0.9, 3),  # sqrt(80 / 85) = 0.97
        ("sv_fro", 0.98, 4),  # sqrt(84 / 85) = 0.994
    ],
)
def test_resizing_keeps_what_the_method_says(method, parameter, rank, tmp_path):
    source = spectrum(tmp_path / "a.safetensors", [8.0, 4.0, 2.0, 1.0])
    choices = resize.ResizeOptions(rank=4, method=method, parameter=parameter)
    done = resize.resize_lora(source, tmp_path / "b.safetensors", choices=choices)
    (adapter,) = adapters.read_lora(done.path).adapters.values()
    assert adapter.rank == rank and adapter.strength == 0.5 and float(adapter.alpha) == rank / 2
    singular_values = torch.tensor([8.0, 4.0, 2.0, 1.0])[:rank] / 2
    torch.testing.assert_close(torch.linalg.svdvals(adapter.product())[:rank], singular_values)
    assert done.kept_share == pytest.approx(float(singular_values.norm()) / (85**0.5 / 2), rel=1e-5)
    about = metadata(done.path)
    assert about["ss_network_dim"] == str(rank)  # "Dynamic" is for modules of several ranks
    assert about["ss_training_comment"] == (
        "mine" if rank == 4 else f"Dynamic resize with {method}: {parameter:g} from 4; mine"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_resizing_to_the_full_rank_changes_nothing(name, lora_files, tmp_path):
    first = lora_files[name][0]
    done = resize.resize_lora(first, tmp_path / "r.safetensors", choices=resize.ResizeOptions(rank=64))
    before, after = products(first), products(done.path)
    for module, product in before.items():
        torch.testing.assert_close(after[module], product, rtol=1e-4, atol=1e-5)
    assert done.kept_share == pytest.approx(1, abs=1e-5) and all(a == b for a, b in done.ranks.values())


def test_a_rank_that_no_module_has_is_no_resize(lora_files, tmp_path, capsys):
    first, out = lora_files["flux"][0], tmp_path / "r.safetensors"
    assert shell.main(["resize", str(first), "--rank", "64", "--out", str(out)]) == 0
    assert "no module has more ranks than requested, so nothing was cut" in capsys.readouterr().out
    about = metadata(out)
    assert (about["ss_network_dim"], about["ss_training_comment"]) == ("3", "hello")


def test_alphas_that_a_type_cannot_hold_stay_exact(tmp_path):
    name = "lora_unet_input_blocks_4_1_proj_in"
    for file, rank in (("a", 131), ("b", 130)):
        down, up = torch.randn(rank, 300).bfloat16(), torch.randn(300, rank).bfloat16()
        save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, tmp_path / f"{file}.safetensors")
    loras = [(tmp_path / "a.safetensors", 1.0), (tmp_path / "b.safetensors", 1.0)]
    stored = load_file(merge.join_loras(loras, tmp_path / "j.safetensors").path)
    assert float(stored[f"{name}.alpha"]) == 261 == stored[f"{name}.lora_down.weight"].shape[0]
    assert stored[f"{name}.lora_up.weight"].dtype == torch.bfloat16
    (adapter,) = adapters.read_lora(tmp_path / "j.safetensors").adapters.values()
    assert adapter.strength == 1 and adapter.to(torch.float16).strength == 1


def test_a_weight_that_is_no_number_is_named(lora_files, tmp_path):
    first = lora_files["flux"][0]
    for weight, said in (
        ("0,5", "'0,5', which is not a number: write .*=0.5"),
        ("nan", "'nan', which is not a number"),
        ("", "not a number"),
    ):
        with pytest.raises(ConfigError, match=said):
            shell.main(["merge", f"{first}={weight}", "--out", str(tmp_path / "o.safetensors")])
    strange = tmp_path / "a=b.safetensors"
    strange.write_bytes(first.read_bytes())
    assert shell.main(["merge", str(strange), "--out", str(tmp_path / "o.safetensors")]) == 0


def test_fp8_is_for_the_matrices_of_layers(bases, lora_files, tmp_path):
    base = bases["sdxl"]
    stored = load_file(base)
    merged = load_file(
        merge.merge_into_checkpoint(base, [(lora_files["sdxl"][0], 1.0)], tmp_path / "m.safetensors", dtype="fp8").path
    )
    in_8_bits = {key for key, tensor in merged.items() if tensor.dtype == torch.float8_e4m3fn}
    assert in_8_bits and all(stored[key].ndim > 1 for key in in_8_bits)
    assert not any(part in key for key in in_8_bits for part in ("first_stage_model", "norm", "embedding", "bias"))
    assert any("attn1.to_q" in key for key in in_8_bits) and any("in_layers.2" in key for key in in_8_bits)
    assert all(torch.equal(merged[key], stored[key]) for key in stored if "first_stage_model" in key)


KINDS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("tuned", "base"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_the_rounding_of_a_type_is_no_difference(tuned, base, bases, lora_files, tmp_path):
    """Both are roundings of the same numbers; then one layer learns something."""
    original = {
        key: tensor + torch.randn_like(tensor) * 1e-3 for key, tensor in load_file(bases["sdxl"]).items() if tensor.ndim
    }
    files = {}
    for name, kind in (("tuned", tuned), ("base", base)):
        files[name] = tmp_path / f"{name}.safetensors"
        save_file({key: tensor.to(kind) for key, tensor in original.items()}, files[name])
    with pytest.raises(ConfigError, match="do not differ"):
        extract.extract_lora(files["tuned"], files["base"], tmp_path / "no.safetensors")
    key = "model.diffusion_model.input_blocks.4.1.proj_in.weight"
    change = torch.outer(*(torch.randn(size) for size in original[key].shape)) * 0.05
    save_file(
        {k: (tensor + change if k == key else tensor).to(tuned) for k, tensor in original.items()},
        tmp_path / "c.safetensors",
    )
    choices = extract.ExtractOptions(rank=1, clamp=1)
    done = extract.extract_lora(tmp_path / "c.safetensors", files["base"], tmp_path / "x.safetensors", choices=choices)
    ((module, product),) = products(done.path).items()
    assert module == "lora_unet_input_blocks_4_1_proj_in" and done.modules == 1
    torch.testing.assert_close(product, change, rtol=0.1, atol=5e-3)


def test_a_training_below_a_step_of_the_base_is_not_rounding():
    torch.manual_seed(0)
    old = (torch.randn(200, 300) * 0.05).bfloat16()
    tuned = old.float() + torch.outer(torch.randn(200), torch.randn(300)) * 1e-6
    assert torch.equal(extract._without_rounding(tuned, old), tuned - old.float())


def test_ranks_of_convolutions_are_apart(lora_files, tmp_path):
    choices = resize.ResizeOptions(rank=2, conv_rank=1)
    done = resize.resize_lora(lora_files["sdxl"][0], tmp_path / "r.safetensors", choices=choices)
    ranks = {adapter.is_large_conv: adapter.rank for adapter in adapters.read_lora(done.path).adapters.values()}
    assert ranks == {True: 1, False: 2}
    assert metadata(done.path)["ss_training_comment"] == "dimension is resized from 3 to 2 (conv: 1); hello"


def test_hashes_are_those_of_the_trainer(lora_files, tmp_path):
    from library.adapter_files.storage import FilePlan

    done = resize.resize_lora(lora_files["sdxl"][0], tmp_path / "r.safetensors", choices=resize.ResizeOptions(rank=2))
    about = metadata(done.path)
    bare = {key: value for key, value in about.items() if not key.startswith("sshs_")}
    layout = FilePlan.of_tensors(load_file(done.path))
    assert about["sshs_model_hash"] == layout.hashes(bare)["sshs_model_hash"]


def test_nothing_is_overwritten_and_nothing_half_written(bases, lora_files, tmp_path):
    first, base = lora_files["sdxl"][0], bases["sdxl"]
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"mine")
    small = resize.ResizeOptions(rank=1)
    for attempt in (
        lambda: merge.merge_into_checkpoint(base, [(first, 1)], there),
        lambda: merge.join_loras([(first, 1)], there),
        lambda: resize.resize_lora(first, there, choices=small),
        lambda: extract.extract_lora(base, base, there),
    ):
        with pytest.raises(ConfigError, match="exists already and is not overwritten"):
            attempt()
    assert there.read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="one of the files to read"):
        resize.resize_lora(first, first, choices=small)
    with pytest.raises(ConfigError, match="cannot hold the numbers"):
        merge.merge_into_checkpoint(base, [(first, 1e8)], tmp_path / "big.safetensors", dtype="fp16")
    assert [p.name for p in tmp_path.iterdir()] == ["there.safetensors"]


def test_mistakes_are_one_sentence(bases, lora_files, tmp_path):
    sdxl, flux, out = lora_files["sdxl"][0], lora_files["flux"][0], tmp_path / "o.safetensors"
    pickled = tmp_path / "a.ckpt"
    torch.save({"a": torch.ones(1)}, pickled)
    small = load_file(sdxl)
    small = {k: t[:, :8] if k.endswith("_proj_in.lora_down.weight") else t for k, t in small.items()}
    save_file({k: t.contiguous() for k, t in small.items()}, tmp_path / "small.safetensors")
    nothing = {key: t * math.nan if key.endswith("up.weight") else t for key, t in load_file(flux).items()}
    save_file(nothing, nan := tmp_path / "nan.safetensors")
    cases = [
        (
            lambda: merge.join_loras([(flux, 1), (nan, 1)], out, ranks=Ranks(1)),
            "holds NaN or infinity: the file is damaged",
        ),
        (
            lambda: resize.resize_lora(nan, out, choices=resize.ResizeOptions(rank=1)),
            "holds NaN or infinity: the file is",
        ),
        (lambda: merge.merge_into_checkpoint(bases["sdxl"], [(flux, 1)], out), "LoRA of FLUX.1"),
        (lambda: merge.merge_into_checkpoint(flux, [(flux, 1)], out), "is a LoRA file"),
        (lambda: merge.merge_into_checkpoint(pickled, [(sdxl, 1)], out), "may hold code"),
        (lambda: merge.merge_into_checkpoint(bases["sdxl"], [(pickled, 1)], out), "may hold code"),
        (
            lambda: merge.merge_into_checkpoint(bases["sdxl"], [(tmp_path / "small.safetensors", 1)], out),
            "is for a layer of",
        ),
        (lambda: merge.merge_into_checkpoint(bases["sdxl"], [], out), "name at least one"),
        (lambda: merge.merge_into_checkpoint(bases["sdxl"], [(sdxl, 1)], out, dtype="fp4"), "use one of"),
        (lambda: merge.merge_into_checkpoint(bases["sdxl"], [(sdxl, 1)], tmp_path / "o.ckpt"), "ends so"),
        (lambda: merge.join_loras([(sdxl, 1), (flux, 1)], out), "another family"),
        (lambda: Ranks(0), "at least 1"),
        (lambda: resize.ResizeOptions(rank=0), "at least 1"),
        (lambda: resize.ResizeOptions(rank=1, method="sv_ratio"), "parameter is missing: sv_ratio needs it"),
        (lambda: resize.ResizeOptions(rank=1, method="sv_fro", parameter=2), "share to keep"),
        (lambda: resize.ResizeOptions(rank=1, method="best"), "use one of"),
        (lambda: extract.ExtractOptions(clamp=0), "quantile"),
    ]
    for attempt, match in cases:
        with pytest.raises(ConfigError, match=match) as wrong:
            attempt()
        assert "\n" not in str(wrong.value)
    assert not out.exists()


@pytest.mark.parametrize("told", ["by its metadata", "by its second text encoder"])
def test_a_lora_of_sdxl_is_not_merged_into_sd15_whatever_its_sizes(lora_files, tmp_path, told):
    """Their layers have the same names, and those of small models no sizes that tell them apart."""
    lora = tmp_path / "xl.safetensors"
    tensors = load_file(lora_files["sdxl"][0])
    if told == "by its metadata":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("lora_unet_")}
    version = {"ss_base_model_version": "sdxl_base_v1-0"} if told == "by its metadata" else {}
    save_file(tensors, lora, version)
    base = random_sd15.write_random_model(tmp_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"xl.safetensors is a LoRA of SDXL, and .* is of another family"):
        merge.merge_into_checkpoint(base, [(lora, 1)], tmp_path / "out.safetensors")


def test_a_merged_file_says_what_it_is_made_of(bases, lora_files, tmp_path):
    base, first = bases["sdxl"], lora_files["sdxl"][0]
    done = merge.merge_into_checkpoint(base, [(first, 0.5)], tmp_path / "mix.safetensors", dtype="fp16")
    about = storage.metadata_of(done.path)
    assert about["modelspec.title"] == "mix"
    assert about["modelspec.merged_from"] == f"{base.name}, {first.name} x 0.5"
    assert {t.dtype for t in load_file(done.path).values()} == {torch.float16}
    assert json.dumps(about)


def test_a_lora_without_numbers_is_named_before_it_is_cut(lora_files, tmp_path):
    source = lora_files["sdxl"][0]
    tensors = load_file(source)
    name = next(name for name in tensors if name.endswith("lora_down.weight"))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, bad := tmp_path / "nan.safetensors")
    said = f"{name.partition('.')[0]} holds NaN or infinity"
    with pytest.raises(ConfigError, match=said):
        resize.resize_lora(bad, tmp_path / "small.safetensors", choices=resize.ResizeOptions(rank=2))
    with pytest.raises(ConfigError, match=said):
        merge.join_loras([(bad, 1.0), (source, 1.0)], tmp_path / "both.safetensors", ranks=Ranks(2))
