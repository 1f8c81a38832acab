"""The room Data: the images and captions of a folder, and changes that can be undone.

Every request is JSON (json_api.py) and names its folder; the server only caches folders. Long work runs on a thread,
and the browser polls for its progress.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.responses import Response

from kohya_gui.dataset import settings
from kohya_gui.server import allowed_folders, paths
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler, refused
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem, Report
from library.config.run_config import RunConfig
from library.curation import changes, selection, sources, tags, thumbs, trash
from library.curation.collection import ImageCollection, Picture
from library.curation.selection import PICTURE_KINDS
from library.curation.tags import Edit
from library.curation.work import BackgroundTask

PAGE_SIZE, MAX_PAGE_SIZE = 48, 200  # images per response: by default, and at most
TAGS, SAMPLES = 400, 6
COMPARED_PAGE_SIZE, MAX_NAMES = 24, 20_000  # compared captions in a response, and images in a request
POLL_AFTER = 0.6  # seconds to wait for a job before the browser has to poll
MAX_FOLDERS = 4  # folders in memory
MAX_TASKS = 50  # jobs in memory, finished ones included


class DatasetTab:
    """The tab. Create it inside `gr.Blocks`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.collections: OrderedDict[str, ImageCollection] = OrderedDict()
        self.works: OrderedDict[str, BackgroundTask] = OrderedDict()
        self.busy = threading.Lock()
        gr.HTML(settings.dataset_tab_html(), js_on_load="window.kohya.mountImages(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {
            "images_open": self.open,
            "images_work": self.work,
            "images_stop": self.stop,
            "images_page": self.page,
            "images_caption": self.caption,
            "images_tags": self.tags,
            "images_edit": self.edit,
            "images_remove": self.remove,
            "images_compare": self.compare,
            "images_prepare": self.prepare,
            "images_history": self.history,
            "images_undo": self.undo,
            "images_changed": self.changed,
            "images_put_back": self.put_back,
        }

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"images_thumb": self.thumb}

    # ---- showing

    def open(self, request: ApiRequest) -> JsonObject:
        """Scan a folder again."""
        folder, values, script = request.text("folder"), request.values("settings"), request.text("script")
        config = settings.config_of_tab(folder, values, self.roots, script, request.values("taken"))
        world, trigger = max(1, request.number("processes", 1, 4096)), request.text("trigger")
        return self._begin(lambda report: self._overview(self._scan(config, world, report), trigger))

    def page(self, request: ApiRequest) -> JsonObject:
        """Return a page of the filtered images."""
        collection = self.collection(request)
        matching = self._select(collection, request)
        start = request.number("start")
        start = start if start < len(matching) else max(0, (len(matching) - 1) // PAGE_SIZE * PAGE_SIZE)
        shown = matching[start : start + max(1, request.number("count", PAGE_SIZE, MAX_PAGE_SIZE))]
        rows = [row(collection, p, trigger_of(request)) for p in shown]
        return {"rows": rows, "start": start, "total": len(matching)}

    def tags(self, request: ApiRequest) -> JsonObject:
        """Return the tags in the captions of the filtered images, with their counts."""
        collection = self.collection(request)
        captions = (p.caption or "" for p in self._select(collection, request) if not p.foreign)
        counts = tags.frequencies(captions, collection.config.captions.caption_separator, request.text("prefix"))
        return {"tags": counts[:TAGS], "more": max(0, len(counts) - TAGS)}

    def history(self, request: ApiRequest) -> JsonObject:
        return {"past": past(self.collection(request).root)}

    def changed(self, request: ApiRequest) -> JsonObject:
        """Captions before and after a change, page by page."""
        collection, start = self.collection(request), request.number("start")
        pictures = {os.path.realpath(p.caption_file): p for p in reversed(collection.pictures) if p.caption_file}
        changed_captions = [
            (pictures[str(change.path)], change)
            for change in trash.changed_texts(collection.root, request.text("change"))
            if str(change.path) in pictures
        ]
        rows = [
            {"before": change.before, "after": change.after, "now": change.now, **row(collection, picture, None)}
            for picture, change in changed_captions[start : start + COMPARED_PAGE_SIZE]
        ]
        names = [picture.name for picture, change in changed_captions if change.now == change.after]
        return {"rows": rows, "total": len(changed_captions), "start": start, "names": names[:MAX_NAMES]}

    def thumb(self, query: Any) -> Response:
        """Return a thumbnail of an image."""
        path = paths.existing_file(query.get("path"), self.roots, sorted(thumbs.extensions()), "image")
        side = query.get("side", "")
        side = int(side) if side in map(str, thumbs.SIDES) else thumbs.SIDES[0]
        thumbnail = thumbs.thumb(path, side, upright=query.get("upright") == "true")
        # The address contains the time of the image's last change.
        headers = {"Cache-Control": "private, max-age=86400", "Content-Security-Policy": "default-src 'none'"}
        return Response(thumbnail, media_type="image/webp", headers=headers)

    # ---- changing

    def caption(self, request: ApiRequest) -> JsonObject:
        """Replace the caption of an image."""
        collection, name = self.collection(request), request.text("name")
        expected = None if request.fields.get("expected") is None else request.text("expected")
        has = trigger_of(request)
        try:
            picture = changes.change_caption(collection, name, request.text("text"), expected)
        except ConfigError as error:
            picture_now = collection.known.get(name)
            if picture_now is None:
                return refused(error)
            return {"said": str(error), "row": row(collection, picture_now, has)}
        return {"row": row(collection, picture, has), **self._overview(collection, request.text("trigger"))}

    def edit(self, request: ApiRequest) -> JsonObject:
        """Preview an edit of tags, or apply it."""
        collection = self.collection(request)
        separator = collection.config.captions.caption_separator
        change = Edit(
            request.text("action"),
            request.text("find"),
            request.text("put"),
            request.flag("at_end"),
            request.flag("match_case"),
            separator,
        )
        selected = self._select(collection, request)
        if not request.flag("apply"):
            changed = changes.preview(selected, change)
            shown = [{"name": p.name, "before": p.caption or "", "after": after} for p, after in changed[:SAMPLES]]
            return {"changes": len(changed), "of": len(selected), "samples": shown}
        return self._change(
            collection, request, lambda report: {"done": changes.edit_tags(collection, selected, change, report)}
        )

    def remove(self, request: ApiRequest) -> JsonObject:
        """Move images into the folder's trash."""
        collection, names = self.collection(request), request.texts("names")
        if not names:
            raise ConfigError("no image is chosen")
        return self._change(collection, request, lambda report: {"done": changes.remove_images(collection, names)})

    def compare(self, request: ApiRequest) -> JsonObject:
        """Find duplicate and similar images."""
        collection, trigger = self.collection(request), request.text("trigger")

        def work(report: Report) -> JsonObject:
            changes.find_similar_groups(collection, report)
            return self._overview(collection, trigger)

        return self._begin(work)

    def prepare(self, request: ApiRequest) -> JsonObject:
        """Sort images into a folder named for training: <repeats>_<words>."""
        collection, how = self.collection(request), request.text("how")
        repeats, words = request.number("repeats", 1), request.text("words")
        if how == "rename":
            folder = request.text("place")
            return self._change(
                collection, request, lambda report: {"made": changes.rename(collection, folder, repeats, words)}
            )
        if how == "gather":
            return self._change(
                collection, request, lambda report: {"made": changes.gather(collection, repeats, words)}
            )
        if how == "bring":
            source = paths.existing_folder(request.text("source"), self.roots, settings.SOURCE_LABEL)
            return self._change(
                collection, request, lambda r: {"made": changes.bring(collection, source, repeats, words, r)}
            )
        raise ConfigError("how is {how}: use rename, gather or bring", how=repr(how))

    def undo(self, request: ApiRequest) -> JsonObject:
        """Undo the last change."""
        collection = self.collection(request)

        def work(report: Report) -> JsonObject:
            done = trash.undo(collection.root, report)
            return {
                "undone": done.title,
                "count": done.count,
                "left": list(done.left[:SAMPLES]),
                "lefts": len(done.left),
            }

        return self._change(collection, request, work)

    def put_back(self, request: ApiRequest) -> JsonObject:
        """Restore the captions from before a change."""
        collection, names, change = self.collection(request), request.texts("names"), request.text("change")
        if not names:
            raise ConfigError("no image is chosen")

        def work(report: Report) -> JsonObject:
            done, left = changes.restore_captions(collection, change, names)
            return {"done": done, "left": left}

        return self._change(collection, request, work)

    # ---- long jobs

    def work(self, request: ApiRequest) -> JsonObject:
        """Return the progress of a job, or its result."""
        work = self.works.get(request.text("work"))
        if work is None:
            raise ConfigError("this task does not exist any more: open the folder again")
        return self._task_state(work, 0.3)

    def stop(self, request: ApiRequest) -> JsonObject:
        """Request a job to stop."""
        if work := self.works.get(request.text("work")):
            work.stop()
        return {}

    def _begin(self, work: Callable[[Report], JsonObject]) -> JsonObject:
        task = BackgroundTask(work)
        with self.busy:
            self.works[task.id] = task
            while len(self.works) > MAX_TASKS:
                self.works.popitem(last=False)
        return self._task_state(task, POLL_AFTER)

    def _task_state(self, work: BackgroundTask, seconds: float) -> JsonObject:
        if not work.wait(seconds):
            return {"work": work.id, "phase": work.phase, "done": work.done, "total": work.total}
        return {"error": work.error} if work.result is None else work.result

    def _change(
        self, collection: ImageCollection, request: ApiRequest, change: Callable[[Report], JsonObject]
    ) -> JsonObject:
        """Change a folder, and scan it again."""
        changes.changeable(collection)
        trigger = request.text("trigger")

        def work(report: Report) -> JsonObject:
            done = change(report)
            return {**done, **self._overview(self._scan(collection.config, collection.world, report), trigger)}

        return self._begin(work)

    # ---- folders in memory

    def collection(self, request: ApiRequest) -> ImageCollection:
        """Return the requested folder, as last scanned with these settings."""
        root = paths.allowed_path(request.text("folder"), self.roots, settings.IMAGE_FOLDER_LABEL)
        with self.busy:
            collection = self.collections.get(f"{root}|{request.text('collection')}")
        if collection is None:
            raise ConfigError("open the folder first")
        return collection

    def _scan(self, config: RunConfig, world: int, report: Report) -> ImageCollection:
        outside: dict[Problem, None] = {}
        try:
            collection = sources.scan_sources(config, report, lambda path: self._is_readable(path, outside), world)
        except ConfigError as error:
            to_allow = [problem for problem in outside if allowed_folders.asked_folder(problem)]
            raise ConfigError(*(to_allow or error.problems)) from None
        key = f"{collection.root}|{settings.settings_mark(config, world)}"
        with self.busy:
            before = self.collections.pop(key, None)
            if before is not None and before.compared:  # still valid for all remaining images
                names = collection.known
                collection.doubles = {name: at for name, at in before.doubles.items() if name in names}
                collection.double_groups, collection.compared = before.double_groups, True
            self.collections[key] = collection
            while len(self.collections) > MAX_FOLDERS:
                self.collections.popitem(last=False)
        return collection

    def _is_readable(self, path: str, outside: dict[Problem, None]) -> bool:
        try:
            paths.allowed_path(path, self.roots, settings.IMAGE_FOLDER_LABEL)
        except ConfigError as error:
            outside |= dict.fromkeys(error.problems)
            return False
        return True

    def _select(self, collection: ImageCollection, request: ApiRequest) -> list[Picture]:
        folder = None if request.fields.get("place") is None else request.text("place")
        return selection.select_pictures(
            collection, request.text("show", "all"), request.text("words"), folder, request.text("trigger")
        )

    def _overview(self, collection: ImageCollection, trigger: str) -> JsonObject:
        counts = selection.count_kinds(collection, trigger)
        return {
            "folder": str(collection.root),
            "collection": settings.settings_mark(collection.config, collection.world),
            "count": collection.count(),
            "notes": collection.notes,
            "unread_ending": collection.unread_ending,
            "problems": collection.problems,
            "fixed": collection.fixed,
            "past": [] if collection.fixed else past(collection.root),
            "places": list(settings.image_sources(collection)),
            "kinds": dict(counts),
            "compared": collection.compared,
            "calm": ["reg", "held", *(["turned"] if collection.config.data.exif_rotation else [])],
            "titles": {
                **{kind: title for kind, (title, _) in PICTURE_KINDS.items()},
                "trigger": "Without the trigger word",
            },
            "captioned": sum(bool(p.words) and not p.foreign for p in collection.pictures),
        }


def trigger_of(request: ApiRequest) -> Callable[[str], bool] | None:
    return tags.trigger(request.text("trigger")) if request.text("trigger").strip() else None


def row(collection: ImageCollection, picture: Picture, has: Callable[[str], bool] | None) -> JsonObject:
    """Return an image as JSON for the page."""
    fit, group = picture.fit, collection.doubles.get(picture.name)
    return {
        "name": picture.name,
        "path": picture.path,
        # Whole nanoseconds would exceed JavaScript's exact integers.
        "version": picture.modified % 10**12,
        "size": picture.size,
        "bucket": fit.bucket if fit else None,
        "resized": fit.resized if fit else None,
        "seen": picture.seen,
        "cut": round(max(picture.cut), 3),
        "larger": round(picture.larger, 2),
        "repeats": picture.repeats,
        "caption": picture.caption,
        "foreign": picture.foreign,
        "unused": picture.unused,
        "broken": picture.broken,
        "turned": picture.turned,
        "upright": collection.config.data.exif_rotation,
        "trigger": has(picture.words) if has and picture.role != "reg" else None,
        "role": picture.role,
        "fixed": picture.fixed or collection.fixed,
        "double": "" if group is None else collection.double_groups[group]["how"],
        "group": group,
    }


def past(root: Path) -> list[JsonObject]:
    """Return the changes of a folder that can be undone."""
    return [
        {"id": change.id, "title": change.title, "when": change.when, "count": change.count}
        for change in trash.history(root)
    ]
