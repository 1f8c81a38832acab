"""The tab Try it: the form becomes a command, samples of runs are compared, all below the roots."""

import io
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.panel import samples
from kohya_gui.sampling import sampling
from kohya_gui.server.json_api import ApiRequest
from library.config.formats import read_toml, toml_value
from library.config.problems import ConfigError
from library.jobs import jobs
from library.runs import dates, layout, reader, registry

TAB = TABS[0]
NAME = next(iter(TAB.configs))


@pytest.fixture
def tab(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    root = (tmp_path / "root").resolve()
    root.mkdir()
    for name in ("a", "b", "model"):
        (root / f"{name}.safetensors").write_text("x")
    (tmp_path / "secret.safetensors").write_text("x")
    sampling_tab = sampling.SamplingTab.__new__(sampling.SamplingTab)
    form = SettingsForm(TAB.id, FAMILY_TITLES, TAB.configs, TAB.basics)
    sampling_tab.forms, sampling_tab.titles, sampling_tab.roots = {TAB.id: form}, {TAB.id: TAB.title}, [root]
    sampling_tab.started = []
    answer = lambda folder: jobs.BackgroundJob(folder, {"kind": "sample"})  # noqa: E731
    monkeypatch.setattr(
        jobs, "start_job", lambda kind, words, folder: sampling_tab.started.append(words) or answer(folder)
    )
    return sampling_tab


def sent(tmp_path, **more):
    root = tmp_path / "root"
    values = {
        "pretrained_model_name_or_path": str(root / "model.safetensors"),
        "blocks_to_swap": "5",
        "train_data_dir": "/etc",
        "learning_rate": "nonsense",
    }
    form = json.dumps({"family": NAME, "values": values, "launch": {}})
    return ApiRequest(
        {
            "model": f"tab:{TAB.id}",
            "form": form,
            "loras": [f"{root}/a.safetensors=0.8"],
            "prompts": "a cat\n\n a dog ",
            "fields": {"width": "512", "seed": "3", "height": ""},
            "compare": "strengths",
            "strengths": "0, 1",
            "folder": str(root / "out"),
            **more,
        }
    )


def test_a_form_becomes_a_command(tab, tmp_path):
    root = tmp_path / "root"
    tab.begin(sent(tmp_path))
    ((kind, config, prompts, *options),) = tab.started
    assert kind == "sample"
    assert read_toml(config) == {"pretrained_model_name_or_path": str(root / "model.safetensors"), "blocks_to_swap": 5}
    text = Path(prompts.removeprefix("--prompts=")).read_text("utf-8")
    assert text == "a cat --w 512 --d 3\na dog --w 512 --d 3\n"
    assert options == [
        f"--out={root / 'out'}",
        "--compare=strengths",
        "--strengths=0, 1",
        f"--lora={root / 'a.safetensors'}=0.8",
    ]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"loras": ["{root}/../secret.safetensors=1"]}, "outside"),
        ({"loras": ["{root}/none.safetensors=1"]}, "does not exist"),
        ({"loras": ["{root}/a.safetensors=strong"]}, "Strengths are numbers"),
        ({"loras": []}, "nothing to compare"),
        ({"loras": "x"}, "list of texts"),
        ({"folder": "/etc"}, "outside"),
        ({"prompts": " "}, "write a prompt"),
        ({"prompts": "a --ci /etc/passwd"}, "use the fields"),
        ({"fields": {"width": "wide"}}, "width cannot be"),
        ({"fields": {"controlnet_image": "/etc/x.png"}}, "outside"),
        ({"fields": {"control_image_path": "/etc/x.png"}}, "outside"),
        ({"fields": {"control_image_mask_path": "/etc/x.png"}}, "outside"),
        ({"fields": {"rest": " --ci /etc/x"}}, "not what the page sends"),
        ({"compare": "rm"}, "no such choice"),
        ({"strengths": "a"}, "Strengths are numbers"),
        ({"strengths": "nan"}, "from -10 to 10"),
        ({"model": "tab:none"}, "no such choice"),
        ({"model": "run:../../x"}, "no longer exists"),
        ({"form": '{"family": "x", "values": {}, "launch": {}}'}, "is not a model family"),
        ({"form": json.dumps({"family": NAME, "values": {}, "launch": {}})}, "names no base model"),
        (
            {
                "form": json.dumps(
                    {"family": NAME, "values": {"pretrained_model_name_or_path": "/etc/passwd"}, "launch": {}}
                )
            },
            "outside",
        ),
    ],
)
def test_what_makes_no_sense_or_leads_out_is_refused(tab, tmp_path, more, says):
    root = str(tmp_path / "root")
    fields = {
        name: [text.replace("{root}", root) for text in value] if isinstance(value, list) else value
        for name, value in more.items()
    }
    with pytest.raises(ConfigError, match=says):
        tab.begin(sent(tmp_path, **fields))
    assert tab.started == []


def run_with_samples(root, name="zorb-1"):
    """A finished run with two prompts at two steps, and two files."""
    folder = root / "out" / "runs" / name
    folder.mkdir(parents=True)
    facts = {
        "id": folder.name,
        "script": TAB.configs[NAME]().script,
        "state": "finished",
        "started": 1.0,
        "folder": str(root),
        "output_dir": str(root / "out"),
        "output_name": "zorb",
    }
    layout.store(folder / layout.RUN, facts)
    model = toml_value(str(root / "model.safetensors"))
    (folder / layout.TOML).write_text(f"pretrained_model_name_or_path = {model}\n", "utf-8")
    lines = []
    for step in (10, 20):
        (root / "out" / f"zorb-{step}.safetensors").write_text("x")
        lines.append({"kind": "saved", "file": str(root / "out" / f"zorb-{step}.safetensors"), "step": step})
        for number, prompt in enumerate(("a cat", "a dog")):
            place = root / "out" / f"{step}_{number}.png"
            Image.new("RGB", (32, 32), (step, 40 * number, 40)).save(place)
            lines.append({"kind": "sample", "file": str(place), "step": step, "number": number, "prompt": prompt})
    (folder / layout.PROGRESS).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    registry.add_pointer(folder)
    return folder


def test_the_image_of_what_a_run_has_learned_shows_its_own_samples_alone(tab, tmp_path):
    root = tmp_path / "root"
    run = run_with_samples(root, "learned-1")
    image = samples.show_learned({"run": run.name})
    whole = Image.open(io.BytesIO(image.body)).convert("RGB")
    assert image.media_type == "image/png" and whole.getpixel((whole.width - 20, whole.height - 20)) == (20, 40, 40)
    hostile = run_with_samples(root, "learned-2")  # its record names a file outside of the run's folder
    lines = (hostile / layout.PROGRESS).read_text(encoding="utf-8").replace("20_1.png", "../../secret.png")
    Image.new("RGB", (32, 32), (1, 2, 3)).save(tmp_path / "secret.png")
    (hostile / layout.PROGRESS).write_text(lines, encoding="utf-8")
    other = Image.open(io.BytesIO(samples.show_learned({"run": hostile.name}).body)).convert("RGB")
    assert other.getpixel((other.width - 20, other.height - 20)) == (255, 255, 255)
    for query in ({"run": "../learned-1"}, {"run": "none"}, {}):
        with pytest.raises(ConfigError, match="no such image"):
            samples.show_learned(query)


def test_the_image_that_samples_were_made_from_stands_beside_them(tmp_path):
    root = tmp_path / "root"
    plain, folder = run_with_samples(root, "plain-1"), run_with_samples(root, "painted-1")
    for name, place in (("room.png", root), ("secret.png", tmp_path)):
        Image.new("RGB", (32, 32), (1, 2, 3)).save(place / name)
    record, paths = folder / layout.PROGRESS, iter((root / "room.png", tmp_path / "secret.png") * 2)
    events = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    for event in events:
        if event["kind"] == "sample":
            event["images"] = {"control_image_path": [str(next(paths))], "training_mask": "0 32x32"}
    record.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    shown = {run: samples.gallery(reader.run_at(run), reader.progress(run).update()) for run in (plain, folder)}
    assert shown[folder].count("sample original") == 2 and "Original" not in shown[plain]
    query = {"run": folder.name, "small": "1"}
    assert samples.show_original(query | {"place": "0"}, [root]).media_type == "image/jpeg"
    assert samples.show_original(query | {"place": "1"}, [root]).status_code == 204
    for wrong in ({"place": "99"}, {"place": "x"}, {"run": plain.name}, {"run": "../painted-1"}):
        with pytest.raises(ConfigError):
            samples.show_original(query | wrong, [root])


@pytest.mark.parametrize(
    "gone", [["20_1.png"], ["10_0.png"], ["10_0.png", "20_0.png"], ["10_0.png", "10_1.png", "20_0.png", "20_1.png"]]
)
def test_deleted_samples_are_left_out_of_all_lists(tab, tmp_path, gone):
    root = tmp_path / "root"
    folder = run_with_samples(root, "thinned-1")
    job = jobs.new("sample")
    paths = [[str(root / "out" / f"{step}_{number}.png") for step in (10, 20)] for number in range(2)]
    layout.store(job / jobs.RESULT, {"columns": ["a", "b"], "rows": ["a cat", "a dog"], "files": paths, "folder": "x"})
    layout.store(job / jobs.JOB, {"kind": "sample", "state": "finished", "started": 2.0})
    for name in gone:
        (root / "out" / name).unlink()
    count, run = 4 - len(gone), reader.run_at(folder)
    left = {place for place, name in enumerate(("10_0.png", "10_1.png", "20_0.png", "20_1.png")) if name not in gone}
    shown = samples.gallery(run, reader.progress(folder).update())
    assert {place for place in range(4) if f"samples/{place}?" in shown} == left
    assert bool(samples.learned_html(run, reader.progress(folder).update())) == (count > 1)
    offered = tab.choices(ApiRequest({}))
    assert [name for name, _ in offered["sheets"]] == [f"job:{job.name}", "run:thinned-1"] * bool(count)
    for name in (f"job:{job.name}", "run:thinned-1"):
        cells = tab.sheet(ApiRequest({"name": name}))["cells"]
        assert sum(cell is not None for row in cells for cell in row) == count
    if count:
        newest = 2 if 2 in left else max(left)  # the first prompt's stands for a step
        assert samples.serve_sample("thinned-1", "newest", small=False).body == (
            samples.serve_sample("thinned-1", newest, small=False).body
        )
    else:
        with pytest.raises(ConfigError, match="no such image"):
            samples.serve_sample("thinned-1", "newest", small=True)


@pytest.mark.parametrize("state", ["running", "finished"])
def test_what_the_samples_say_stands_beside_them(tab, tmp_path, state):
    folder = run_with_samples(tmp_path / "root", f"judged-{state}")
    record = folder / layout.PROGRESS
    judged = {"kind": "warning", "text": "the samples <b>are</b> noise", "about": "samples"}
    lines = [{"kind": "warning", "text": "of something else"}, judged]
    record.write_text(record.read_text("utf-8") + "".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    facts = reader.run_at(folder).facts | {"state": state}
    run, progress = reader.RecordedRun(folder, facts), reader.progress(folder).update()
    learned, gallery = samples.learned_html(run, progress), samples.gallery(run, progress)
    beside, elsewhere = (gallery, learned) if run.active else (learned, gallery)
    assert "the samples &lt;b&gt;are&lt;/b&gt; noise" in beside and "noise" not in elsewhere
    assert "of something else" not in beside + elsewhere


def test_fields_that_all_prompts_share_are_proposed(tab, tmp_path):
    run, written = run_with_samples(tmp_path / "root", "shared-1"), tmp_path / "root" / "prompts.txt"
    for image in tmp_path.rglob("*.png"):
        image.unlink()  # their size would be proposed, too
    assert tab.of_run(ApiRequest({"run": run.name}))["fields"] == {}
    with (run / layout.TOML).open("a", encoding="utf-8") as toml:
        toml.write(f"sample_prompts = {toml_value(str(written))}\n")
    assert tab.of_run(ApiRequest({"run": run.name}))["fields"] == {}  # the prompt file does not exist yet
    written.write_text(
        "a zorb --w 128 --h 128 --s 20 --l 4 --g 1 --d 1\na cat --w 128 --h 128 --s 20 --l 4 --g 1 --d 2\n"
    )
    shared = {"width": "128", "height": "128", "sample_steps": "20", "scale": "4.0", "guidance_scale": "1.0"}
    assert tab.of_run(ApiRequest({"run": run.name}))["fields"] == shared  # without the seeds, which differ
    outside = tmp_path / "elsewhere.txt"
    outside.write_text("a secret --w 64\n")
    text = (run / layout.TOML).read_text(encoding="utf-8").replace(str(written), str(outside))
    (run / layout.TOML).write_text(text, encoding="utf-8")
    assert tab.of_run(ApiRequest({"run": run.name}))["fields"] == {}


def test_a_run_without_samples_proposes_the_prompts_of_its_file(tab, tmp_path):
    run, written = run_with_samples(tmp_path / "root", "none-1"), tmp_path / "root" / "prompts.txt"
    written.write_text("a zorb --d 1\na cat --w 64\n")
    (run / layout.PROGRESS).write_text("", encoding="utf-8")
    with (run / layout.TOML).open("a", encoding="utf-8") as toml:
        toml.write(f"sample_prompts = {toml_value(str(written))}\n")
    assert tab.of_run(ApiRequest({"run": run.name}))["prompts"] == ["a zorb", "a cat"]


def test_a_runs_samples_and_files_are_there(tab, tmp_path):
    run_with_samples(tmp_path / "root")
    choices = tab.choices(ApiRequest({}))
    assert [name for name, _ in choices["models"]] == [f"tab:{TAB.id}", "run:zorb-1"]
    assert [[key, str(title)] for key, title in choices["sheets"]] == [
        ["run:zorb-1", f"Run zorb · {dates.moment(1.0)}"]
    ]
    sheet = tab.sheet(ApiRequest({"name": "run:zorb-1"}))
    assert [*map(str, sheet["columns"])] == ["Step 10", "Step 20"] and sheet["rows"] == ["a cat", "a dog"]
    assert sheet["cells"][1][0] == {
        "small": "api/v1/runs/zorb-1/samples/1?small=true",
        "large": "api/v1/runs/zorb-1/samples/1",
        "seed": None,
    }
    Image.new("RGB", (32, 32)).save(tmp_path / "root/out/0_0.png")
    first = {"kind": "sample", "file": "out/0_0.png", "step": 0, "number": 0, "prompt": "a cat"}
    with (tmp_path / "root/out/runs/zorb-1" / layout.PROGRESS).open("a", encoding="utf-8") as progress:
        progress.write(json.dumps(first) + "\n")
    assert str(tab.sheet(ApiRequest({"name": "run:zorb-1"}))["columns"][0]) == "Base model"
    contents = tab.of_run(ApiRequest({"run": "zorb-1"}))
    assert [name[-14:-12] for name in contents["files"]] == ["10", "20"] and contents["prompts"] == ["a cat", "a dog"]
    tab.begin(sent(tmp_path, model="run:zorb-1"))
    assert read_toml(tab.started[0][1]) == {
        "pretrained_model_name_or_path": str(tmp_path / "root" / "model.safetensors")
    }


def test_images_get_the_size_of_a_runs_newest_samples_if_all_have_the_same(tab, tmp_path):
    run_with_samples(tmp_path / "root")
    of_run = lambda: tab.of_run(ApiRequest({"run": "zorb-1"}))["fields"]  # noqa: E731
    files = [Path(event["file"]) for event in sampling._sample_events(reader.existing_run("zorb-1"))]
    for path in files:
        Image.new("RGB", (64, 96) if path in files[-2:] else (32, 32)).save(path)
    assert of_run() == {"width": "64", "height": "96"}
    Image.new("RGB", (96, 64)).save(files[-1])
    assert of_run() == {}
    files[-1].unlink()
    assert of_run() == {}


def test_only_images_of_a_comparison_inside_the_roots_are_shown(tab, tmp_path):
    inside, outside = tmp_path / "root" / "0.png", tmp_path / "0.png"
    for path in (inside, outside):
        Image.new("RGB", (32, 32)).save(path)
    folder = jobs.new("sample")
    layout.store(folder / jobs.JOB, {"kind": "sample", "state": "finished", "started": 1.0})
    files = [[str(inside), str(outside), "", str(tmp_path / "root" / "a.safetensors")]]
    layout.store(folder / jobs.RESULT, {"columns": ["a", "b", "c", "d"], "rows": ["x"], "files": files, "folder": "f"})
    query = {"job": folder.name, "row": "0"}
    assert tab.show({**query, "column": "0"}).media_type == "image/png"
    assert tab.show({**query, "column": "0", "small": "1"}).media_type == "image/jpeg"
    for more in ({"column": "1"}, {"column": "2"}, {"column": "3"}, {"column": "9"}, {"column": "x"}, {}):
        with pytest.raises(ConfigError):
            tab.show({**query, **more})
    with pytest.raises(ConfigError):
        tab.show({"job": "../x", "row": "0", "column": "0"})
    sheet = tab.sheet(ApiRequest({"name": f"job:{folder.name}"}))
    assert sheet["cells"][0][2] is None and sheet["columns"] == ["a", "b", "c", "d"]
    for name in ("job:../x", "run:none", ""):
        with pytest.raises(ConfigError):
            tab.sheet(ApiRequest({"name": name}))


@pytest.mark.parametrize(
    ("family", "values", "takes"),
    [
        ("sdxl", {}, ["controlnet_image"]),
        ("sd15", {}, []),
        ("krea_2", {}, []),
        ("flux", {}, ["guidance_scale"]),
        ("flux", {"model_type": "kontext"}, ["control_image_path", "guidance_scale"]),
        ("flux", {"model_type": "fill"}, ["control_image_path", "control_image_mask_path", "guidance_scale"]),
        ("flux_3", {}, ["control_image_path"]),
        ("qwen_image", {}, []),
        ("qwen_image", {"model_version": "edit-2511"}, ["control_image_path"]),
        ("qwen_image_21", {}, ["control_image_path"]),
    ],
)
def test_a_form_names_the_fields_that_do_something_for_its_model(tab, family, values, takes):
    form = json.dumps({"family": family, "values": values, "launch": {}})
    assert tab.of_form(ApiRequest({"tab": TAB.id, "form": form}))["takes"] == takes


@pytest.mark.parametrize(
    ("option", "written", "full"),
    [
        ("vae", "a.safetensors", "{root}/a.safetensors"),
        ("vae", "{root}/a.safetensors", "{root}/a.safetensors"),
        ("vae", "nowhere.safetensors", "nowhere.safetensors"),
        (
            "base_weights",
            ["a.safetensors", "owner/name/b.safetensors"],
            ["{root}/a.safetensors", "owner/name/b.safetensors"],
        ),
        ("sample_lora", "b.safetensors:0.8", "{root}/b.safetensors:0.8"),
        ("sample_lora", "b.safetensors", "{root}/b.safetensors"),
        ("sample_steps", 4, 4),
    ],
)
def test_files_of_a_run_that_was_started_in_a_shell_are_found_in_its_folder(tab, tmp_path, option, written, full):
    def place(value):
        if isinstance(value, list):
            return [place(item) for item in value]
        return value.replace("{root}/", f"{tmp_path / 'root'}{os.sep}") if isinstance(value, str) else value

    facts = {"id": "r", "script": NAME, "folder": str(tmp_path / "root"), "config": {"s": {option: place(written)}}}
    layout.store(tmp_path / "root" / "runs" / "r" / layout.RUN, facts)
    run = reader.run_at(tmp_path / "root" / "runs" / "r")
    assert sampling._run_settings(run) == {option: place(full)}


@pytest.mark.parametrize("images", [{"control_image_path": ["a.png", "b.png"]}, {"controlnet_image": "c.png"}])
def test_the_images_that_all_samples_of_a_run_show_the_model_are_proposed(tab, tmp_path, images):
    run = run_with_samples(tmp_path / "root")
    for image in tmp_path.rglob("*.png"):
        image.unlink()
    record = run / layout.PROGRESS
    events = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]

    def fields(*images_of_events):
        shown = iter(images_of_events * len(events))
        lines = [event | ({"images": next(shown)} if event["kind"] == "sample" else {}) for event in events]
        record.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return tab.of_run(ApiRequest({"run": run.name}))["fields"]

    [(name, value)] = images.items()
    assert fields(images) == {name: "; ".join([value] if isinstance(value, str) else value)}
    assert fields(images, {}) == {} == fields(images, {name: "other.png"})
    assert {} == fields(7) == fields({"control_image_path": [7]}) == fields({"other": "a.png"})  # damaged


def with_seeds(folder, seeds):
    """Give the samples of a run's record these seeds, in order."""
    events = [json.loads(line) for line in (folder / layout.PROGRESS).read_text("utf-8").splitlines()]
    left = iter(seeds)
    for event in events:
        if event["kind"] == "sample":
            event["seed"] = next(left)
    (folder / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("seeds", "prompts", "seed"),
    [
        ((1, 2, 3, 4), ["a cat --d 3", "a dog --d 4"], None),  # drawn: those of the newest samples
        ((7, 7, 7, 7), ["a cat", "a dog"], "7"),
        ((None, None, None, None), ["a cat", "a dog"], None),  # as earlier versions recorded them
    ],
)
def test_the_seeds_of_a_runs_samples_are_shown_and_used_again(tab, tmp_path, seeds, prompts, seed):
    run = with_seeds(run_with_samples(tmp_path / "root", "seeds-1"), seeds)
    known = tab.of_run(ApiRequest({"run": run.name}))
    assert known["prompts"] == prompts and known["fields"].get("seed") == seed
    cells = tab.sheet(ApiRequest({"name": f"run:{run.name}"}))["cells"]
    assert [[cell["seed"] for cell in row] for row in cells] == [[seeds[0], seeds[2]], [seeds[1], seeds[3]]]
    gallery = samples.gallery(reader.run_at(run), reader.progress(run).update())
    assert ('title="Seed 3"' in gallery) == (seeds[2] == 3)
    fields = {"width": "64"} | ({"seed": seed} if seed else {})
    tab.begin(sent(tmp_path, prompts="\n".join(known["prompts"]), fields=fields))
    written = Path(tab.started[0][2].removeprefix("--prompts=")).read_text("utf-8")
    ends = [f" --d {one}" if one is not None else "" for one in seeds[2:]]
    assert written == f"a cat --w 64{ends[0]}\na dog --w 64{ends[1]}\n"
