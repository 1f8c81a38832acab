"""Captions by a model on the page: the request, old and new captions side by side, and restoring one or all."""

import sys

import pytest

from kohya_gui.server.json_api import ApiRequest
from kohya_gui.tools.commands import ToolCommands, job_status
from library.config.problems import ConfigError
from library.jobs import jobs
from library.runs import layout
from tests.curation.conftest import data, picture  # noqa: F401 (a fixture)
from tests.curation.test_trash import tree
from tests.page.test_images import ended, images, opened  # noqa: F401 (a fixture)

# `kohya caption` with a captioner that is there at once, and says what it was asked.
STUB = """
import sys
from library.captioning import shell

class Stub:
    name, batch_size, makes_tags = "stub", 2, False
    def __init__(self, prompt):
        self.prompt = prompt
    def __call__(self, pictures):
        return [f"{self.prompt} {picture.width}" for picture in pictures]

shell._load_captioner = lambda arguments, report: Stub(f"{arguments.model} {arguments.prompt}")
sys.exit(shell.main(sys.argv[2:]))
"""


def test_captions_before_and_after_a_change_are_shown_and_put_back(images, data):  # noqa: F811
    start = tree(data)
    scope = {"folder": str(data), "collection": opened(images, data)["collection"]}
    edit = {"action": "replace_tag", "find": "red hat", "put": "blue hat", "show": "all", "apply": True}
    done = ended(images, images.edit(ApiRequest({**scope, **edit})))
    change = done["past"][0]["id"]
    comparison = images.changed(ApiRequest({**scope, "change": change}))
    assert comparison["total"] == len(comparison["rows"]) == len(comparison["names"]) == done["done"] > 2
    first = comparison["rows"][0]
    assert first["before"].replace("red", "blue") == first["after"] == first["now"]
    (data / first["name"]).with_suffix(".txt").write_text("mine")
    back = ended(images, images.put_back(ApiRequest({**scope, "change": change, "names": comparison["names"][:2]})))
    assert (back["done"], back["left"]) == (1, 1)
    again = images.changed(ApiRequest({**scope, "change": change, "start": 1}))
    assert again["names"] == comparison["names"][2:] and again["rows"][0]["now"] == again["rows"][0]["before"]
    assert (data / first["name"]).with_suffix(".txt").read_text() == "mine"
    (data / first["name"]).with_suffix(".txt").write_text(first["after"])
    for _ in range(2):
        ended(images, images.undo(ApiRequest(scope)))
    assert tree(data) == start
    for wrong in ("../..", "x", "", change[:-1]):
        with pytest.raises(ConfigError, match="no longer exists"):
            images.changed(ApiRequest({**scope, "change": wrong}))
    for names, says in ((["../../x"], "is not in"), ([], "no image is chosen"), ([7], "a list of texts")):
        with pytest.raises(ConfigError, match=says):
            answer = images.put_back(ApiRequest({**scope, "change": change, "names": names}))
            raise ConfigError(answer["error"])


def test_a_model_is_a_folder_inside_the_roots_or_an_id_of_the_hub(tmp_path):
    guard = ToolCommands([tmp_path.resolve()]).guard
    (tmp_path / "vlm").mkdir()
    assert guard("Qwen/Qwen2.5-VL-3B-Instruct", "model", "Model") == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert guard(str(tmp_path / "vlm"), "model", "Model") == (tmp_path / "vlm").resolve()
    for wrong in (
        "../vlm",
        "library/captioning",
        "/etc",
        "a/b/c",
        "https://huggingface.co/a/b",
        "-a/-b/",
        "a/../b",
        "a--b/c",
    ):
        with pytest.raises(ConfigError):
            guard(wrong, "model", "Model")


def test_download_of_a_captioner_reports_bytes(tmp_path):
    facts = {"kind": "caption", "state": "running", "arguments": ["caption", "hf", "x"]}
    for text, is_file in (("model.safetensors", True), ("checking model.safetensors", True), ("captioning", False)):
        job = jobs.BackgroundJob(tmp_path / "caption-1", {**facts, "doing": {"text": text, "done": 1, "total": 2}})
        assert job_status(job)["bytes"] is is_file


def test_notes_of_tools_and_comparisons_are_shown_with_their_job(tmp_path):
    for kind, shown in (("tools", ["a note"]), ("sample", ["a note"]), ("caption", [])):
        job = jobs.BackgroundJob(tmp_path / kind, {"kind": kind, "state": "running", "arguments": [kind, "x"]})
        job.folder.mkdir()
        layout.store(job.folder / jobs.RESULT, {"warnings": ["a note"]})
        assert job_status(job)["warnings"] == shown


@pytest.mark.browser
def test_models_to_choose_from_say_what_they_write_and_their_size(visit, served):
    (served[1] / "to-caption").mkdir()
    picture(1, 64, 48).save(served[1] / "to-caption" / "1.png")
    visitor = visit()
    page = visitor.page
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(served[1] / "to-caption"))
    visitor.click("Open folder")
    page.get_by_text("Captions by a model").click()
    page.locator(".commands[data-command=caption]").get_by_text("Sentences (vision language model)", exact=True).click()
    models, chosen = page.get_by_label("Models to download").locator("visible=true"), page.locator("#caption-hf-model")
    assert models.input_value() == chosen.input_value() == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert models.locator("option:checked").inner_text().endswith("7.5 GB")
    assert models.bounding_box()["width"] > chosen.bounding_box()["width"]  # a line of its own, so that it is readable
    models.select_option("Salesforce/blip-image-captioning-base")
    assert chosen.input_value() == "Salesforce/blip-image-captioning-base"


@pytest.mark.browser
def test_a_model_captions_a_folder_and_what_it_wrote_is_compared_and_put_back(visit, served, monkeypatch):
    monkeypatch.setattr(jobs, "job_command", lambda words: [sys.executable, "-c", STUB, *words])
    folder = served[1] / "captioned"
    folder.mkdir()
    for number in range(3):
        picture(number, 64 + number, 48).save(folder / f"{number}.png")
    (folder / "1.txt").write_text("my own words")
    start = tree(folder)
    visitor = visit()
    page = visitor.page
    page.get_by_role("tab", name="Data", exact=True).click()
    page.locator("#images-folder").fill(str(folder))
    visitor.click("Open folder")
    page.get_by_text("Captions by a model").click()
    page.locator(".commands[data-command=caption]").get_by_text("Sentences (vision language model)", exact=True).click()
    page.locator("#caption-hf-model").fill("some/vlm")
    assert page.locator("#caption-hf-prompt").input_value() == "Describe this image in one sentence."
    page.get_by_label("Ready prompts").select_option("Tags")
    assert "separated by commas" in page.locator("#caption-hf-prompt").input_value()
    page.locator("#caption-hf-prompt").fill("what is it?")
    assert page.get_by_label("Ready prompts").input_value() == ""
    page.locator("#caption-hf-existing").select_option("replace")
    visitor.click("Caption this folder")
    box = page.locator(".images .compared")
    box.get_by_text("3 captions changed").wait_for()
    assert (folder / "1.txt").read_text() == "some/vlm what is it? 65"
    pair = box.locator('[data-name="1.png"]')
    assert pair.locator(".old p").inner_text() == "my own words" and pair.locator(".new p").inner_text().endswith("65")
    assert box.locator('[data-name="0.png"] .old').inner_text().split("\n")[-1].strip() == "no caption"
    pair.get_by_role("button").click()
    visitor.until("1 caption put back", ".images")
    pair.get_by_text("Put back", exact=True).wait_for()
    assert (folder / "1.txt").read_text() == "my own words" and (folder / "0.txt").exists()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box.get_by_role("button", name="Put all back").click()
    visitor.until("2 captions put back", ".images")
    assert tree(folder) == start
    page.set_viewport_size({"width": 1440, "height": 900})
    visitor.open()
    page.get_by_role("tab", name="Data", exact=True).click()
    page.get_by_text("Captions by a model").click()
    assert page.locator("#caption-hf-prompt").input_value() == "what is it?"  # the last question is kept
    page.locator(".images [data-panel=past] summary").click()
    page.get_by_role("button", name="Compare the captions before and after: Captions by stub").click()
    assert box.get_by_role("button", name="Put all back").is_disabled()
