"""Files of every other trainer in the browser: their data sets and prompts arrive without a shell command."""

import json
import tomllib

import pytest
import yaml

from kohya_gui.form import datasets
from library.config.building import build_config
from library.families import config_class
from library.importers import adapter_file, kohya_ss
from library.importers.files import DATASETS, IMPORTERS
from tests.config.test_foreign_scripts import EASY, LORA_SCRIPTS
from tests.config.test_foreign_trainers import AITOOLKIT, MUSUBI, ONETRAINER

PROMPTS = ["a red fox", "the sea"]
REPEATS = {"cats": 2, "dogs": 5}


def aitoolkit(folder, images):
    config = yaml.safe_load(AITOOLKIT.replace("lr: 1e-4", "lr: 0.0001"))
    process = config["config"]["process"][0]
    process["training_folder"] = str(folder / "out")
    process["datasets"] = [
        {"folder_path": str(images / name), "num_repeats": count, "resolution": [512]}
        for name, count in REPEATS.items()
    ]
    process["sample"]["prompts"] = PROMPTS
    return write(folder / "a.yaml", yaml.safe_dump(config))


def onetrainer(folder, images):
    concepts = [{"path": str(images / name), "balancing": float(count)} for name, count in REPEATS.items()]
    write(folder / "concepts.json", json.dumps(concepts))
    samples = [{"prompt": prompt, "width": 512, "height": 512} for prompt in PROMPTS]
    write(folder / "samples.json", json.dumps(samples))
    config = {
        **ONETRAINER,
        "output_model_destination": str(folder / "out" / "cat.safetensors"),
        "resolution": "512",
        "concept_file_name": str(folder / "concepts.json"),
        "sample_definition_file_name": str(folder / "samples.json"),
    }
    return write(folder / "o.json", json.dumps(config))


def simpletuner(folder, images):
    sets = [
        {
            "id": name,
            "type": "local",
            "instance_data_dir": str(images / name),
            "repeats": count - 1,
            "caption_strategy": "textfile",
        }
        for name, count in REPEATS.items()
    ]
    write(folder / "data.json", json.dumps(sets))
    write(folder / "prompts.json", json.dumps(dict(zip("ab", PROMPTS, strict=True))))
    config = {
        "model_family": "sdxl",
        "model_type": "lora",
        "max_train_steps": 9,
        "resolution": 512,
        "output_dir": str(folder / "out"),
        "data_backend_config": "data.json",
        "user_prompt_library": "prompts.json",
    }
    return write(folder / "s.json", json.dumps(config))


def diffusion_pipe(folder, images):
    sets = "".join(
        f"[[directory]]\npath = '{images / name}'\nnum_repeats = {count}\n" for name, count in REPEATS.items()
    )
    write(folder / "data.toml", f"resolutions = [512]\n{sets}")
    text = f"output_dir = '{folder / 'out'}'\ndataset = 'data.toml'\npipeline_stages = 1\nepochs = 2\n"
    return write(folder / "d.toml", text + '[model]\ntype = "sdxl"\n[adapter]\ntype = "lora"\nrank = 8\n')


def musubi(folder, images):
    sets = "".join(
        f"[[datasets]]\nimage_directory = '{images / name}'\nnum_repeats = {count}\n" for name, count in REPEATS.items()
    )
    write(folder / "data.toml", f"[general]\nresolution = [512, 512]\n{sets}")
    write(folder / "p.txt", "\n".join(PROMPTS) + "\n")
    text = f"output_dir = '{folder / 'out'}'\nsample_prompts = '{folder / 'p.txt'}'\n"
    return write(folder / "m.toml", text + MUSUBI)


def easy_scripts(folder, images):
    subsets = [{"num_repeats": count, "image_dir": str(images / name)} for name, count in REPEATS.items()]
    saving = {"args": {"output_dir": str(folder / "out"), "output_name": "cat"}}
    return write(folder / "e.toml", as_toml({**EASY, "subsets": subsets, "saving_args": saving}))


def lora_scripts(folder, images):
    config = {**LORA_SCRIPTS, "output_dir": str(folder / "out"), "train_data_dir": str(images)}
    return write(folder / "l.toml", as_toml({**config, "positive_prompts": PROMPTS[0]}))


def of_kohya_ss(folder, images):
    config = {
        "LoRA_type": "Standard",
        "sdxl": True,
        "output_dir": str(folder / "out"),
        "train_data_dir": str(images),
        "sample_prompts": "\n".join(PROMPTS),
    }
    return write(folder / "k.json", json.dumps(config))


# By the program that an importer is for: its file, which options its data sets and its prompts are behind, and prompts.
MADE = {
    "ai-toolkit": (aitoolkit, "dataset_config", PROMPTS),
    "OneTrainer": (onetrainer, "dataset_config", PROMPTS),
    "SimpleTuner": (simpletuner, "dataset_config", PROMPTS),
    "diffusion-pipe": (diffusion_pipe, "dataset_config", []),
    "musubi-tuner": (musubi, "dataset_config", PROMPTS),
    "LoRA_Easy_Training_Scripts": (easy_scripts, "dataset_config", []),
    "lora-scripts": (lora_scripts, "train_data_dir", PROMPTS[:1]),
    kohya_ss.TRAINER: (of_kohya_ss, "train_data_dir", PROMPTS),
}
WITHOUT = {adapter_file.TRAINER}  # their files name neither folders nor prompts


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def as_toml(tables):
    from tomlkit import dumps

    return dumps(tables)


@pytest.fixture
def images(served):
    """Two folders of images with captions."""
    from tests.curation.conftest import picture

    place = served[1] / "imported"
    for name in REPEATS:
        (place / name).mkdir(parents=True, exist_ok=True)
        picture(1).save(place / name / "1.png")
        write(place / name / "1.txt", f"one of the {name}")
    return place


def load(visitor, path):
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    visitor.click("Load config")
    visitor.page.locator(".message:visible", has_text=path.name).first.wait_for()


def rows(visitor):
    """The folders and repeats that the data set editor shows."""
    visitor.page.locator(".datasets:visible .groups li").first.wait_for()
    items = visitor.page.locator(".datasets:visible .groups li")
    return {
        (item.locator("[data-set=image_dir]").input_value(), item.locator("[data-set=num_repeats]").input_value())
        for item in items.all()
    }


def test_each_importer_is_tried_here():
    assert {reader.TRAINER for reader in IMPORTERS} == MADE.keys() | WITHOUT


@pytest.mark.browser
@pytest.mark.parametrize("program", MADE)
def test_the_data_sets_and_prompts_of_a_config_arrive_on_the_page(visit, served, images, tmp_path, program):
    make, option, prompts = MADE[program]
    folder = served[1] / f"of {program}"
    folder.mkdir()
    path, visitor = make(folder, images), visit()
    load(visitor, path)
    assert "kohya import" not in visitor.page.locator(".message:visible").inner_html()
    tab = visitor.page.locator("form.settings:visible").get_attribute("id").removesuffix("-form")
    assert visitor.held(tab)["values"][option]
    if option == "dataset_config":
        file = folder / "out" / "cat" if program == "ai-toolkit" else folder / "out"
        (file,) = file.glob("*-dataset.toml")
        assert visitor.held(tab)["values"][option] == str(file)
        dataset_tables = tomllib.loads(file.read_text(encoding="utf-8"))
        subsets = [subset for each in dataset_tables["datasets"] for subset in each["subsets"]]
        named = {
            (subset["image_dir"], subset.get("num_repeats", dataset_tables.get("general", {}).get("num_repeats", 1)))
            for subset in subsets
        }
        assert named == {(str(images / name), count) for name, count in REPEATS.items()}
        assert rows(visitor) == {(str(images / name), str(count)) for name, count in REPEATS.items()}
        before = file.read_bytes()
        load(visitor, path)  # loading it again writes no second file
        assert [*file.parent.glob("*-dataset*")] == [file] and file.read_bytes() == before
    visitor.click("Sample images")
    for prompt in prompts:
        rows_of = "[...document.querySelectorAll('.prompts [data-prompt=prompt]')]"
        visitor.page.wait_for_function(f"wanted => {rows_of}.some(({{ value }}) => value === wanted)", arg=prompt)
    if prompts:
        visitor.page.wait_for_function(f"() => document.querySelector('#{tab}-sample_prompts').value")


@pytest.mark.browser
def test_a_dataset_file_that_is_there_is_never_overwritten(visit, served, images):
    folder = served[1] / "again"
    (folder / "out").mkdir(parents=True)
    existing = write(folder / "out" / "images-dataset.toml", "# mine\n")
    visitor = visit()
    load(visitor, diffusion_pipe(folder, images))
    assert existing.read_text(encoding="utf-8") == "# mine\n"
    assert visitor.held()["values"]["dataset_config"] == str(folder / "out" / "images-dataset-2.toml")
    visitor.page.locator(".message:visible .undo").click()
    visitor.until("as it was before")
    assert visitor.held()["values"]["dataset_config"] == ""


@pytest.mark.browser
@pytest.mark.parametrize("program", [reader.TRAINER for reader in DATASETS.values()])
def test_data_sets_without_a_training_become_those_of_the_form(visit, served, images, program):
    folder = served[1] / f"sets of {program}"
    folder.mkdir()
    if program == "ai-toolkit":
        sets = [{"folder_path": str(images / name), "num_repeats": count} for name, count in REPEATS.items()]
        path = write(folder / "data.yaml", yaml.safe_dump({"datasets": sets}))
    else:
        MADE[program][0](folder, images)
        path = folder / "data.toml"
    visitor = visit()
    visitor.fill(output_dir=folder / "out", output_name="fox", learning_rate="0.5", train_data_dir=images)
    load(visitor, path)
    held = visitor.held()["values"]
    assert held["dataset_config"] == str(folder / "out" / "fox-dataset.toml") and held["train_data_dir"] == ""
    assert held["learning_rate"] == "0.5" and held["output_name"] == "fox"
    assert {name for name, _ in rows(visitor)} == {str(images / name) for name in REPEATS}


@pytest.mark.browser
def test_where_the_page_may_not_write_the_data_sets_lie_below_the_first_root(visit, served, images):
    folder = served[1] / "abroad"
    folder.mkdir()
    text = diffusion_pipe(folder, images).read_text(encoding="utf-8")
    path, visitor = write(folder / "d.toml", text.replace(str(folder / "out"), "/nowhere/out")), visit()
    load(visitor, path)
    held = visitor.held()["values"]["dataset_config"]
    assert held.startswith(str(served[1] / "kohya")) and held.endswith("-dataset.toml")


@pytest.mark.browser
def test_on_a_phone_and_by_keyboard_one_gets_from_an_import_to_a_start(visit, served, images):
    folder = served[1] / "phone"
    folder.mkdir()
    path, visitor = simpletuner(folder, images), visit()
    config = {**json.loads(path.read_text(encoding="utf-8")), "learning_rate": "abc"}
    write(path, json.dumps({**config, "pretrained_model_name_or_path": "org/model"}))
    page = visitor.page
    page.set_viewport_size({"width": 390, "height": 844})
    press = lambda locator: (locator.focus(), page.keyboard.press("Enter"))  # noqa: E731
    press(page.locator(".begin .extra:visible"))
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    press(page.locator(".begin .load:visible"))
    visitor.until("Loaded s.json").until("problem to fix")
    fix = page.locator(".message:visible .fix")
    assert all(
        button.bounding_box()["height"] >= 36 for button in page.locator(".message:visible :is(.fix, .undo)").all()
    )
    bar = page.locator(".message:visible").bounding_box()
    assert bar["x"] >= 0 and bar["x"] + bar["width"] <= 390 and bar["height"] < 844 / 2
    press(fix)
    page.wait_for_function("document.activeElement.id === 'lora-learning_rate'")
    press(page.locator(".bar .train:visible"))
    visitor.state("finished")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("folder", "place"), [("out", "kohya"), ("", "kohya"), ("{root}/out", "out")])
def test_a_relative_output_folder_is_not_taken_below_the_folder_of_the_server(folder, place, tmp_path):
    """It is relative to the config's original place, which is unknown."""
    values = {"output_dir": folder.format(root=tmp_path), "output_name": "cat"}
    config = build_config(config_class("sdxl_train_network"), values, notes=[])
    assert datasets.dataset_file_place(config, [tmp_path]) == (tmp_path / place / "cat-dataset.toml").resolve()
