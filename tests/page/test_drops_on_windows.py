"""Files that are dropped while a window of the page is open above what takes them."""

import pytest

from tests.page.test_drops import draw, drop

pytestmark = pytest.mark.browser

WINDOWS_ABOVE = {"picker": ("button.pick:visible", "Cancel"), "models": (".find-models:visible", "Close")}


@pytest.mark.parametrize(("opener", "close"), WINDOWS_ABOVE.values(), ids=WINDOWS_ABOVE)
def test_what_is_dropped_on_a_window_is_refused_there_and_changes_nothing_behind_it(visit, tmp_path, opener, close):
    """It was loaded and sent all the same, and the answer was behind the window."""
    config = tmp_path / "dropped.toml"
    config.write_text("max_train_steps = 77\n")
    visitor = visit()
    visitor.room("Train")
    page, before = visitor.page, visitor.held()
    page.locator(opener).first.click()
    page.locator("dialog[open]").wait_for()
    for at in ("dialog[open]", "#top"):
        for path in (config, draw(tmp_path / "image.png")):
            drop(page, path, at=at)
            visitor.until("Close this window first", "dialog[open] [role=alert]")
            assert page.locator("dialog[open] .no-drop").count() == 1
    assert visitor.held() == before
    page.locator("dialog[open]").get_by_role("button", name=close, exact=True).click()
    page.locator("dialog[open]").wait_for(state="detached")
    drop(page, config)
    visitor.until("Loaded dropped.toml")
    page.locator(opener).first.click()
    page.locator("dialog[open]").wait_for()
    assert "Close this window first" not in page.locator("dialog[open]").inner_text()
    page.keyboard.press("Escape")


def test_a_config_that_is_dropped_while_the_presets_are_shown_is_loaded_in_sight(visit, tmp_path):
    config = tmp_path / "dropped.toml"
    config.write_text("max_train_steps = 77\n")
    visitor = visit()
    visitor.room("Train")
    visitor.click("Presets")
    visitor.page.locator(".sheet:popover-open").wait_for()
    drop(visitor.page, config, at=".sheet:popover-open")
    visitor.until("Loaded dropped.toml")
    assert not visitor.page.locator(".sheet:popover-open").count()
