"""The dialog for base models: those on the disk, downloads, and nothing outside of the roots."""

import json

import pytest

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.models import models
from kohya_gui.models.models import ModelsApi
from kohya_gui.server.json_api import ApiRequest
from library import families
from library.config.building import build_config, find_missing
from library.config.problems import ConfigError
from library.downloads import finding
from library.jobs import jobs
from library.runs import keys
from tests.downloads.conftest import hub, small, sparse  # noqa: F401
from tests.downloads.test_downloads import SHAPES

FAMILY = families.facts_of("flux")
OFFER = FAMILY.hub_models[0]
FILES = [f"{file.repository}/{file.path}" for file in OFFER.files]


@pytest.fixture
def api(hub, tmp_path, monkeypatch):  # noqa: F811
    for number, file in enumerate(OFFER.files):
        hub.repositories.setdefault(file.repository, {})[file.path] = small(number)
    tab = TABS[0]
    models_api = ModelsApi(
        {tab.id: SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics)}, [(tmp_path / "root").resolve()]
    )
    (tmp_path / "root").mkdir()
    models_api.started = []
    answer = jobs.BackgroundJob(tmp_path / "x", {"kind": "models", "arguments": ["models", "get"]})
    monkeypatch.setattr(jobs, "start_job", lambda kind, words, environment: models_api.started.append(words) or answer)
    return models_api


def look(api, **more):
    return api.look(ApiRequest({"tab": "lora", "family": FAMILY.name, **more}))


def test_what_is_there_and_what_is_offered(api, tmp_path):
    vae = tmp_path / "root" / "ComfyUI" / "models" / "vae" / "x.safetensors"
    sparse(vae, SHAPES["flux"]["ae"])
    base = sparse(tmp_path / "root" / "models" / "any.safetensors", SHAPES["flux"][finding.MODEL_OPTION])
    (base.parent / "out.safetensors").symlink_to(sparse(tmp_path / "secret.safetensors", SHAPES["flux"]["ae"]))
    listing = look(api)
    assert listing["parts"] == {
        "ae": [{"path": str(vae), "name": "x.safetensors", "size": vae.stat().st_size, "words": "a VAE"}]
    }
    assert [base["path"] for base in listing["bases"]] == [str(base)] and listing["title"] == FAMILY.title
    assert [file["what"] for file in listing["offers"][0]["files"]] == FILES
    assert [file["size"] for file in listing["offers"][0]["files"]] == [23802932552, 246144152, 9787841024, 335304388]
    assert listing["folder"] == str(tmp_path / "root" / "kohya" / "models") and listing["free"] > 0
    assert listing["labels"]["t5xxl"] == "T5-XXL" and not (tmp_path / "root" / "kohya").exists()


def test_models_of_one_name_are_told_apart_by_their_folders(api, tmp_path):
    family = next(iter(SHAPES))
    for place in ("old", "new"):
        sparse(tmp_path / "root" / "models" / place / "m.safetensors", SHAPES[family][finding.MODEL_OPTION])
    sparse(tmp_path / "root" / "models" / "old" / "n.safetensors", SHAPES[family][finding.MODEL_OPTION])
    bases = api.look(ApiRequest({"tab": "lora", "family": family, "folder": "", "named": ""}))["bases"]
    assert {base["name"] for base in bases} == {"old/m.safetensors", "new/m.safetensors", "n.safetensors"}


def required(family):
    """The parts that a family requires."""
    lacking = {problem.option for problem in find_missing(build_config(TABS[0].configs[family], {}))}
    return lacking & families.facts_of(family).part_options.keys()


@pytest.mark.parametrize("family", [family for family in SHAPES if required(family)])
def test_the_files_that_lie_beside_a_model_are_proposed_for_empty_fields(api, tmp_path, family):
    """For families with several files: in one folder, and sorted by kind as other programs do."""
    for layout in ("one", "sorted"):
        place = tmp_path / "root" / family / layout
        where = lambda option: place / (option if layout == "sorted" else "")  # noqa: E731, B023
        files = {
            option: sparse(where(option) / f"{number}.safetensors", shapes)
            for number, (option, shapes) in enumerate(SHAPES[family].items())
        }
        base_file = files.pop(finding.MODEL_OPTION)
        lacking = required(family)

        def beside(**values):
            sent = json.dumps({"family": family, "values": values, "launch": {}})
            return api.beside(ApiRequest({"tab": "lora", "sent": sent}))["values"]

        base = {finding.MODEL_OPTION: str(base_file)}  # noqa: B023
        assert beside(**base) == {option: str(files[option]) for option in lacking}
        filled = {option: "/mine.safetensors" for option in lacking}
        assert beside(**base, **filled) == {}  # fields that are filled in stay
    named = look(api, family=family, named=str(base_file))
    assert str(base_file) in {
        base["path"] for base in named["bases"]
    }  # a named file's folder is searched, even if it is none of the usual ones


def test_a_download_is_planned_with_the_hubs_own_sizes_and_licences(api, hub):  # noqa: F811
    hub.gated[OFFER.files[0].repository] = "hf_rightright"
    plan = api.ask(ApiRequest({"files": FILES}))
    assert [file["left"] for file in plan["files"]] == [len(small())] * 4 and plan["closed"] == [
        FILES[0].rsplit("/", 1)[0]
    ]
    assert plan["files"][0]["path"].endswith("root/kohya/models/FLUX.1-dev/flux1-dev.safetensors")
    api.token(ApiRequest({"token": " hf_rightright\n"}))
    assert keys.stored_keys() == {"huggingface_token": "hf_rightright"}
    plan = api.ask(ApiRequest({"files": FILES}))
    assert plan["closed"] == [] and plan["token"]
    assert "hf_right" not in str(plan)
    page = f"https://huggingface.co/{OFFER.files[1].repository}"
    named = api.ask(ApiRequest({"repository": page}))["files"]
    assert {file["name"] for file in named} == {"clip_l.safetensors", "t5xxl_fp16.safetensors"}


def test_a_download_is_started_for_files_inside_the_roots(api, tmp_path):
    api.get(ApiRequest({"files": FILES[:2], "folder": str(tmp_path / "root" / "m")}))
    assert api.started == [["models", "get", f"--into={tmp_path / 'root' / 'm'}", *FILES[:2]]]


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"folder": "/etc"}, "outside"),
        ({"folder": "{root}/../elsewhere"}, "outside"),
        ({"folder": "{root}/.ssh"}, "hidden"),
        ({"folder": "{root}/file"}, "not a folder"),
        ({"files": []}, "not what the page sends"),
        ({"files": ["--into=/etc/x/y"]}, "not what the page sends"),
        ({"files": ["a/b"]}, "not what the page sends"),
        ({"files": FILES * 9 + [f"a/b/{n}.safetensors" for n in range(20)]}, "not what the page sends"),
        ({"files": ["a/b/../../../../etc/x.ckpt"]}, "may hold code"),
        ({"files": ["a/../x.safetensors"]}, "a name that cannot be used"),
        ({"files": ["a/link/x.safetensors"]}, "outside"),
        ({"files": ["a/b/.hidden.safetensors"]}, "a name that cannot be used"),
        ({"files": "a/b/c"}, "list of texts"),
    ],
)
def test_what_leads_out_is_refused(api, tmp_path, sent, says):
    root = tmp_path / "root"
    (root / "file").write_text("x")
    (root / "kohya" / "models").mkdir(parents=True)
    (root / "kohya" / "models" / "link").symlink_to(tmp_path)
    fields = {"files": FILES} | {
        name: value.replace("{root}", str(root)) if name == "folder" else value for name, value in sent.items()
    }
    with pytest.raises(ConfigError, match=says):
        api.get(ApiRequest(fields))
    assert api.started == []


@pytest.mark.parametrize("token", ["", "x", "hf with blanks", "hf_\u00e4\u00e4\u00e4\u00e4", "a" * 900, "hf_a\nb123"])
def test_only_a_token_is_kept(api, token):
    with pytest.raises(ConfigError, match="not a token"):
        api.token(ApiRequest({"token": token}))
    assert keys.stored_keys() == {}


@pytest.mark.parametrize("name", ["http://127.0.0.1/x", "../..", "a", "someone/none"])
def test_other_repositories_are_sentences(api, name):
    with pytest.raises(ConfigError):
        api.ask(ApiRequest({"repository": name}))


def test_other_forms_are_sentences(api):
    for sent in ({"tab": "none"}, {"family": "none"}, {"folder": "/"}):
        with pytest.raises(ConfigError):
            look(api, **sent)
    assert "find-models" in models.download_button("x")


@pytest.mark.browser
def test_a_model_that_is_published_as_a_repository_alone_is_offered_whole(visit):
    facts = families.facts_of("flux_3")
    assert facts.hub_folder and not facts.hub_models
    visitor = visit()
    page = visitor.page
    visitor.family(facts.title)
    page.locator(".find-models:visible").click()
    dialog = page.locator("dialog.models")
    dialog.get_by_role("link", name=facts.hub_folder).wait_for()
    dialog.get_by_role("button", name="Use this model").click()
    assert page.locator("#lora-pretrained_model_name_or_path").input_value() == facts.hub_folder
    visitor.family(FAMILY.title)
    page.locator(".find-models:visible").click()
    dialog.get_by_text(f"Base model: {FAMILY.title}").wait_for()
    assert not dialog.get_by_role("button", name="Use this model").is_visible()


@pytest.mark.browser
def test_a_model_is_downloaded_with_its_parts_and_filled_in(visit, served, hub):  # noqa: F811
    for facts in families.all_families():
        for offer in facts.hub_models:
            for number, file in enumerate(offer.files):
                hub.repositories.setdefault(file.repository, {})[file.path] = small(number)
    hub.gated[OFFER.files[0].repository] = "hf_rightright"
    vae = sparse(served[1] / "models" / "mine.safetensors", SHAPES["flux"]["ae"])
    place = served[1] / "kohya" / "models"
    before = {*place.rglob("*")}  # other tests may have downloaded models
    visitor = visit()
    page = visitor.page
    visitor.family(FAMILY.title)
    page.locator(".find-models:visible").click()
    dialog = page.locator("dialog.models")
    dialog.get_by_label("Model", exact=True).select_option(label="FLUX.1 dev (23.8 GB)")  # no other test downloads it
    dialog.get_by_text("First accept the licence of this model").wait_for()
    assert dialog.get_by_label("Autoencoder").input_value() == str(vae)
    assert "Download t5xxl_fp16.safetensors (9.8 GB)" in dialog.get_by_label("T5-XXL").inner_text()
    assert (
        dialog.get_by_role("link").first.get_attribute("href") == f"https://huggingface.co/{OFFER.files[0].repository}"
    )
    go = dialog.locator(".take")
    assert go.is_disabled()
    dialog.locator("#models-token").fill("hf_rightright")
    dialog.get_by_role("button", name="Keep and check again").click()
    page.wait_for_function("() => !document.querySelector('.models .take').disabled")
    assert go.inner_text() == "Download 60.3 KB"
    assert "20.1 KB + 20.1 KB + 20.1 KB" in dialog.locator(".room").inner_text()
    assert page.evaluate("document.querySelector('dialog.models').scrollWidth <= innerWidth")
    go.click()
    dialog.wait_for(state="hidden", timeout=60_000)
    form = page.locator("#lora-form")
    value = lambda name: form.locator(f"[data-option={name}]:visible").input_value()  # noqa: E731
    assert value(finding.MODEL_OPTION) == str(place / "FLUX.1-dev" / "flux1-dev.safetensors")
    assert value("ae") == str(vae) and value("clip_l") == str(place / "flux_text_encoders" / "clip_l.safetensors")
    assert sorted(path.name for path in {*place.rglob("*")} - before if path.is_file()) == [
        "clip_l.safetensors",
        "flux1-dev.safetensors",
        "t5xxl_fp16.safetensors",
    ]
    page.locator(".find-models:visible").click()  # all files are there now
    dialog.locator(".room", has_text="All files are on this computer.").wait_for()
    dialog.get_by_label("Model", exact=True).select_option("other")
    dialog.get_by_label("Hugging Face id").fill("someone/none")
    dialog.get_by_label("Hugging Face id").press("Enter")
    dialog.get_by_text("There is no Hugging Face repository someone/none").wait_for()
    assert go.is_disabled()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
