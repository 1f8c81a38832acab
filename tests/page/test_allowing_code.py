"""Code that a form names and this program does not list: the page asks for confirmation before any of it runs."""

import json
import sys

import pytest

from kohya_gui.server import allowed_folders
from library.runs import reader
from tests.page.test_allowing import asking, home, place, visitor  # noqa: F401
from tests.unlisted_code import write_package

pytestmark = pytest.mark.browser

NAMES = {
    "optimizer_type": "page_code.classes.Own",
    "lr_scheduler_type": "page_code.classes.Schedule",
    "network_module": "page_code.network",
}
WRONG = {
    "optimizer_type": {
        "page_code.classes.Other": "page_code.classes.Other is not a subclass of Optimizer",
        "page_code.classes.Schedule": "page_code.classes.Schedule is not a subclass of Optimizer",
        "page_code.classes.Own2": "page_code.classes has no Own2",
        "page_code.gone.Own": "there is no module page_code.gone",
        "subprocess.Popen": "subprocess is part of Python itself",
    },
    "lr_scheduler_type": {"page_code.classes.Own": "page_code.classes.Own is not a subclass of LRScheduler"},
    "network_module": {"page_code.classes": "page_code.classes has no create_network"},
}


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that an unlisted package writes when it is imported."""
    mark = tmp_path / "mark"
    write_package(tmp_path / "site", "page_code", mark)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return mark


@pytest.fixture
def ready(visitor, place):  # noqa: F811
    """A form that could start a training, with all folders allowed."""
    for name in ("base", "images", "out"):
        (place / name).mkdir()
    allowed_folders._store([place / "base", place / "images", place / "out"], [])
    visitor.fill(
        pretrained_model_name_or_path=place / "base" / "m.safetensors",
        train_data_dir=place / "images",
        output_dir=place / "out",
        output_name="cat",
        max_train_steps="20",
        resolution="512",
    )
    return visitor


def stored():
    return json.loads(allowed_folders.allowed_file().read_text())["code"]


@pytest.mark.parametrize("option", NAMES)
def test_code_needs_confirmation_by_name_before_it_runs(ready, mark, option):
    page, name = ready.page, NAMES[option]
    ready.put(**{option: name})
    for button in ("Train", "Check", "Add to queue"):
        ready.click(button)
        ready.until(f"{name} is code that this program does not list, and can do all that you can. Allow it to run?")
        (allow,) = page.locator(".message:visible .allow").all()
        assert allow.inner_text() == "Allow this code" and allow.get_attribute("data-allow") == f"code:{name}"
        page.locator(".message:visible .away").click()  # dismissing means no, so the question comes again
        assert stored() == [] and not reader.runs() and not mark.exists() and "page_code" not in sys.modules
    ready.click("Train")
    page.locator(".message:visible .allow").click()
    ready.state("finished")  # the refused action is then carried out
    assert stored() == [name] and not mark.exists() and "page_code" not in sys.modules  # the page itself runs none
    ready.click("Check")
    ready.until("No problems found")
    assert page.locator(".allow").count() == 0


@pytest.mark.parametrize("option", WRONG)
def test_invalid_code_name_is_rejected_without_confirmation(ready, mark, option):
    for name, words in WRONG[option].items():
        ready.put(**{option: name})
        ready.click("Train")
        ready.until(words)
        assert ready.page.locator(".allow").count() == 0 and stored() == []
        assert not reader.runs() and not mark.exists() and "page_code" not in sys.modules


def test_the_words_are_the_readers_own(ready, mark):
    ready.page.locator("select.language").select_option("zh")
    ready.put(optimizer_type=NAMES["optimizer_type"], network_module="page_code.classes")
    ready.page.get_by_role("button", name="检查", exact=True).locator("visible=true").click()
    ready.page.locator(".message:visible .allow", has_text="允许").wait_for()
    assert "网络模块：page_code.classes" in ready.said()  # one colon instead of two
    assert "page_code.classes.Own" in ready.said() and "Allow" not in ready.said() and not mark.exists()
    ready.page.locator("select.language").select_option("en")
