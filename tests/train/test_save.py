import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as package_bytes

from library.adapter_files.storage import FilePlan
from library.compiler.torch_private import LazyTensor
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.flux.options import FluxLora, FluxTrain
from library.families.sdxl.options import SdxlTrain
from library.outputs import paths
from library.train.saving import state_files
from tests.training import config_of, problems_and_remarks

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text())["names"]


def config(folder, cls=FluxLora, **values):
    return build_config(cls, {"output_dir": str(folder), **values}, notes=[])


def tensors():
    torch.manual_seed(0)
    return {"b.alpha": torch.tensor(1), "b.lora_up.weight": torch.randn(3, 2), "a.lora_up.weight": torch.randn(2)}


def test_names_are_those_of_sd_scripts(tmp_path):
    unnamed, named = paths.output_names(config(tmp_path)), paths.output_names(config(tmp_path, output_name="m"))
    actual = {
        "default_epoch": unnamed.epoch(3),
        "default_step": unnamed.step(1500),
        "default_last": unnamed.last,
        "epoch": named.epoch(3),
        "step": named.step(1500),
        "last": named.last,
        "state_epoch": named.state(epoch=3),
        "state_step": named.state(step=1500),
        "state_last": named.state(),
    }
    assert {key: path.name for key, path in actual.items()} == {k: v for k, v in VECTORS.items() if isinstance(v, str)}
    assert paths.output_names(config(tmp_path, output_name="v1.5")).state(epoch=1).name == "v1.5-000001-state"


def test_what_is_removed_is_what_sd_scripts_removes(tmp_path):
    run_config = config(tmp_path, output_name="m", save_every_n_epochs=1, save_last_n_epochs=2)
    for epoch, old in VECTORS["remove_epoch_when_saving"].items():
        path = paths.outdated_epoch(run_config, int(epoch))
        assert (path and path.name) == (None if old is None else f"m-{old:06d}.safetensors")
    run_config = config(tmp_path, output_name="m", save_every_n_steps=10, save_last_n_steps=30)
    for step, old in VECTORS["remove_step_when_saving"].items():
        path = paths.outdated_step(run_config, int(step))
        assert (path and path.name) == (None if old is None else f"m-step{old:08d}.safetensors")
    assert paths.outdated_step(run_config, 40, state=True) is None
    assert paths.outdated_step(run_config, 50, state=True).name == "m-step00000010-state"
    own = config(tmp_path, output_name="m", save_every_n_epochs=2, save_last_n_epochs=1, save_last_n_epochs_state=3)
    assert paths.outdated_epoch(own, 8, state=True).name == "m-000002-state"
    assert paths.outdated_epoch(config(tmp_path), 5) is None and paths.outdated_step(config(tmp_path), 5) is None


def test_chosen_steps_have_several_notations_and_their_files_stay(tmp_path):
    for steps in ("20,50", "20, 50", "20 50", [20, 50], ("20", "50"), ["20,50"], ["20,", "50"]):
        run_config = config(tmp_path, output_name="m", save_every_n_steps=10, save_last_n_steps=30, save_at_steps=steps)
        assert run_config.save.save_at_steps == (20, 50)
    assert config(tmp_path, save_at_steps="").save.save_at_steps == ()
    assert paths.outdated_step(run_config, 50).name == "m-step00000010.safetensors"
    assert paths.outdated_step(run_config, 60) is None and paths.outdated_step(run_config, 60, state=True) is None
    wrong = {
        "0": "must be at least 1, got 0",
        "-5": "must be at least 1",
        "5,5,7": "names 5 more than once",
        "1,000": "did you mean 1000",
        "5.5": "whole number",
        "a": "whole number",
        "9" * 20: "must be at most",
    }
    for steps, says in wrong.items():
        with pytest.raises(ConfigError, match=says) as refused:
            config(tmp_path, save_at_steps=steps)
        assert refused.value.problems[0].option == "save_at_steps"


def test_steps_beyond_the_end_and_intervals_that_never_begin_are_pointed_out(demo, squares, tmp_path):
    options = {"train_data_dir": squares, "output_dir": tmp_path, "max_train_steps": 4}

    def told(name, **values):
        config = config_of(demo, "flux_train_network", **options | values)
        return [(str(problem), problem.fix) for problem in problems_and_remarks(config)[1] if problem.option == name]

    ((said, fix),) = told("save_at_steps", save_at_steps=[2, 4, 5, 900])
    assert "5 and 900 will not be saved, as the training ends after 4 steps" in said and fix == {
        "save_at_steps": (2, 4)
    }
    assert not told("save_at_steps", save_at_steps=[2, 4])
    ((said, _),) = told("save_from_step", save_from_step=5, save_every_n_steps=1)
    assert "has no effect here: the training ends after 4 steps" in said
    ((said, _),) = told("save_from_step", save_from_step=2)
    assert "nothing is saved every N steps or epochs" in said
    assert not told("save_from_step", save_from_step=2, save_every_n_epochs=1)


def test_a_ratio_decides_how_often(tmp_path):
    assert paths.every_n_epochs(config(tmp_path, save_n_epoch_ratio=3), 10) == 3
    assert paths.every_n_epochs(config(tmp_path, save_n_epoch_ratio=30), 10) == 1
    assert paths.every_n_epochs(config(tmp_path, save_every_n_epochs=4), 10) == 4


def test_removing(tmp_path):
    (tmp_path / "a-state").mkdir()
    (tmp_path / "a-state" / "x").write_text("x")
    (tmp_path / "a.pt").write_text("x")
    for path in (tmp_path / "a-state", tmp_path / "a.pt", tmp_path / "a.pt", None):
        paths.remove_outdated(path)
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_program_holds_stays_and_the_training_goes_on(tmp_path, monkeypatch, caplog):
    """As ComfyUI maps the LoRA that it shows, which Windows does not delete then."""

    def held(path, missing_ok=False):
        raise PermissionError(13, "mapped")

    (tmp_path / "a.pt").write_text("x")
    monkeypatch.setattr(Path, "unlink", held)
    paths.remove_outdated(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").exists() and "a.pt could not be removed: mapped" in caplog.text


def test_tensors_of_other_processes_are_saved_on_systems_that_cannot_reserve_space(tmp_path, monkeypatch):
    """Windows and macOS lack the call, and Windows maps no file for writing here."""
    monkeypatch.delattr(state_files.os, "posix_fallocate")
    whole = torch.arange(6.0).reshape(2, 3)
    lazy = LazyTensor(whole.shape, whole.dtype, whole.clone)
    state_files._save({"state": [{"exp_avg": lazy}], "step": 3}, tmp_path / "optimizer.bin")
    read = state_files.read_values(tmp_path / "optimizer.bin", "cpu")
    assert torch.equal(read["state"][0]["exp_avg"], whole) and read["step"] == 3


def test_bytes_are_those_of_the_safetensors_package():
    kinds = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.float64]
    kinds += [torch.uint8, torch.int8, torch.bool, torch.int16]
    mixed = {f"t{i}": torch.ones(3, 1).to(kind) for i, kind in enumerate(kinds)} | tensors()
    layout = FilePlan.of_tensors(mixed)
    actual = layout.header({"ss_x": "ü"}) + b"".join(layout.data())
    assert actual == package_bytes(mixed, {"ss_x": "ü"})


def test_a_file_holds_what_was_given_with_its_hashes(tmp_path):
    path = paths.model(
        tmp_path / "new" / "m.safetensors", tensors(), config(tmp_path), {"ss_a": "1", "modelspec.b": "c"}
    )
    loaded = load_file(path)
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors().items())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert metadata["sshs_model_hash"] == hashlib.sha256(data).hexdigest()
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(b"").hexdigest()[:8]  # smaller than 1 MiB
    assert (metadata["ss_a"], metadata["modelspec.b"]) == ("1", "c")
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]


def test_the_legacy_hash_is_of_the_second_mebibyte():
    big = {"w": torch.arange(400_000, dtype=torch.float32)}
    layout = FilePlan.of_tensors(big)
    expected = hashlib.sha256(package_bytes(big, {"ss_a": "1"})[0x100000:0x110000]).hexdigest()[:8]
    assert layout.hashes({"ss_a": "1"})["sshs_legacy_hash"] == expected


@pytest.mark.parametrize(
    "precision, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16), ("float", torch.float32)]
)
def test_precision(tmp_path, precision, dtype):
    path = paths.model(tmp_path / "m.safetensors", tensors(), config(tmp_path, save_precision=precision), {})
    assert {t.dtype for t in load_file(path).values()} == {dtype}
    model = {"w": torch.randn(2), "ids": torch.arange(3)}
    whole = config(tmp_path, SdxlTrain, save_precision=precision)
    path = paths.model(tmp_path / "w.safetensors", model, whole, {})
    assert load_file(path)["ids"].dtype == torch.int64 and load_file(path)["w"].dtype == dtype


@pytest.mark.parametrize(
    ("files", "extension"), [(["a.safetensors"], ".safetensors"), (["a.safetensors", "model_index.json"], ""), ([], "")]
)
def test_a_model_from_a_folder_is_saved_like_what_is_in_it(tmp_path, files, extension):
    for name in files:
        (tmp_path / name).touch()
    whole = config(tmp_path, SdxlTrain, pretrained_model_name_or_path=str(tmp_path))
    assert paths.file_extension(whole) == extension


@pytest.mark.parametrize("kind", ["pt", "ckpt"])
def test_pickled_formats(tmp_path, kind):
    chosen = config(tmp_path, save_model_as=kind, output_name="m")
    path = paths.model(paths.output_names(chosen).last, tensors(), chosen, {"ss_a": "1"})
    assert path.suffix == f".{kind}"
    loaded = torch.load(path, weights_only=True)
    assert all(torch.equal(loaded[k], v) for k, v in tensors().items())
    whole = config(tmp_path, SdxlTrain, save_model_as="ckpt")
    loaded = torch.load(paths.model(tmp_path / "w.ckpt", {"w": torch.ones(1)}, whole, {}, (2, 30)), weights_only=True)
    assert (loaded["epoch"], loaded["global_step"]) == (2, 30) and loaded["state_dict"]["w"] == 1


@pytest.mark.parametrize(
    "cls, values, expected",
    [
        (SdxlTrain, {"pretrained_model_name_or_path": "a.safetensors"}, ".safetensors"),
        (SdxlTrain, {"pretrained_model_name_or_path": "a.ckpt"}, ".ckpt"),
        (SdxlTrain, {"pretrained_model_name_or_path": "a.ckpt", "use_safetensors": True}, ".safetensors"),
        (SdxlTrain, {"save_model_as": "ckpt"}, ".ckpt"),
        (SdxlTrain, {"pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0"}, ""),
        (SdxlTrain, {"pretrained_model_name_or_path": "a.safetensors", "save_model_as": "diffusers"}, ""),
        (FluxTrain, {"pretrained_model_name_or_path": "models/FLUX.1-dev"}, ".safetensors"),
        (FluxTrain, {"save_model_as": "ckpt"}, ".safetensors"),
        (FluxLora, {}, ".safetensors"),
    ],
)
def test_the_kind_of_file(tmp_path, cls, values, expected):
    assert paths.file_extension(config(tmp_path, cls, **values)) == expected


def test_numbers_that_are_too_large_for_float16_are_not_lost(tmp_path, caplog):
    tensors = {
        "x.lora_up.weight": torch.tensor([1e6, -1.0]),
        "x.lora_down.weight": torch.tensor([65519.0, 1.0]),
        "x.alpha": torch.tensor(100_000),
        "y.alpha": torch.tensor(1e5),
        "y.lokr_w1": torch.ones(2, 2),
        "y.lokr_w2_a": torch.ones(2, 2),
        "y.lokr_w2_b": torch.ones(2, 2),
    }
    path = paths.model(tmp_path / "m.safetensors", tensors, config(tmp_path, save_precision="fp16"), {})
    stored = load_file(path)
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert wide == {"x.lora_up.weight", "x.alpha", "y.alpha"}
    assert all(torch.isfinite(tensor).all() for tensor in stored.values())
    assert torch.equal(stored["x.lora_up.weight"], tensors["x.lora_up.weight"]) and stored["y.alpha"] == 1e5
    assert "m.safetensors: x.lora_up.weight is stored in float32" in caplog.text


@pytest.mark.parametrize("alpha", [1e5, float("inf")])
def test_the_alpha_of_whole_matrices_may_be_infinite(tmp_path, alpha):
    tensors = {"y.alpha": torch.tensor(alpha), "y.lokr_w1": torch.ones(2, 2), "y.lokr_w2": torch.ones(2, 2)}
    path = paths.model(tmp_path / "m.safetensors", tensors, config(tmp_path, save_precision="fp16"), {})
    assert load_file(path)["y.alpha"].dtype == torch.float16 and load_file(path)["y.alpha"] == float("inf")
    with pytest.raises(ConfigError, match="y.lokr_w2"):
        broken = {**tensors, "y.lokr_w2": torch.full((2, 2), float("inf"))}
        paths.model(path, broken, config(tmp_path, save_precision="fp16"), {})
    with pytest.raises(ConfigError, match="y.alpha"):
        paths.model(path, {"y.alpha": torch.tensor(float("inf"))}, config(tmp_path), {})


def test_nothing_broken_replaces_something_good(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"good")
    bad = {**tensors(), "x.lora_up.weight": torch.tensor([1.0, float("nan")])}
    with pytest.raises(ConfigError, match="x.lora_up.weight"):
        paths.model(path, bad, config(tmp_path), {})
    with pytest.raises(ConfigError, match="disk space"):
        monkeypatch.setattr("library.files.free_space", lambda _: 10)
        paths.model(path, tensors(), config(tmp_path), {})
    monkeypatch.undo()
    with pytest.raises(OSError):
        monkeypatch.setattr(FilePlan, "data", lambda *_: iter([memoryview(b"short")]))
        paths.model(path, tensors(), config(tmp_path, save_model_as="safetensors"), {})
    assert path.read_bytes() == b"good" and [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_whole_model_that_came_with_nan_can_be_saved(tmp_path, caplog):
    odd = {"w": torch.tensor([float("nan")])}
    assert load_file(paths.model(tmp_path / "w.safetensors", odd, config(tmp_path, SdxlTrain), {}))["w"].isnan()
    assert "NaN" in caplog.text


@pytest.mark.parametrize(("precision", "times"), [("float", "ab"), ("bf16", "aab"), ("fp16", "aabb")])
def test_remote_tensor_is_requested_once_and_early_if_it_may_not_fit(tmp_path, precision, times):
    asked = []

    def lazy(name, value):
        return LazyTensor(value.shape, value.dtype, lambda: asked.append(name) or value)

    whole = {"a": torch.randn(3, 4), "b": torch.randn(2, 2, dtype=torch.bfloat16)}
    run_config = config(tmp_path, SdxlTrain, save_precision=precision)
    paths.model(
        tmp_path / "lazy.safetensors", {name: lazy(name, tensor) for name, tensor in whole.items()}, run_config, {}
    )
    paths.model(tmp_path / "whole.safetensors", whole, run_config, {})
    assert "".join(sorted(asked)) == times
    assert (tmp_path / "lazy.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_an_earlier_training_of_the_same_name_is_not_overwritten(tmp_path):
    chosen = config(tmp_path, output_name="m")
    for name in ("m2.safetensors", "m-old.safetensors", "m.txt", "sample"):
        (tmp_path / name).touch()
    assert not list(paths.find_output_problems(chosen))
    for name in ("m.safetensors", "m-000002.safetensors", "m-step00000010-state"):
        (tmp_path / name).touch()
    said = list(paths.find_output_problems(chosen))
    assert [problem.code for problem in said] == [paths.THERE]
    assert (
        len(said) == 1 and "m-000002.safetensors and 2 more" in str(said[0]) and "another output_name" in str(said[0])
    )
    assert not list(paths.find_output_problems(config(tmp_path, output_name="m", resume=str(tmp_path))))
    assert not list(paths.find_output_problems(config(tmp_path / "elsewhere", output_name="m")))


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in str(next(paths.find_output_problems(config(tmp_path / "file" / "below"))))
    with pytest.raises(ConfigError, match="plain name"):
        config(tmp_path, output_name="a/b")
    assert "not set" in str(next(paths.find_output_problems(build_config(FluxLora, {}, notes=[]))))
    assert not (tmp_path / "elsewhere").exists()
