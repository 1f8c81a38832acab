"""The page's bundled script, and the files that its head requests."""

import re

import pytest
from starlette.testclient import TestClient

from kohya_gui.gradio_host import preloads
from kohya_gui.server import scripts
from kohya_gui.server.scripts import bundle_modules

MODULES = {
    "main.js": """import { twice as double } from "./a/b.js";
import * as other from "./a/b.js";
import "./a/c.js";
export const seen = [double(4), other.five, new URL(import.meta.url).pathname.endsWith("/main.js")];
""",
    "a/b.js": """import { two } from "./c.js";
export const five = 5;
export function twice(number) { return number * two; }
""",
    "a/c.js": "export const two = 2;\n",
}


@pytest.mark.browser
def test_modules_run_in_order_and_find_what_others_export(tmp_path, chromium):
    (tmp_path / "a").mkdir()
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    page = chromium.new_page()
    page.route("**/*", lambda route: route.fulfill(body="<head></head>", content_type="text/html"))
    page.goto("http://page.test/")
    page.add_script_tag(
        type="module", content=bundle_modules(tmp_path, "main.js") + 'window.found = modules["main.js"].seen;'
    )
    assert page.wait_for_function("window.found").json_value() == [8, 5, True]
    page.close()


@pytest.mark.parametrize(
    "text",
    [
        "export default 5;",
        "export let moving = 1;",
        'import main from "./main.js";',
        'import "./main.js";',
        "export { };",
    ],
)
def test_what_it_cannot_put_together_is_refused(tmp_path, text):
    (tmp_path / "main.js").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=r"main\.js"):
        bundle_modules(tmp_path, "main.js")


def test_every_script_of_the_page_is_in_its_own():
    sent = scripts.SCRIPT.decode()
    own = (file for file in scripts.PAGE_FOLDER.rglob("*.js") if "vendor" not in file.parts)
    for file in own:
        assert f"// {file.relative_to(scripts.PAGE_FOLDER).as_posix()}\n" in sent


def test_the_installed_gradio_says_which_files_components_need():
    names = preloads.find_needed_files(["textbox", "tabs"])
    assert len(names) > 25 and all((preloads.ASSETS_FOLDER / name).is_file() for name in names)
    assert (
        len(preloads.find_needed_files(["textbox", "tabs", "html"])) > len(names)
        and not preloads.find_needed_files(["no such kind"])[60:]
    )
    lines, sheets, files = preloads.head(names)
    ((address, styles),) = files.items()
    assert "stylesheet" not in lines and f'href=".{address}"' in sheets and styles.count(b"{") > 50
    assert (
        sheets.count(" disabled ") == len([name for name in names if name.endswith(".css")]) - 1
    )  # the head's own sheet is not disabled


def test_styles_of_components_stand_behind_those_of_gradios_head():
    """The order in which Gradio itself loads them. Of two rules with the same specificity the later one wins: in
    another order, text fields were white in dark mode."""

    async def gradio(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        whole = (preloads.ASSETS_FOLDER.parent / "index.html").read_bytes()
        await send({"type": "http.response.body", "body": whole})

    lines, sheets, _ = preloads.head(preloads.find_needed_files(["textbox"]))
    html = TestClient(scripts.ScriptTags(gradio, lines, sheets)).get("/").text
    style_sheets = re.findall(r'<link rel="stylesheet"[^>]*? href="([^"]*)"', html)
    assert re.search(r"assets/index-[\w-]+\.css$", style_sheets[0]) and style_sheets[1].endswith("/gradio.css")


def test_another_gradio_is_loaded_without(monkeypatch, tmp_path):
    monkeypatch.setattr(preloads, "ASSETS_FOLDER", tmp_path / "assets")
    assert preloads.find_needed_files(["textbox"]) == [] and preloads.head([]) == ("", "", {})
