"""Several GPUs in a real browser: chosen by name and memory for each run, one each in the queue, curves of a run."""

import json
import re

import pytest

from kohya_gui.form.tabs import TABS
from library.runs import gpu_slots, machine, reader
from library.runs.record import Record
from tests.page.test_browser import FAINT, SMALL
from tests.page.test_runs import queue_tab, shows
from tests.training import wait_for

pytestmark = pytest.mark.browser
GPUS = [
    machine.GpuStatus("0", "NVIDIA RTX 4090", 18.2, 24.0, 97, 71, 320.5),
    machine.GpuStatus("1", "NVIDIA RTX 3060", 0.5, 12.0, 0, 40, 20.0),
]


@pytest.fixture
def two(monkeypatch, visit):
    visitor = visit()
    for tab in TABS:  # each form is built by the first visit and stays, so none may begin with these GPUs
        visitor.tab(tab.title)
    monkeypatch.setenv(gpu_slots.VISIBLE, "0,1")
    for question in ("now", "known"):
        monkeypatch.setattr(machine.GPUS, question, lambda: GPUS)


def pressed(visitor):
    buttons = visitor.page.locator("#lora-form .gpus button")
    return buttons.evaluate_all("all => all.filter(e => e.ariaPressed === 'true').map(e => e.dataset.gpu)")


def test_gpus_are_chosen_by_name_and_runs_on_them_go_side_by_side(visit, served, two, tmp_path):
    visitor, held = visit(), tmp_path / "out" / "held"
    held.parent.mkdir()
    held.touch()  # keeps trainings with this output folder running
    chooser = visitor.page.locator("#lora-form .gpus")
    gpu, number = [chooser.locator(f"[data-gpu='{name}']") for name in "01"], visitor.page.locator("#lora-gpu_ids")
    gpu[0].wait_for()
    assert "0 · NVIDIA RTX 4090" in gpu[0].inner_text() and "5.8 of 24.0 GB free" in gpu[0].inner_text()
    assert pressed(visitor) == [""]
    gpu[1].click()
    gpu[0].click()
    assert (number.input_value(), pressed(visitor)) == ("0,1", ["0", "1"])
    assert visitor.page.locator("#lora-num_processes").input_value() == "2"
    number.evaluate("e => { e.value = '1'; e.dispatchEvent(new Event('input', { bubbles: true })); }")
    assert pressed(visitor) == ["1"]  # typing presses the button
    theirs = served[1] / f"{tmp_path.name}.json"
    theirs.write_text(
        json.dumps(
            {
                "sdxl": True,
                "LoRA_type": "Standard",
                "multi_gpu": True,
                "num_processes": 2,
                "gpu_ids": "0, 1",
                "num_cpu_threads_per_process": 2,
            }
        )
    )
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(theirs))
    visitor.click("Load config")
    visitor.until(f"Loaded {theirs.name}")
    wait_for(lambda: pressed(visitor) == ["0", "1"], 60)
    assert (number.input_value(), visitor.page.locator("#lora-num_processes").input_value()) == ("0,1", "2")
    chooser.get_by_text("Any free GPU").click()
    ready = {
        "pretrained_model_name_or_path": "/m/base.safetensors",
        "train_data_dir": "/images",
        "resolution": "1024",
        "output_dir": held.parent,
        "max_train_steps": 3,
    }
    for name, choice in (("one", "1"), ("two", "0"), ("both", "01")):
        for at in "01":
            if (at in pressed(visitor)) != (at in choice):
                gpu[int(at)].click()
        visitor.fill(**ready, output_name=name)
        visitor.click("Add to queue")
        visitor.until(f"{name} is in the queue")
    queue_tab(visitor)
    shows(visitor, ("one", "running"), ("two", "running"), ("both", "waiting"))
    devices = visitor.page.locator(".devices li")
    wait_for(
        lambda: (
            [text.split("\n")[:2] for text in devices.all_inner_texts()]
            == [["GPU 0 · NVIDIA RTX 4090", "two"], ["GPU 1 · NVIDIA RTX 3060", "one"]]
        ),
        60,
    )
    assert "GPU 0, 1" in visitor.page.locator(".entry", has_text="both").inner_text()
    visitor.has_none(FAINT)
    visitor.tab("LoRA")
    visitor.page.reload()  # requests the current users again
    visitor.until("used by two", "#lora-form .gpus [data-gpu='0']")
    held.unlink()
    queue_tab(visitor)
    shows(visitor, ("both", "finished"), ("two", "finished"), ("one", "finished"))


def test_what_gpus_do_is_shown_while_a_run_works(visit, two, tmp_path):
    with Record.start({}, "sdxl_train", tmp_path / "out", "fox", "SDXL fine-tune") as run:
        run.note(devices=["0"])
        run.step({"step": 1, "loss": 0.5, "lr": 1e-4})
        lines = [
            {
                "t": run.facts["started"] + 60 * at,
                "kind": "gpu",
                "spilled": 1.5,
                "gpus": [
                    {
                        "index": "0",
                        "name": "x",
                        "used": 4.0 * at,
                        "total": 24.0,
                        "utilization": 97,
                        "temperature": 71,
                        "power": 320.5,
                    }
                ],
            }
            for at in range(5)
        ]
        with (run.folder / "progress.jsonl").open("a", encoding="utf-8") as progress:
            progress.writelines(json.dumps(line) + "\n" for line in lines)
        visitor = visit()
        charts = visitor.page.locator(".gpu-charts .chart")
        charts.nth(3).wait_for()
        figures = ["GPU memory 16 GB", "GPU load 97 %", "Temperature 71 °C", "GPU power 320.5 W"]
        captions = charts.locator("figcaption")
        wait_for(lambda: [re.sub(r"\s+", " ", text) for text in captions.all_inner_texts()] == figures, 60)
        visitor.until("1.5 GiB of this training are in CPU memory", ".spilled")
        for mode in ("light", "dark"):
            visitor.page.emulate_media(color_scheme=mode)
            visitor.has_none(FAINT)
        visitor.page.set_viewport_size({"width": 390, "height": 844})
        visitor.page.get_by_role("button", name="Details of the run").click()
        visitor.page.wait_for_function("document.documentElement.scrollWidth === 390")
        visitor.has_none(SMALL)
        visitor.page.emulate_media(color_scheme="light")
    assert reader.runs()[0].state == "finished"
