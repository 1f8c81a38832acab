"""Checking files, their metadata, and the commands."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from library import files
from library.adapter_files import adapters
from library.adapter_files.verify import verify_lora
from library.check import adapter_files
from library.cli import main
from library.config.building import build_config
from library.config.problems import ConfigError, Message
from library.families.sdxl.options import SdxlLora
from library.tools import metadata
from library.tools.convert import convert_lora
from library.tools.merge import join_loras
from tests import source
from tests.tools.conftest import file_of

FAMILIES = ("sdxl", "flux")
NAME = "lora_unet_input_blocks_4_1_proj_in"


def changed(file, path, **tensors):
    """A copy of a LoRA with some tensors replaced (None: taken out), by the first key that ends so."""
    stored = load_file(file)
    for ending, tensor in tensors.items():
        key = next(key for key in stored if key.endswith(ending.replace("__", ".")))
        stored.pop(key)
        if tensor is not None:
            stored[key] = tensor(key) if callable(tensor) else tensor
    save_file(stored, path)
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_good_file_is_in_order(name, bases, lora_files):
    findings = verify_lora(lora_files[name][0], file_of(bases[name]))
    assert findings.ok and (findings.family, findings.style) == (name, "kohya")
    stored = load_file(lora_files[name][0])
    assert len(findings.modules) == sum(key.endswith(".alpha") for key in stored)
    row = findings.modules[0]
    up, down = (stored[f"{row.module}.lora_{side}.weight"].flatten(1) for side in ("up", "down"))
    wanted = float((up @ down).norm()) * row.alpha / row.rank
    assert row.norm == pytest.approx(wanted, rel=1e-4) and not row.dead
    about_text = any("clip_l could not be compared" in str(text) for text in findings.warnings)
    assert about_text == (name == "flux")


def test_each_mistake_is_found(bases, lora_files, tmp_path):
    file, base = lora_files["sdxl"][0], bases["sdxl"]
    cases = [
        ({f"{NAME}__lora_up__weight": torch.full((64, 3), float("nan"))}, "NaN or infinity"),
        ({f"{NAME}__lora_up__weight": None}, "has no up matrix"),
        ({f"{NAME}__lora_up__weight": torch.ones(64, 5)}, "which do not fit together"),
        ({f"{NAME}__lora_up__weight": torch.ones(48, 3)}, "has layers of other shapes for 1 module"),
        ({f"{NAME}__alpha": torch.tensor(0.0)}, "has alpha 0"),
        ({f"{NAME}__alpha": torch.ones(2)}, "an alpha of 2 numbers instead of one"),
    ]
    for i, (tensors, match) in enumerate(cases):
        findings = verify_lora(changed(file, tmp_path / f"{i}.safetensors", **tensors), base)
        assert not findings.ok and len(findings.problems) == 1 and match in str(findings.problems[0]), findings.problems
    dead = verify_lora(changed(file, tmp_path / "dead.safetensors", **{f"{NAME}__lora_up__weight": torch.zeros(64, 3)}))
    assert dead.ok and "changed by 1 module: " in str(dead.warnings[0]) and sum(row.dead for row in dead.modules) == 1


def test_files_that_are_something_else(bases, lora_files, tmp_path):
    file, base = lora_files["sdxl"][0], bases["sdxl"]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-100])
    pickled = tmp_path / "a.pt"
    torch.save({}, pickled)
    zero = {key: torch.zeros_like(t) if "lora_up" in key else t for key, t in load_file(file).items()}
    save_file(zero, tmp_path / "zero.safetensors")
    extra = {**load_file(file), f"{NAME}.dora_scale": torch.ones(1)}
    loha = tmp_path / "loha.safetensors"
    save_file({f"{NAME}.hada_w1_a": torch.ones(4, 2), f"{NAME}.alpha": torch.tensor(1.0)}, loha)
    save_file(extra, tmp_path / "extra.safetensors")
    names = {key.replace("input_blocks_4_1", "input_blocks_4_7"): t for key, t in load_file(file).items()}
    save_file(names, tmp_path / "names.safetensors")
    for name, header in (
        ("list", b"[1, 2]"),
        ("text", b'{"a": "b"}'),
        ("off", b'{"a": {"dtype": "F32", "shape": [9]}}'),
    ):
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    overlap = b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}'
    (tmp_path / "overlap.safetensors").write_bytes(struct.pack("<Q", len(overlap)) + overlap + b"1234")
    cases = [
        *((tmp_path / f"{name}.safetensors", None, "safetensors file") for name in ("list", "text", "off", "overlap")),
        (cut, None, "was cut short"),
        (pickled, None, "may hold code"),
        (tmp_path / "none.safetensors", None, "no such file"),
        (tmp_path / "zero.safetensors", None, "every module is dead"),
        (tmp_path / "extra.safetensors", None, "tensors that do not fit together (DoRA)"),
        (loha, None, "of LoHa, lacks hada_w1_b, hada_w2_a, hada_w2_b"),
        (tmp_path / "names.safetensors", base, "has no layer for"),
        (lora_files["flux"][0], base, "is a model of SDXL"),
        (base, None, "no LoRA in this file"),
    ]
    for path, model, match in cases:
        findings = verify_lora(path, model)
        assert not findings.ok and any(match in str(text) for text in findings.problems), (path, findings.problems)
        assert all(isinstance(text, Message) for text in findings.problems)
    assert any("is a LoRA file" in str(text) for text in verify_lora(file, file).problems)


def made(path, layers, metadata=None, end="lora_{side}.weight"):
    """A LoRA for layers of these (outputs, inputs) by name."""
    stored = {}
    for name, (outputs, inputs) in layers.items():
        stored[f"{name}.{end.format(side='down' if 'down' in end or '{side}' in end else 'A')}"] = torch.ones(2, inputs)
        stored[f"{name}.{end.format(side='up')}"] = torch.ones(outputs, 2)
    save_file(stored, path, metadata or {})
    return path


@pytest.mark.parametrize(
    ("title", "layers", "about"),
    [
        ("Stable Diffusion 2", {"lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn2_to_v": (640, 1024)}, ""),
        ("Wan", {"lora_unet_blocks_0_self_attn_q": (1536, 1536), "lora_unet_blocks_0_ffn_0": (8960, 1536)}, ""),
        ("Wan", {"diffusion_model.blocks.0.cross_attn.k": (1536, 1536)}, "wan2.1"),
        ("HunyuanVideo", {"lora_unet_double_blocks_0_img_mlp_fc1": (12288, 3072)}, ""),
        ("HunyuanVideo", {"lora_unet_double_blocks_0_img_attn_qkv": (9216, 3072)}, "hunyuan_video"),
        ("Lumina Image 2", {"lora_unet_layers_0_attention_qkv": (3840, 2304)}, ""),
        ("Ideogram 4", {"lora_unet_layers_0_attention_to_q": (3840, 3840)}, "ideogram4"),
    ],
)
def test_models_that_are_not_trained_here_are_named(title, layers, about, tmp_path):
    findings = verify_lora(
        made(tmp_path / "a.safetensors", layers, {"ss_base_model_version": about} if about else None)
    )
    assert [str(one) for one in findings.problems] and f"a LoRA for {title}, which is not trained" in str(
        findings.problems[0]
    )
    with pytest.raises(ConfigError, match=title):
        adapters.read_lora(tmp_path / "a.safetensors")
    values = {"network_weights": str(tmp_path / "a.safetensors")}
    (problem,) = adapter_files.find_adapter_problems(build_config(SdxlLora, values, notes=[]))
    assert problem.option == "network_weights" and f"a LoRA for {title}" in str(problem)


@pytest.mark.parametrize("odd", ["_orig_mod.", ".default."])
def test_names_that_other_programs_do_not_look_for_are_a_warning(odd, lora_files, tmp_path):
    stored = load_file(lora_files["flux"][0])
    if odd == "_orig_mod.":
        stored = {key.replace("lora_unet_", "lora_unet__orig_mod_"): tensor for key, tensor in stored.items()}
    else:
        stored = {f"transformer.transformer_blocks.0.attn.to_q.lora_{x}.default.weight": torch.ones(4, 4) for x in "AB"}
    save_file(stored, tmp_path / "odd.safetensors", {"ss_base_model_version": "flux1"})
    findings = verify_lora(tmp_path / "odd.safetensors")
    assert not findings.problems and any("other programs do not look for" in str(text) for text in findings.warnings)
    assert any("kohya tools convert" in str(text) for text in findings.warnings)
    fine = verify_lora(convert_lora(tmp_path / "odd.safetensors", tmp_path / "fine.safetensors", to="kohya"))
    assert not any("other programs" in str(text) for text in fine.warnings)


def test_any_damage_is_answered_in_a_sentence(tmp_path):
    tensors = {f"{NAME}.lora_down.weight": torch.ones(2, 4), f"{NAME}.lora_up.weight": torch.ones(4, 2)}
    whole = tmp_path / "whole.safetensors"
    save_file(tensors, whole, {"kohya_folded_alpha": "[1]", "lora_adapter_metadata": '{"unet.lora_alpha": "x"}'})
    raw, file, chance = whole.read_bytes(), tmp_path / "broken.safetensors", random.Random(0)
    for _ in range(300):
        broken = bytearray(raw[: chance.randrange(len(raw))] if chance.random() < 0.3 else raw)
        for _ in range(chance.randrange(1, 4)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        file.write_bytes(broken)
        verify_lora(file)
        with contextlib.suppress(ConfigError):
            adapters.read_lora(file)


# ---- metadata


def data_hash(path):
    raw = path.read_bytes()
    return hashlib.sha256(raw[8 + struct.unpack("<Q", raw[:8])[0] :]).hexdigest()


def test_metadata_changes_and_tensors_do_not(lora_files, tmp_path):
    file = lora_files["sdxl"][0]
    values = {"modelspec.title": "Zorb ü", "ss_training_comment": "line\none"}
    new = metadata.edit(file, tmp_path / "new.safetensors", values=values)
    assert metadata.read_metadata(new) == values and metadata.read_metadata(file) == {"ss_training_comment": "hello"}
    assert data_hash(new) == data_hash(file)
    with safe_open(new, framework="pt") as opened:
        assert opened.metadata() == values
    first, two = load_file(file), load(new.read_bytes())  # Windows replaces no file that is mapped
    assert first.keys() == two.keys() and all(torch.equal(first[key], two[key]) for key in first)
    metadata.edit(new, in_place=True, remove=["ss_*"])
    assert metadata.read_metadata(new) == {"modelspec.title": "Zorb ü"} and data_hash(new) == data_hash(file)
    metadata.edit(new, in_place=True, remove=["modelspec.title"])
    assert metadata.read_metadata(new) == {} and load_file(new).keys() == first.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]


def test_metadata_mistakes(lora_files, tmp_path):
    file, new = lora_files["sdxl"][0], tmp_path / "new.safetensors"
    before = file.read_bytes()
    for options, match in (
        ({"values": {"ss_a": "1"}}, "name of a new file"),
        ({"out": new, "in_place": True}, "exclude each other"),
        ({"out": file, "values": {"ss_a": "1"}}, "one of the files to read"),
        ({"out": new, "values": {"title": "x"}}, "no key of metadata|not a key"),
        ({"out": new, "remove": ["ss_nothing"]}, "nothing to remove"),
    ):
        with pytest.raises(ConfigError, match=match):
            metadata.edit(file, **options)
    assert file.read_bytes() == before and not new.exists()


# ---- the commands


def run(capsys, *arguments):
    code = main.main(["tools", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


TOOLS = {
    "merge": ("{}",),
    "resize": ("{}", "--rank", 2),
    "convert": ("{}", "--to", "comfy"),
    "verify": ("{}",),
    "metadata": ("{}",),
    "metadata --set": ("{}", "--set", "ss_a=b"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_none_of_several_files_in_a_folder_is_taken_unseen(lora_files, tmp_path, capsys, tool):
    folder, out = tmp_path / "several", tmp_path / "out.safetensors"
    folder.mkdir()
    for name, file in zip("ab", lora_files["sdxl"][:2], strict=True):
        shutil.copy(file, folder / f"{name}.safetensors")
    words = [word.format(folder) if isinstance(word, str) else word for word in TOOLS[tool]]
    target = [] if tool in ("verify", "metadata") else ["--out", out]
    code, said, complaint = run(capsys, tool.split()[0], *words, *target)
    assert code != 0 and "is a folder: choose one of its files" in said + complaint
    assert not out.exists()


def test_the_whole_way_in_a_shell(bases, lora_files, tmp_path, capsys):
    base, (first, second, _) = bases["sdxl"], lora_files["sdxl"]
    tuned, small_file = tmp_path / "tuned.safetensors", tmp_path / "one.safetensors"
    steps = [
        ("merge", f"{first}=0.5", second, "--base", base, "--out", tuned),
        ("extract", tuned, base, "--rank", 8, "--conv_rank", 4, "--clamp", 1, "--out", small_file, "--dtype", "float"),
        (
            "resize",
            small_file,
            "--rank",
            4,
            "--method",
            "sv_fro",
            "--parameter",
            0.9,
            "--out",
            tmp_path / "r.safetensors",
        ),
        ("merge", first, second, "--rank", 2, "--out", tmp_path / "sum.safetensors"),
        ("convert", small_file, "--to", "diffusers", "--out", tmp_path / "d.safetensors"),
        ("metadata", small_file, "--set", "modelspec.title=a=b", "--out", tmp_path / "t.safetensors"),
        ("metadata", small_file, "--remove", "ss_*", "--in_place", "--yes"),
        ("verify", small_file, "--base", base, "--verbose"),
    ]
    for step in steps:
        code, out, err = run(capsys, *step)
        assert code == 0 and out, (step, err)
    assert metadata.read_metadata(tmp_path / "t.safetensors")["modelspec.title"] == "a=b"
    assert f"fits {base}" in out and "of LoRA for SDXL, kohya names, rank" in out


def test_verify_as_json_and_its_exit_code(lora_files, tmp_path, capsys):
    file = lora_files["sdxl"][0]
    code, out, _ = run(capsys, "verify", file, "--json")
    assert code == 0 and json.loads(out)["ok"] and json.loads(out)["modules"][0]["rank"] in (2, 3)
    bad = changed(file, tmp_path / "bad.safetensors", **{f"{NAME}__alpha": torch.tensor(-1.0)})
    code, out, err = run(capsys, "verify", bad)
    assert code == 1 and f"error: {NAME} has alpha -1" in err and "in order" not in out
    code, out, _ = run(capsys, "verify", bad, "--json")
    assert code == 1 and not json.loads(out)["ok"]
    code, out, _ = run(capsys, "metadata", file, "--json")
    assert code == 0 and json.loads(out) == {"ss_training_comment": "hello"}


def test_mistakes_in_a_shell(lora_files, tmp_path, capsys):
    file, out = lora_files["sdxl"][0], tmp_path / "o.safetensors"
    for arguments, match in (
        (("merge", file, "--out", file), "one of the files to read"),
        (("merge", file, "--out", out, "--dtype", "fp8"), "fp8 is for checkpoints"),
        (("merge", file, "--base", file, "--rank", 3, "--out", out), "leave them out"),
        (("metadata", file, "--set", "title", "--out", out), "KEY=VALUE"),
        (("metadata", file, "--set", "ss_a=1", "--in_place"), "add --yes"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 1 and match in err and len(err.splitlines()) == 1, err
    assert run(capsys)[0] == 2
    with pytest.raises(SystemExit) as wrong:
        main.main(["tools", "melt"])
    assert wrong.value.code == 2 and not out.exists()


def test_help_loads_nothing_heavy():
    code = """
import sys
from library.cli import main
for tool in ("merge", "extract", "resize", "convert", "verify", "metadata"):
    try:
        main.main(["tools", tool, "--help"])
    except SystemExit:
        pass
print(sorted({"torch", "gradio", "diffusers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source.ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("key", "kind"), [("clip_l", "an embedding"), ("lllite_unet_x.up.0.weight", "LLLite")])
def test_files_of_other_things_are_named_in_one_sentence(tmp_path, key, kind):
    save_file({key: torch.zeros(2, 3)}, tmp_path / "x.safetensors")
    (said,) = verify_lora(tmp_path / "x.safetensors").problems
    assert f"{kind}, not to LoRA or LyCORIS" in str(said)
    with pytest.raises(ConfigError, match=f"{kind}, not to LoRA or LyCORIS"):
        adapters.read_lora(tmp_path / "x.safetensors")


WRITERS = {
    "merge": lambda file, out: join_loras([(file, 1.0), (file, 0.5)], out),
    "convert": lambda file, out: convert_lora(file, out, to="diffusers"),
    "metadata": lambda file, out: metadata.edit(file, out, values={"ss_training_comment": "x"}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_killed_tool_has_left_is_cleaned_up(lora_files, tmp_path, writer):
    dead, living = (f"{pid}-{files.HOST_MARK}00000000" for pid in (999999999, os.getpid()))
    old = time.time() - 2 * files.DAY
    gone = {f".out.{dead}.tmp.safetensors": None, f".other.{dead}.tmp.safetensors": old}
    kept = {
        f".out.{living}.tmp.safetensors": None,
        f".new.{dead}.tmp.safetensors": None,
        f".out.{dead}.tmp.png": old,
        ".out.tmp.safetensors": old,
    }
    for name, changed_at in (gone | kept).items():
        (tmp_path / name).write_text("x")
        if changed_at:
            os.utime(tmp_path / name, (changed_at, changed_at))
    WRITERS[writer](lora_files["sdxl"][0], tmp_path / "out.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "out.safetensors"}
