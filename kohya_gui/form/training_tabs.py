"""The training tabs: their contents, loaded on demand, and their buttons."""

import secrets
from collections.abc import Iterator, Mapping
from html import escape
from threading import Lock
from urllib.parse import urlencode

import gradio as gr
from starlette.responses import Response

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.requested import of_tab
from kohya_gui.form.tab import TrainingTab
from kohya_gui.form.tabs import FIRST_KIND
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler
from library.config.json_types import JsonObject


# Why: docs/decisions/2026-11-23-tabs-come-when-opened.md
class TrainingTabs:
    """Serves all training tabs. A tab's contents stay the same while the server runs, so browsers cache them; `mark`
    distinguishes them from those of another server at the same address."""

    def __init__(self, tabs: Mapping[str, TrainingTab]) -> None:
        self.tabs, self.mark = tabs, secrets.token_hex(4)
        self.making = Lock()  # otherwise a second request would build the tab again, and slow down the first

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"press": self.press}

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"form": self.show}

    def place(self, tab: str) -> None:
        """Create the placeholder of a tab. Call it inside `gr.Blocks`."""
        container = f'<div class="training" data-tab="{tab}" data-mark="{self.mark}"></div>'
        gr.HTML(container, js_on_load="window.kohya.mountTraining(element)", apply_default_css=False)

    def ahead(self) -> str:
        query = urlencode({"tab": FIRST_KIND, "of": self.mark})
        return f'<link rel="preload" as="fetch" crossorigin href="./own/form?{escape(query)}">'

    def press(self, request: ApiRequest) -> JsonObject:
        return of_tab(self.tabs, request.text("tab")).press(request)

    def show(self, query: Mapping[str, str]) -> Response:
        """Return the contents of a tab."""
        headers = {"cache-control": "private, max-age=31536000, immutable"}
        tab = of_tab(self.tabs, query.get("tab", ""))
        with self.making:
            markup = tab.markup
        return Response(markup, media_type="text/html", headers=headers)

    def prepare(self) -> None:
        self.show({"tab": FIRST_KIND})


class Forms(Mapping[str, SettingsForm]):
    """The forms of the training tabs by name, each built on first use."""

    def __init__(self, tabs: Mapping[str, TrainingTab]) -> None:
        self.tabs = tabs

    def __getitem__(self, name: str) -> SettingsForm:
        return self.tabs[name].form

    def __iter__(self) -> Iterator[str]:
        return iter(self.tabs)

    def __len__(self) -> int:
        return len(self.tabs)

    def __contains__(self, name: object) -> bool:
        return name in self.tabs
