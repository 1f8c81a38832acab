"""`base_weights` of the Hugging Face Hub: announced by the check, downloaded once, and used like a local file."""

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from library import families, methods
from library.config.hub_names import FILE, FOLDER, about_absent, is_file_id
from library.config.problems import ConfigError
from library.downloads import hub_files
from library.train.saving import base_files
from tests.downloads.conftest import hub, small  # noqa: F401
from tests.training import config_of, problems_and_remarks, train

SCRIPT, NAME = "sdxl_train_network", "someone/adapters/split/a.safetensors"


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_files, "default_folder", lambda: tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        (NAME, True),
        ("ostris/zimage_turbo_training_adapter/v2.safetensors", True),
        ("owner/name", False),
        ("name/a.safetensors", False),
        ("owner/name/a.pt", False),
        ("owner/../../a.safetensors", False),
        ("./owner/name/a.safetensors", False),
        ("/owner/name/a.safetensors", False),
        ("owner/name/.hidden.safetensors", False),
        ("https://example.com/owner/name/a.safetensors", False),
        ("owner--x/name/a.safetensors", False),
        ("owner\\name\\a.safetensors", False),
    ],
)
def test_only_a_plain_name_of_a_safetensors_file_is_of_the_hub(name, is_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_file_id(name) is is_id
    if is_id:  # a folder of that name is meant by a path that is misspelt further on
        (tmp_path / name.partition("/")[0]).mkdir()
        assert not is_file_id(name)


def test_a_training_downloads_them_and_is_the_same_as_with_the_file(hub, downloads, shallow, squares, tmp_path):  # noqa: F811
    def config(folder, **values):
        return config_of(
            shallow,
            SCRIPT,
            train_data_dir=squares,
            output_dir=tmp_path / folder,
            output_name="m",
            network_dim=2,
            seed=1,
            max_train_steps=2,
            **values,
        )

    file = train(config("first")).file
    hub.repositories["someone/adapters"] = {"split/a.safetensors": file.read_bytes()}
    named, local = config("named", base_weights=[NAME]), config("local", base_weights=[str(file)])
    problems, remarks = problems_and_remarks(named)
    size = hub_files.size_text(file.stat().st_size)
    assert not problems
    assert f"base_weights: {NAME} is downloaded from Hugging Face before the training, {size}" in map(str, remarks)
    assert not hub.requests, "the check downloads nothing"
    first = load_file(train(named).file)
    assert [path for path, _ in hub.requests] == ["split/a.safetensors"]
    assert (downloads / "adapters" / "a.safetensors").read_bytes() == file.read_bytes()
    second = load_file(train(local).file)
    assert all(bool((first[key] == second[key]).all()) for key in second)
    problems, remarks = problems_and_remarks(config("another", base_weights=[NAME]))
    assert not problems and not any("is downloaded" in str(remark) for remark in remarks)
    asked = len(hub.tokens)
    assert base_files.with_local_files(named).network.base_weights == (str(downloads / "adapters" / "a.safetensors"),)
    assert len(hub.tokens) == asked, "what is here is not asked for"


def test_a_lora_for_samples_comes_from_the_hub_as_well(hub, downloads, shallow, squares, tmp_path):  # noqa: F811
    (tmp_path / "prompts.txt").write_text("a cat --w 64 --h 64 --d 1 --s 1", encoding="utf-8")
    values = {
        "train_data_dir": squares,
        "network_dim": 2,
        "max_train_steps": 1,
        "sample_prompts": tmp_path / "prompts.txt",
    }

    def config(folder, **more):
        return config_of(shallow, SCRIPT, output_dir=tmp_path / folder, sample_every_n_steps=1, **values, **more)

    file = train(config("first")).file
    hub.repositories["someone/adapters"] = {"split/a.safetensors": file.read_bytes()}
    named = config("named", sample_lora=f"{NAME}:0.5")
    problems, remarks = problems_and_remarks(named)
    assert not problems and any("sample_lora" in str(one) and "is downloaded" in str(one) for one in remarks)
    assert not hub.requests, "the check downloads nothing"
    assert len(train(named).events("sample")) == 1
    local = downloads / "adapters" / "a.safetensors"
    assert base_files.with_local_files(named).sample.sample_lora == (f"{local}:0.5",)
    assert base_files.without_remote_files(named).sample.sample_lora == ()
    hub.repositories.clear()
    local.unlink()
    (problem,) = [str(one) for one in problems_and_remarks(named)[0] if one.option == "sample_lora"]
    assert "There is no Hugging Face repository someone/adapters" in problem


def test_failed_download_is_reported_before_the_model_is_loaded(hub, downloads, shallow, squares, monkeypatch):  # noqa: F811
    named = config_of(shallow, SCRIPT, train_data_dir=squares, output_name="m", base_weights=[NAME])

    def said():
        return [str(problem) for problem in problems_and_remarks(named)[0] if problem.option == "base_weights"]

    (problem,) = said()
    assert "There is no Hugging Face repository someone/adapters" in problem
    hub.repositories["someone/adapters"] = {"b.safetensors": small()}
    (problem,) = said()
    assert "has no file split/a.safetensors; it has b.safetensors" in problem
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (problem,) = said()
    assert problem.startswith(f"base_weights: {NAME} is not on this computer. ") and problem.count("go online") == 1


def test_a_file_that_is_no_safetensors_file_is_not_kept(hub, downloads):  # noqa: F811
    hub.repositories["someone/adapters"] = {"split/a.safetensors": b"PK" + bytes(1000)}
    with pytest.raises(ConfigError):
        hub_files.download_hub_file(NAME, lambda *_: None)
    assert not [*downloads.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("takes", "text", "words"),
    [
        (FILE, "https://huggingface.co/a/b/resolve/main/c/d.safetensors?download=true", "write a/b/c/d.safetensors"),
        (FILE, "hf://a/b/d.safetensors", "write a/b/d.safetensors instead"),
        (FILE, "https://huggingface.co/a/b/tree/main", "name one file in it: a/b/<name>.safetensors"),
        (FILE, "a/b", "name one file in it: a/b/<name>.safetensors"),
        (FILE, "https://example.com/d.safetensors", "download it and give the path"),
        (FILE, "d.safetensors", "does not exist"),
        (FOLDER, "https://hf.co/a/b", "write a/b instead, and it is fetched"),
        (FOLDER, "https://huggingface.co/a/b/blob/main/d.safetensors", "kohya models get a/b/d.safetensors"),
        ("", "a/b/d.safetensors", "kohya models get a/b/d.safetensors, and give the path of the file"),
        ("", "https://huggingface.co/datasets/a/b/resolve/main/d.safetensors", "download it and give the path"),
    ],
)
def test_what_is_on_the_web_is_said_with_the_form_to_write(takes, text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = str(about_absent("vae", text, takes))
    assert problem.startswith("vae: ") and words in problem


def test_every_option_that_names_a_file_says_the_form_to_write(shallow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "https://huggingface.co/someone/adapters/blob/main/a.safetensors"
    named = config_of(shallow, SCRIPT, base_weights=[address, "someone/adapters"], network_weights=NAME)
    first, second, third = (str(one) for one in methods.find_method_problems(named))
    assert first.startswith("network_weights: ") and f"kohya models get {NAME}" in first
    assert "base_weights: " in second and "write someone/adapters/a.safetensors instead" in second
    assert "base_weights: " in third and "name one file in it" in third
    named = config_of(shallow, SCRIPT, pretrained_model_name_or_path="https://huggingface.co/someone/model")
    (problem,) = families.family_for(named).problems()
    assert "write someone/model instead" in str(problem)
