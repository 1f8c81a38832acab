"""What `kohya sample` refuses in one sentence, before it loads a model."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library.cli.main import main
from library.compiler import cache
from library.sampling import generate
from tests.sampling.test_sampling import given  # noqa: F401
from tests.training import shallow  # noqa: F401

SCRIPT = "flux_train_network"
LINE = "a cat --w 64 --h 64 --s 1"
OF_SDXL = "lora_unet_input_blocks_4_1_proj_in"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    halves = {f"{OF_SDXL}.lora_down.weight": torch.ones(4, 64), f"{OF_SDXL}.lora_up.weight": torch.ones(64, 4)}
    save_file(halves, folder / "sdxl.safetensors")
    (folder / "half.safetensors").write_bytes((folder / "sdxl.safetensors").read_bytes()[:-40])
    (folder / "empty.safetensors").touch()
    (folder / "text.safetensors").write_text("no tensors at all", encoding="utf-8")
    return folder


def lora_words(name):
    return [["--lora", f"{{files}}/{name}"], ["--set", f"sample_lora={{files}}/{name}:0.5"]]


MISUSES = [
    *((words, "was made for SDXL, and this is FLUX.1") for words in lora_words("sdxl.safetensors")),
    *((words, "was cut short") for words in lora_words("half.safetensors")),
    *((words, "is empty") for words in lora_words("empty.safetensors")),
    *((words, "is not a safetensors file") for words in lora_words("text.safetensors")),
    *((words, "gone.safetensors does not exist") for words in lora_words("gone.safetensors")),
    (["--lora", "{model}"], "not a LoRA file; choose a LoRA file"),
    (["--set", "sample_lora={files}/sdxl.safetensors:nan"], "has the strength 'nan', which is not a number"),
    (["--set", "sample_lora=owner/name/a.safetensors:strong"], "has the strength 'strong', which is not a number"),
    (["--set", "sample_lora={files}/sdxl.safetensors:"], "has the strength '', which is not a number"),
    (["--set", "sample_cahce=auto"], "sample_cahce is not an option (did you mean sample_cache?)"),
    (["--set", "sample_every_n_steps=3"], "sample_every_n_steps has no effect on images"),
    (["--set", "=3"], "write OPTION=VALUE"),
    (["--set", "sample_cache=fast"], "sample_cache must be off, auto or a number, got 'fast'"),
    (["--set", "sample_batch_size=two"], "sample_batch_size must be auto or a whole number, got 'two'"),
    (["--set", "sample_sampler=fast"], "sample_sampler must be one of ddim"),
    (["--seed", str(2**64)], "is out of range; write one from 0 to 2^64 - 1"),
    (["--seed", str(-(2**63) - 1)], "is out of range; write one from 0 to 2^64 - 1"),
    (["--out", "{files}/empty.safetensors/images"], "empty.safetensors cannot be written to; choose another folder"),
    (["--lora", "a.safetensors", "--compare", "strengths", "--strengths", ""], "no strengths to compare: name some"),
]


@pytest.mark.parametrize(("words", "says"), MISUSES)
def test_a_misuse_is_named_before_anything_is_loaded(given, shallow, files, tmp_path, monkeypatch, capsys, words, says):  # noqa: F811
    config = given(SCRIPT)
    monkeypatch.setattr(generate, "open_sampling_model", lambda *_: pytest.fail("the model was opened"))
    places = {"files": files, "model": config.model.pretrained_model_name_or_path}
    words = [word.format(**places) for word in words]
    common = ["sample", str(shallow.configs[SCRIPT]), "--prompt", LINE, "--out", str(tmp_path / "out"), "--cpu"]
    assert main([*common, *words]) == 1
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_the_size_that_is_said_is_the_size_that_is_generated(given, shallow, tmp_path, capsys):  # noqa: F811
    given(SCRIPT)
    words = ["--prompt", f"a --w 1 --h 100 --s 1 --d {2**64 - 1}", "--out", str(tmp_path), "--cpu"]
    assert main(["sample", str(shallow.configs[SCRIPT]), *words]) == 0
    (path,) = tmp_path.rglob("00_00.png")
    with Image.open(path) as image:
        assert image.size == (64, 96) and "Size: 64x96" in image.text["parameters"]
    told = capsys.readouterr().err
    assert "--w 1 becomes 64, the shortest side of an image" in told and "--h 100 becomes 96" in told
    assert "--d" not in told  # the largest seed is read whole


def test_a_folder_for_compiled_code_that_cannot_be_used_is_named(given, shallow, tmp_path, caplog, monkeypatch):  # noqa: F811
    given(SCRIPT)
    monkeypatch.delenv(cache.INDUCTOR, raising=False)
    monkeypatch.setattr(cache, "use_cache", lambda *_: None)  # it would take another folder, beside the tests'
    (tmp_path / "file").touch()
    options = ["sample_compile=true", "compile_backend=eager", f"compile_cache_dir={tmp_path / 'file' / 'code'}"]
    words = ["--prompt", LINE, "--out", str(tmp_path), "--cpu", *(word for one in options for word in ("--set", one))]
    assert main(["sample", str(shallow.configs[SCRIPT]), *words]) == 0
    assert "compile_cache_dir: " in caplog.text and "compiled code is kept in" in caplog.text


TOGETHER = {
    "of the words": (
        ["--lora", "a.safetensors=strong", "--strengths", "much", "--set", "sample_cache=fast", "--set", "oops"],
        ["--set", "sample_stepz=3", "--seed", str(2**64), "--prompt", "a --w 0 --fs 0"],
    ),
    "of what they name": (
        ["--lora", "{files}/gone.safetensors", "--lora", "{files}/half.safetensors", "--set", "sample_scale=much"],
        ["--prompts", "{files}/gone.txt", "--out", "{files}/empty.safetensors/images"],
    ),
    "without a model": (
        ["--lora", "{files}/gone.safetensors", "--strengths", "much", "--out", "{files}/empty.safetensors/images"],
        ["--set", "oops"],
    ),
}
NAMED = {
    "of the words": (
        "the weight of a.safetensors is 'strong'",
        "strengths are numbers separated by",
        "sample_cache must be",
    )
    + ("oops: write OPTION=VALUE", "sample_stepz is not an option", "seed 184", "width must be from 1", "flow_shift 0"),
    "of what they name": ("gone.safetensors does not exist", "was cut short", "sample_scale must be a number")
    + ("gone.txt", "cannot be written to"),
    "without a model": ("gone.safetensors does not exist", "separated by commas", "model.safetensors", "OPTION=VALUE")
    + ("cannot be written to",),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_all_mistakes_of_a_command_are_named_at_once(given, shallow, files, tmp_path, capsys, kind):  # noqa: F811
    given(SCRIPT)
    model = tmp_path / "model.safetensors" if kind == "without a model" else shallow.configs[SCRIPT]
    words = [word.format(files=files) for part in TOGETHER[kind] for word in part]
    assert main(["sample", str(model), "--prompt", LINE, "--out", str(tmp_path), "--cpu", *words]) == 1
    said = capsys.readouterr().err
    assert not [part for part in NAMED[kind] if part not in said] and "Traceback" not in said, said
    assert len(said.strip().splitlines()) == len(NAMED[kind]), said


@pytest.mark.parametrize("seed", ["-1", None])
def test_a_drawn_seed_is_in_the_files_and_makes_the_images_again(given, shallow, tmp_path, seed):  # noqa: F811
    def generated(folder, *words):
        options = ["--prompt", "a --w 64 --h 64 --s 1", "--out", str(tmp_path / folder), "--cpu", *words]
        assert main(["sample", str(shallow.configs[SCRIPT]), *options]) == 0
        (path,) = (tmp_path / folder).rglob("00_00.png")
        return Image.open(path)

    given(SCRIPT)
    drawn = generated("drawn", *(["--seed", seed] if seed else []))
    used = json.loads(drawn.text["kohya"])["seed"]
    assert used >= 0 and f"Seed: {used}," in drawn.text["parameters"]
    assert generated("again", "--seed", str(used)).tobytes() == drawn.tobytes()


# The steps that were taken, as one would write them; some samplers predict twice in each, or leave a step out.
TAKEN = [("heun", 3, 3), ("k_dpm_2_a", 3, 3), ("pndm", 3, 3), ("lcm", 2, 2), ("dpmsolver", 1000, 999)]


@pytest.mark.parametrize(("name", "asked", "taken"), TAKEN)
def test_the_steps_that_were_taken_are_in_the_files(given, shallow, tmp_path, monkeypatch, name, asked, taken):  # noqa: F811
    from library.families.shared.unet_sampler import UnetSampler

    given("sdxl_train_network")
    if asked == 1000:  # whose passes take long
        monkeypatch.setattr(UnetSampler, "latents", lambda self, *requests: torch.zeros(len(requests), 4, 8, 8))
    line = f"a --w 64 --h 64 --s {asked} --ss {name} --d 1"
    assert (
        main(["sample", str(shallow.configs["sdxl_train_network"]), "--prompt", line, "--out", str(tmp_path), "--cpu"])
        == 0
    )
    (path,) = tmp_path.rglob("00_00.png")
    with Image.open(path) as image:
        everything = json.loads(image.text["kohya"])
        assert f"Steps: {taken}," in image.text["parameters"] and everything["sample_steps"] == asked
        assert everything.get("steps_taken") == (None if taken == asked else taken)
