"""The page as a whole, and the server that shows it."""

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from kohya_gui.api.app import ApiV1
from kohya_gui.dataset.images import DatasetTab
from kohya_gui.dataset.masks import MaskEditing
from kohya_gui.form.api import FormApi
from kohya_gui.form.caches import CacheApi
from kohya_gui.form.demo import DemoApi
from kohya_gui.form.print_command import CommandPrinter
from kohya_gui.form.sections import visibility
from kohya_gui.form.several import SeveralValues
from kohya_gui.form.tab import TrainingTab
from kohya_gui.form.tabs import FAMILY_TITLES, FIRST_KIND, TABS, in_order_of_kohya_ss
from kohya_gui.form.text_editor import TextEditor
from kohya_gui.form.training_tabs import Forms, TrainingTabs
from kohya_gui.gradio_host import preloads
from kohya_gui.gradio_host.assets import ASSETS_FOLDER, Assets, contents
from kohya_gui.gradio_host.gradio_import import without_apps
from kohya_gui.gradio_host.routes import Protected, Routes
from kohya_gui.gradio_host.theme import THEME, THEME_HEAD
from kohya_gui.i18n import texts
from kohya_gui.lab.lab import LabTab
from kohya_gui.look import look
from kohya_gui.models.models import ModelsApi
from kohya_gui.panel import monitor
from kohya_gui.panel.actions import RunActions
from kohya_gui.queue.queue import QueueTab
from kohya_gui.runs.runs import RunsRoom
from kohya_gui.sampling.sampling import SamplingTab
from kohya_gui.server import paths, scripts, vendored
from kohya_gui.server.allowed_folders import AllowedFolders, Roots
from kohya_gui.server.auth import AuthGate
from kohya_gui.server.json_api import JsonApi
from kohya_gui.server.picker import Picker
from kohya_gui.server.scripts import ScriptTags
from kohya_gui.server.serving import access_of, announce, bind, build_server_parser, is_private, root_prefix, serve
from kohya_gui.server.tensorboard_proxy import TensorboardProxy
from kohya_gui.server.uploads import ImageUploads
from kohya_gui.tools.commands import ToolCommands, ToolsTab
from library.config.environment import print_any_text
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.imports import without_collecting
from library.runs import watching

TITLE = "Kohya Trainer"


class Page(gr.Blocks):
    """The page, and the JSON API of its scripts."""

    def __init__(self, training: TrainingTabs, roots: Sequence[Path], **blocks_arguments: Any) -> None:
        self.service, self.training, self.roots = JsonApi(), training, roots
        self.first_files: list[Path | bytes] = []  # files of every first visit
        self.prepare_api: Callable[[], object] = lambda: None
        self.service.add(training.handlers, training.image_handlers)
        super().__init__(**blocks_arguments)

    def build_api(self, root_path: str) -> Any:
        """Return the API for scripts, whose modules take a tenth of a second to load."""
        from kohya_gui.api.building import build_api

        return build_api(self.roots, root_path)


def build_page(roots: Sequence[Path] = ()) -> Page:
    """Build the page. Only files below the folders in `roots` may be listed, read and written."""
    start_roots, roots = roots, roots or paths.find_roots()
    training = TrainingTabs({tab.id: TrainingTab(tab, roots) for tab in TABS})
    forms = Forms(training.tabs)
    blocks_arguments: JsonObject = {"analytics_enabled": False, "fill_width": True, "delete_cache": (3600, 3600)}
    with without_apps(), Page(training, roots, title=TITLE, **blocks_arguments) as page:
        gr.HTML(
            look.header(TITLE, training.mark, training.tabs),
            elem_id="top",
            js_on_load="window.kohya.mountHeader(); window.kohya.buildAhead()",
            apply_default_css=False,
        )
        with gr.Row(elem_id="page", equal_height=False):
            with (
                gr.Column(scale=3, min_width=0, elem_id="work"),
                gr.Tabs(selected="train", elem_id="rooms", overflow_behavior="wrap"),
            ):
                with gr.Tab("Data", id="data"):
                    images = DatasetTab(roots)
                with (
                    gr.Tab("Train", id="train"),
                    gr.Tabs(selected=FIRST_KIND, elem_id="kinds", overflow_behavior="wrap"),
                ):
                    for tab in in_order_of_kohya_ss():
                        with gr.Tab(tab.title, id=tab.id):
                            training.place(tab.id)
                with gr.Tab("Runs", id="runs"):
                    queue = QueueTab(forms, roots)
                    runs = RunsRoom(roots)
                with gr.Tab("Try it", id="try"):
                    sampling = SamplingTab(forms, {tab.id: tab.title for tab in TABS}, roots)
                with gr.Tab("Tools", id="tools"):
                    ToolsTab()
                with gr.Tab("Lab", id="lab"):
                    lab = LabTab(forms, {tab.id: tab.title for tab in TABS}, roots)
            with gr.Column(scale=2, min_width=0, elem_id="side"):
                panel = monitor.RunPanel()
    masks, uploads, actions = MaskEditing(roots, images.collection), ImageUploads(roots), RunActions(forms, roots)
    without_images = (
        *(panel, queue, lab, Picker(roots), ToolCommands(roots), CommandPrinter(roots), AllowedFolders(start_roots)),
        *(FormApi(forms, {tab.id: tab.kind for tab in TABS}, roots), SeveralValues(training.tabs)),
        *(TextEditor(training.tabs, roots), CacheApi(forms, roots), DemoApi(forms, roots), ModelsApi(forms, roots)),
    )
    for service in without_images:
        page.service.add(service.handlers)
    for service in (runs, images, sampling, actions):
        page.service.add(service.handlers, service.image_handlers)
    page.service.add(masks.handlers, masks.image_handlers, masks.piece_handlers)
    page.service.add(uploads.handlers, pieces=uploads.piece_handlers)
    page.service.add(texts.handlers())
    page.service.here_only.add("allow")  # only a browser on this computer may extend the page's roots
    return page


def application(page: Page, access: JsonObject, root_path: str = "") -> Any:
    """Return the page as an ASGI application, behind its access checks and compressed on the wire."""
    # Mounted, not launched: launch() queries the network for its own address, obeys a dozen environment variables, and
    # may open a public link in notebooks.
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page.service.attach(outer)
    # Why: docs/decisions/2026-11-20-own-server-instead-of-launch.md
    inner = gr.mount_gradio_app(
        outer,
        page,
        path="/",
        theme=THEME,
        head=THEME_HEAD + visibility(FAMILY_TITLES),
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        show_error=True,
        max_file_size="1mb",
        root_path=root_path or None,
    )
    mounted: Any = outer.router.routes[-1]  # Gradio appends its route, and returns the outer application
    page.app = mounted.app  # its queue passes requests to this
    # Gradio's queue polls for events a thousand times a second, although the page has none: a twentieth of a processor.
    page._queue.sleep_when_free = 0.02
    used = preloads.find_needed_files(sorted({block.get_block_name() for block in page.blocks.values()}))
    lines, sheets, styles = preloads.head(used)
    theme = f'<link rel="preload" as="style" href="./theme.css?v={page.theme_hash}">'
    tagged = ScriptTags(inner, page.training.ahead() + theme + look.HEAD + lines, sheets, monitor.styles)
    packed = GZipMiddleware(tagged, minimum_size=2000, compresslevel=4)
    page_files = scripts.SCRIPT_FILES | look.LOOK_FILES | styles | {"/theme.css": page.theme_css.encode()}
    with_tensorboard = TensorboardProxy(Assets(packed, page_files | vendored.FILES))
    page.first_files = [*page_files.values(), *(ASSETS_FOLDER / name for name in used)]
    with_api = ApiV1(with_tensorboard, lambda: page.build_api(root_prefix(root_path)))
    page.prepare_api = lambda: with_api.api
    return Protected(AuthGate(Routes(with_api, root_prefix(root_path)), **access))


def prepare_responses(page: Page) -> None:
    """Prepare the responses of a first visit, a third of a second of work, while the browser starts."""
    page.training.prepare()
    for file in page.first_files:
        contents(file, packed=True)
    page.prepare_api()


def main(argv: Sequence[str] | None = None) -> int:
    """Show the page until Ctrl+C. Return the exit code: 0, or 2 if the page cannot be shown."""
    print_any_text()
    arguments = build_server_parser().parse_args(argv)
    try:
        access = access_of(arguments)
        server_socket = bind(arguments.host, arguments.port)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for folder in paths.named_roots(arguments.root):
        if not folder.is_dir():  # perhaps a drive that is not connected yet
            print(f"note: there is no folder {folder} now; the page can use it once it exists", file=sys.stderr)
    roots = Roots(paths.find_roots(arguments.root), is_private(access, arguments.root_path))
    with without_collecting():
        page = build_page(roots)
        app = application(page, access, arguments.root_path)
    threading.Thread(target=prepare_responses, args=(page,), daemon=True).start()
    threading.Thread(target=watching.watch_forever, name="watch", daemon=True).start()
    announce(arguments, server_socket.getsockname()[1], access)
    serve(app, server_socket)
    return 0
