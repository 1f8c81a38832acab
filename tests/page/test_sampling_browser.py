"""The tab Try it in a browser: its fields, its jobs, and the comparison of a run's files."""

import json
import time

import pytest
from PIL import Image

from library.config.formats import read_toml
from library.config.problems import ConfigError, Message
from library.jobs import jobs
from library.runs import layout, process, reader, registry
from tests.page.test_sampling import run_with_samples
from tests.training import wait_for


@pytest.mark.browser
def test_only_fields_that_do_something_are_shown_also_after_a_form_has_changed(visit):
    visitor = visit()
    reference = visitor.page.locator("#sampling-control_image_path")
    visitor.family("Krea 2")
    visitor.room("Try it")
    reference.wait_for(state="hidden")
    visitor.room("Train")
    visitor.family("FLUX.3")
    visitor.room("Try it")
    visitor.page.locator("#sampling-prompts").focus()
    reference.wait_for(state="visible")
    assert not visitor.page.locator("#sampling-guidance_scale").is_visible()


@pytest.mark.browser
def test_generate_waits_until_it_is_known_what_can_be_chosen(visit):
    visitor, held = visit(), []
    visitor.page.route("**/own/sampling_choices", lambda route: held.append(route))
    with visitor.page.expect_request("**/own/sampling_choices"):
        visitor.page.get_by_role("tab", name="Try it", exact=True).click()
    visitor.click("Generate")
    wait_for(lambda: visitor.page.evaluate("1") and held, 60)
    held[0].continue_()
    visitor.until("The LoRA form names no base model", ".said-of")
    visitor.page.unroute("**/own/sampling_choices")


@pytest.mark.browser
def test_files_of_a_run_are_compared(visit, served, monkeypatch):
    run_with_samples(served[1])
    commands = []
    monkeypatch.setattr(
        jobs, "start_job", lambda kind, words, folder: commands.append(words) or finished(folder, served[1])
    )

    def finished(folder, root):
        Image.new("RGB", (32, 32), (9, 90, 9)).save(root / "generated.png")
        layout.store(
            folder / jobs.RESULT,
            {
                "columns": ["zorb-10", "zorb-20"],
                "rows": ["a cat"],
                "folder": str(root),
                "files": [[str(root / "generated.png")] * 2],
            },
        )
        layout.store(
            folder / jobs.JOB,
            {"kind": "sample", "state": "finished", "started": 2.0, "arguments": ["sample", "x.toml"]},
        )
        return jobs.job_at(folder)

    visitor = visit()
    page = visitor.page
    learned = page.locator(".learned img")  # an image for runs that have ended
    page.wait_for_function("document.querySelector('.learned img')?.naturalWidth > 400")
    assert page.locator(".learned a[download]").get_attribute("href") in learned.get_attribute("src")
    page.locator(".samples [data-try]").click()  # the button beside the run's samples
    box = page.locator(".sampling")
    box.locator(".board .sample").nth(3).wait_for()
    assert box.locator("#sampling-model").input_value() == "run:zorb-1" == box.locator("#sampling-sheet").input_value()
    page.wait_for_function("document.querySelector('#sampling-prompts').value === 'a cat\\na dog'")
    assert box.locator(".board .sample span").all_inner_texts() == ["Step 10", "Step 20"] * 2
    compare, strengths = box.locator("#sampling-compare"), box.locator("#sampling-strengths")
    assert not strengths.is_visible()  # only for a comparison of strengths
    compare.select_option("strengths")
    assert strengths.is_visible()
    strengths.fill("no number")  # only read where strengths are compared
    box.get_by_role("button", name="All files of this run").click()
    page.wait_for_function("document.querySelector('#sampling-compare').value === 'files'")
    ends = "list => list.map((e) => [e.title, e.scrollWidth - e.clientWidth - e.scrollLeft])"
    page.set_viewport_size({"width": 390, "height": 844})
    paths = box.locator(".files .file > input:first-of-type")
    for field in paths.all()[:2]:  # the end of a path tells the files of a run apart
        field.focus()
        field.blur()
    files = [str(served[1] / "out" / f"zorb-{step}.safetensors") for step in (10, 20)]
    page.wait_for_function(f"list => ({ends})(list).every(([, more]) => more < 2)", arg=paths.element_handles())
    assert [title for title, _ in paths.evaluate_all(ends)] == [*files, ""]
    box.get_by_role("button", name="Generate", exact=True).click()
    box.locator(".board .sample span", has_text="zorb-20").wait_for()
    assert [word for word in commands[0] if word.startswith("--lora=")] == [f"--lora={file}=1" for file in files]
    box.locator(".board .sample").first.click()
    viewer = page.locator("dialog.viewer")
    viewer.wait_for()
    assert viewer.locator(".at option").all_inner_texts() == ["zorb-10 · 1 of 2", "zorb-20 · 2 of 2"]
    assert viewer.locator(".other option:checked").inner_text() == "zorb-20"
    page.keyboard.press("Escape")
    page.locator(".board .strip").first.evaluate("e => e.append(...[1, 2].map(() => e.lastChild.cloneNode(true)))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert reader.find_run("zorb-1").state == "finished"


@pytest.mark.browser
def test_an_embedding_with_a_control_image_is_tried_and_its_job_speaks_the_readers_language(visit, served, monkeypatch):
    """From a run that was started in a shell: its paths are relative, and it has no TOML."""
    root, script = served[1], "sdxl_train_textual_inversion"
    for name in ("base.safetensors", "words/zorb.safetensors", "edges.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    folder = root / "words" / "runs" / "word-1"
    folder.mkdir(parents=True)
    config = {"model": {"pretrained_model_name_or_path": "base.safetensors"}, "embedding": {"token_string": "zorb"}}
    layout.store(
        folder / layout.RUN,
        {
            "id": "word-1",
            "script": script,
            "state": "finished",
            "started": 3.0,
            "folder": str(root),
            "output_dir": str(root / "words"),
            "output_name": "zorb",
            "config": config,
        },
    )
    saved = {"kind": "saved", "file": str(root / "words" / "zorb.safetensors"), "step": 1}
    (folder / layout.PROGRESS).write_text(json.dumps(saved) + "\n", "utf-8")
    registry.add_pointer(folder)
    started = []

    def begin(kind, words, folder):
        started.append((folder, words))
        doing = {"text": Message("generating"), "done": 1, "total": 2}
        layout.store(
            folder / jobs.JOB,
            {
                "kind": "sample",
                "state": "running",
                "started": time.time(),
                "doing": doing,
                "arguments": words,
                **process.identity(),
            },
        )
        return jobs.job_at(folder)

    monkeypatch.setattr(jobs, "start_job", begin)
    page = visit(locale="zh-CN").page
    page.locator(".acts [data-try='word-1']").click()
    box = page.locator(".sampling")
    page.wait_for_function("document.querySelector('#sampling-lora-first').value.endsWith('zorb.safetensors')")
    box.locator("#sampling-prompts").fill("a zorb")
    box.locator("#sampling-controlnet_image").fill(str(root / "edges.png"))
    box.locator("button.go").click()
    box.get_by_text("正在生成 1 / 2").wait_for()
    ((place, words),) = started
    assert read_toml(words[1]) == {"pretrained_model_name_or_path": str(root / "base.safetensors")}
    assert "--word=zorb" in words and f"--lora={root / 'words' / 'zorb.safetensors'}=1" in words
    assert (place / "prompts.txt").read_text() == f"a zorb --cn {root / 'edges.png'}\n"
    Image.new("RGB", (32, 32)).save(root / "made.png")
    made = {"columns": ["zorb", "no zorb"], "rows": ["a zorb"], "folder": str(root)}
    layout.store(place / jobs.RESULT, {**made, "files": [[str(root / "made.png"), None]]})
    box.locator(".board .sample").wait_for()
    assert box.locator("#sampling-sheet").input_value() == f"job:{place.name}"  # its name stands above its images
    failed = ConfigError("{path} does not exist", path="edges.png").said
    layout.store(
        place / jobs.JOB, {**layout.load_facts(place / jobs.JOB), "state": "failed", "error": failed, "doing": None}
    )
    box.locator(".cause", has_text="edges.png 不存在").wait_for()


def test_an_original_that_the_page_may_not_read_leaves_no_broken_image(visit, served, tmp_path):
    folder = run_with_samples(served[1], "painted-1")
    record = folder / layout.PROGRESS
    events = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    originals = {0: served[1] / "original.png", 1: tmp_path / "outside.png"}
    for path in originals.values():
        Image.new("RGB", (32, 32), (20, 90, 200)).save(path)
    for event in events:
        if event["kind"] == "sample":
            event["images"] = {"control_image_path": [str(originals[event["number"]])]}
    record.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    visitor = visit()
    shown = visitor.page.locator(".sample.original")
    wait_for(lambda: shown.count() == 1, 30)
    shown.locator("img").evaluate("image => image.decode()")
    shown.click()
    viewer = visitor.page.locator("dialog.viewer")
    viewer.locator(".right", has_text="Original").wait_for()
    assert viewer.locator(".left").inner_text() == "Step 10"


def test_a_sample_that_is_deleted_while_the_page_is_open_leaves_a_sentence(visit, served):
    """In the strips of the panel and of Try it, in the table of a run's page, and in the dialog over all of them."""
    folder = run_with_samples(served[1], "deleted-1")
    visitor = visit()
    page = visitor.page
    page.locator(".live .sample img").nth(3).wait_for()
    (served[1] / "out" / "20_0.png").unlink()
    page.locator(".live .sample").first.click()  # the newest of the first prompt
    viewer = page.locator("dialog.viewer")
    viewer.locator(".under + .gone").wait_for()
    assert viewer.locator(".right").inner_text() == "Step 20"
    assert not viewer.locator(".over + .gone").is_visible()  # the other one is there
    page.keyboard.press("ArrowLeft")
    viewer.locator(".under + .gone").wait_for(state="hidden")
    page.keyboard.press("Escape")
    for name in ("10_0.png", "10_1.png", "20_1.png"):
        (served[1] / "out" / name).unlink()
    fail = "list => list.forEach((image) => image.dispatchEvent(new Event('error')))"  # as the browser keeps some
    page.locator(".live .sample img").evaluate_all(fail)
    wait_for(lambda: page.locator(".live .strip .gone").count() == 4, 30)
    assert page.locator(".live .sample").count() == 0
    page.goto(f"{page.url.split('#')[0]}#runs/{folder.name}")
    page.locator(".run-page, .run-body").first.wait_for()
    assert page.locator(".gallery .shot").count() == 0
    visitor.complaints.clear()  # a browser writes what is gone into its console
