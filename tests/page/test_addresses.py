"""Addresses of rooms in a real browser: opened, reloaded, walked back, and dead ones."""

import pytest

from tests.curation.conftest import picture

pytestmark = pytest.mark.browser

# An address -> an element that is visible there, and nowhere else.
ROOMS = {
    "data": ".images",
    "train/dreambooth": "#dreambooth-form",
    "train/lora": "#lora-form",
    "train/textual-inversion": "#textual-inversion-form",
    "train/finetune": "#finetune-form",
    "train/lllite": "#lllite-form",
    "runs": ".queue",
    "queue": ".queue",
    "try": ".sampling",
    "tools": ".tools",
    "lab": ".lab",
}
# A dead address -> the room that is shown instead, and the words about it.
DEAD = {
    "nothing/here": ("train", "There is nothing at #nothing on this page."),
    "train/<b>x": ("train", "There is no kind of training named <b>x."),
    "tools/100%": ("tools", "There is no 100% here."),
}


def seen(page, selector):
    page.locator(selector).locator("visible=true").first.wait_for()


def test_every_room_has_an_address_that_opens_reloads_and_goes_back(visit, served):
    page = visit().page
    hash_of = "location.hash.slice(1)"
    for address, selector in ROOMS.items():
        page.evaluate("address => { location.hash = address; }", address)
        seen(page, selector)
        page.reload()
        seen(page, selector)
        assert page.evaluate(hash_of) == address
    assert page.locator("#side").is_visible()
    for address in [*ROOMS][-2::-1]:
        page.go_back()
        seen(page, ROOMS[address])
        page.wait_for_function("address => location.hash === `#${address}`", arg=address)
        assert page.locator("#side").is_visible() == (address not in ("runs", "queue"))
    page.go_forward()
    seen(page, "#dreambooth-form")
    for address, (room, words) in DEAD.items():
        page.evaluate("address => { location.hash = address; }", address)
        page.locator("#top .notices", has_text=words).wait_for()
        page.wait_for_function("room => location.hash === `#${room}`", arg=room)
    assert page.locator("#side").is_visible()

    # The user's own way: a tab is left as it is found again, and its folder is in the address.
    folder = served[1] / "addresses" / "1_cat & dog"
    folder.mkdir(parents=True, exist_ok=True)
    picture(1).save(folder / "1.png")
    page.get_by_role("tab", name="Data", exact=True).click()
    assert page.locator("#top .notices").inner_text() == ""
    page.locator("#images-folder").fill(str(folder))
    page.get_by_role("button", name="Open folder").click()
    page.locator(".images article").first.wait_for()
    page.wait_for_function("location.hash.startsWith('#data=/')")
    page.get_by_role("tab", name="Lab", exact=True).click()
    page.get_by_role("tab", name="Data", exact=True).click()
    assert page.evaluate("location.hash").endswith("1_cat%20%26%20dog")
    page.reload()
    page.locator(".images article").first.wait_for()
    page.locator("#dreambooth-form").wait_for(state="attached")  # for rooms that read forms, although none was opened
    page.evaluate("folder => { location.hash = `data=${folder}/gone`; }", str(folder))
    page.locator(".images .message.bad", has_text="gone does not exist").wait_for()
    page.wait_for_function("location.hash === '#data'")
