"""The data set tab: the images and captions of a folder, and changes that can be undone.

Every request is JSON (json_api.py) and names its folder; what the server remembers of a folder is only a cache. Long
work runs on a thread, and the browser polls for its progress.
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
from kohya_gui.server.json_api import ApiRequest, Handler, PictureHandler, refused
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Problem, Report
from library.config.run_config import RunConfig
from library.curation import changes, selection, sources, tags, thumbs, trash
from library.curation.collection import ImageCollection, Picture
from library.curation.selection import KINDS
from library.curation.tags import Edit
from library.curation.work import BackgroundTask

PAGE_SIZE, MAX_PAGE_SIZE = 48, 200  # images in a response: by default, and at most
TAGS, SAMPLES = 400, 6
COMPARED_PAGE_SIZE, MAX_NAMES = 24, 20_000  # compared captions in a response, and images in a request
POLL_AFTER = 0.6  # seconds to wait for a job before the browser has to poll
MAX_FOLDERS = 4  # folders in memory


class DatasetTab:
    """The tab. Create it inside `gr.Blocks`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.collections: OrderedDict[str, ImageCollection] = OrderedDict()
        self.works: OrderedDict[str, BackgroundTask] = OrderedDict()
        self.busy = threading.Lock()
        gr.HTML(settings.markup(), js_on_load="window.kohya.mountImages(element)", apply_default_css=False)

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
    def picture_handlers(self) -> dict[str, PictureHandler]:
        """What can be looked at."""
        return {"images_thumb": self.thumb}

    # ---- showing

    def open(self, sent: ApiRequest) -> JsonObject:
        """Scan a folder again."""
        taken, world = (sent.text("script"), sent.values("taken")), max(1, sent.number("processes", 1, 4096))
        config = settings.config_of(sent.text("folder"), sent.values("settings"), self.roots, *taken)
        trigger = sent.text("trigger")
        return self._begin(lambda report: self._overview(self._look(config, world, report), trigger))

    def page(self, sent: ApiRequest) -> JsonObject:
        """A page of the filtered images."""
        collection = self.collection(sent)
        found = self._wanted(collection, sent)
        start = sent.number("start")
        start = start if start < len(found) else max(0, (len(found) - 1) // PAGE_SIZE * PAGE_SIZE)
        shown = found[start : start + max(1, sent.number("count", PAGE_SIZE, MAX_PAGE_SIZE))]
        rows = [row(collection, p, trigger_of(sent)) for p in shown]
        return {"rows": rows, "start": start, "total": len(found)}

    def tags(self, sent: ApiRequest) -> JsonObject:
        """The tags in the captions of the filtered images, with their counts."""
        collection = self.collection(sent)
        captions = (p.caption or "" for p in self._wanted(collection, sent) if not p.foreign)
        found = tags.frequencies(captions, collection.config.captions.caption_separator, sent.text("prefix"))
        return {"tags": found[:TAGS], "more": max(0, len(found) - TAGS)}

    def history(self, sent: ApiRequest) -> JsonObject:
        """The changes made to a folder, the newest first."""
        return {"past": past(self.collection(sent).root)}

    def changed(self, sent: ApiRequest) -> JsonObject:
        """Captions before and after a change, page by page."""
        collection, start = self.collection(sent), sent.number("start")
        pictures = {os.path.realpath(p.caption_file): p for p in reversed(collection.pictures) if p.caption_file}
        found = [
            (pictures[str(one.path)], one)
            for one in trash.texts(collection.root, sent.text("change"))
            if str(one.path) in pictures
        ]
        rows = [
            {"before": one.before, "after": one.after, "now": one.now, **row(collection, picture, None)}
            for picture, one in found[start : start + COMPARED_PAGE_SIZE]
        ]
        names = [picture.name for picture, one in found if one.now == one.after]
        return {"rows": rows, "total": len(found), "start": start, "names": names[:MAX_NAMES]}

    def thumb(self, query: Any) -> Response:
        """A thumbnail of an image."""
        path = paths.present(query.get("path"), self.roots, sorted(thumbs.extensions()), "image")
        side = query.get("side", "")
        side = int(side) if side in map(str, thumbs.SIDES) else thumbs.SIDES[0]
        made = thumbs.thumb(path, side, upright=query.get("upright") == "true")
        # The address contains the time of the image's last change.
        headers = {"Cache-Control": "private, max-age=86400", "Content-Security-Policy": "default-src 'none'"}
        return Response(made, media_type="image/webp", headers=headers)

    # ---- changing

    def caption(self, sent: ApiRequest) -> JsonObject:
        """Replace the caption of an image."""
        collection, name = self.collection(sent), sent.text("name")
        expected = None if sent.fields.get("expected") is None else sent.text("expected")
        has = trigger_of(sent)
        try:
            picture = changes.caption(collection, name, sent.text("text"), expected)
        except ConfigError as error:
            known = collection.known.get(name)
            return refused(error) if known is None else {"said": str(error), "row": row(collection, known, has)}
        return {"row": row(collection, picture, has), **self._overview(collection, sent.text("trigger"))}

    def edit(self, sent: ApiRequest) -> JsonObject:
        """Preview an edit of tags, or apply it."""
        collection = self.collection(sent)
        separator = collection.config.captions.caption_separator
        change = Edit(
            sent.text("action"),
            sent.text("find"),
            sent.text("put"),
            sent.flag("at_end"),
            sent.flag("match_case"),
            separator,
        )
        wanted = self._wanted(collection, sent)
        if not sent.flag("apply"):
            found = changes.preview(wanted, change)
            shown = [{"name": p.name, "before": p.caption or "", "after": after} for p, after in found[:SAMPLES]]
            return {"changes": len(found), "of": len(wanted), "samples": shown}
        return self._change(
            collection, sent, lambda report: {"done": changes.edit_tags(collection, wanted, change, report)}
        )

    def remove(self, sent: ApiRequest) -> JsonObject:
        """Move images into the folder's trash."""
        collection, names = self.collection(sent), sent.texts("names")
        if not names:
            raise ConfigError("no image is chosen")
        return self._change(collection, sent, lambda report: {"done": changes.remove(collection, names)})

    def compare(self, sent: ApiRequest) -> JsonObject:
        """Find duplicate and similar images."""
        collection, trigger = self.collection(sent), sent.text("trigger")

        def work(report: Report) -> JsonObject:
            changes.compare(collection, report)
            return self._overview(collection, trigger)

        return self._begin(work)

    def prepare(self, sent: ApiRequest) -> JsonObject:
        """Sort images into a folder named for training: <repeats>_<words>."""
        collection, how = self.collection(sent), sent.text("how")
        repeats, words = sent.number("repeats", 1), sent.text("words")
        if how == "rename":
            folder = sent.text("place")
            return self._change(
                collection, sent, lambda report: {"made": changes.rename(collection, folder, repeats, words)}
            )
        if how == "gather":
            return self._change(collection, sent, lambda report: {"made": changes.gather(collection, repeats, words)})
        if how == "bring":
            source = paths.folder(sent.text("source"), self.roots, "source")
            return self._change(
                collection, sent, lambda r: {"made": changes.bring(collection, source, repeats, words, r)}
            )
        raise ConfigError("how is {how}: use rename, gather or bring", how=repr(how))

    def undo(self, sent: ApiRequest) -> JsonObject:
        """Undo the last change."""
        collection = self.collection(sent)

        def work(report: Report) -> JsonObject:
            done = trash.undo(collection.root, report)
            return {
                "undone": done.title,
                "count": done.count,
                "left": list(done.left[:SAMPLES]),
                "lefts": len(done.left),
            }

        return self._change(collection, sent, work)

    def put_back(self, sent: ApiRequest) -> JsonObject:
        """Restore the captions from before a change."""
        collection, names, change = self.collection(sent), sent.texts("names"), sent.text("change")
        if not names:
            raise ConfigError("no image is chosen")

        def work(report: Report) -> JsonObject:
            done, left = changes.put_back(collection, change, names)
            return {"done": done, "left": left}

        return self._change(collection, sent, work)

    # ---- long jobs

    def work(self, sent: ApiRequest) -> JsonObject:
        """The progress of a job, or its result."""
        work = self.works.get(sent.text("work"))
        if work is None:
            raise ConfigError("this task does not exist any more: open the folder again")
        return self._told(work, 0.3)

    def stop(self, sent: ApiRequest) -> JsonObject:
        """Ask a job to stop."""
        if work := self.works.get(sent.text("work")):
            work.stop()
        return {}

    def _begin(self, work: Callable[[Report], JsonObject]) -> JsonObject:
        made = BackgroundTask(work)
        with self.busy:
            self.works[made.id] = made
            while len(self.works) > 50:
                self.works.popitem(last=False)
        return self._told(made, POLL_AFTER)

    def _told(self, work: BackgroundTask, seconds: float) -> JsonObject:
        if not work.wait(seconds):
            return {"work": work.id, "phase": work.phase, "done": work.done, "total": work.total}
        return {"error": work.error} if work.result is None else work.result

    def _change(
        self, collection: ImageCollection, sent: ApiRequest, change: Callable[[Report], JsonObject]
    ) -> JsonObject:
        """Change a folder, and scan it again."""
        changes.changeable(collection)
        trigger = sent.text("trigger")

        def work(report: Report) -> JsonObject:
            done = change(report)
            return {**done, **self._overview(self._look(collection.config, collection.world, report), trigger)}

        return self._begin(work)

    # ---- folders in memory

    def collection(self, sent: ApiRequest) -> ImageCollection:
        """The requested folder, as last scanned with these settings."""
        root = paths.inside(sent.text("folder"), self.roots, "folder")
        with self.busy:
            found = self.collections.get(f"{root}|{sent.text('collection')}")
        if found is None:
            raise ConfigError("open the folder first")
        return found

    def _look(self, config: RunConfig, world: int, report: Report) -> ImageCollection:
        outside: dict[Problem, None] = {}
        try:
            found = sources.opened(config, report, lambda path: self._may(path, outside), world)
        except ConfigError as error:
            asked = [problem for problem in outside if allowed_folders.asked(problem)]
            raise ConfigError(*(asked or error.problems)) from None
        key = f"{found.root}|{settings.mark(config, world)}"
        with self.busy:
            before = self.collections.pop(key, None)
            if before is not None and before.compared:  # still valid for all remaining images
                known = found.known
                found.doubles = {name: at for name, at in before.doubles.items() if name in known}
                found.double_groups, found.compared = before.double_groups, True
            self.collections[key] = found
            while len(self.collections) > MAX_FOLDERS:
                self.collections.popitem(last=False)
        return found

    def _may(self, path: str, outside: dict[Problem, None]) -> bool:
        try:
            paths.inside(path, self.roots)
        except ConfigError as error:
            outside |= dict.fromkeys(error.problems)
            return False
        return True

    def _wanted(self, collection: ImageCollection, sent: ApiRequest) -> list[Picture]:
        folder = None if sent.fields.get("place") is None else sent.text("place")
        return selection.choose(collection, sent.text("show", "all"), sent.text("words"), folder, sent.text("trigger"))

    def _overview(self, collection: ImageCollection, trigger: str) -> JsonObject:
        counts = selection.counts(collection, trigger)
        return {
            "folder": str(collection.root),
            "collection": settings.mark(collection.config, collection.world),
            "count": collection.count(),
            "notes": collection.notes,
            "problems": collection.problems,
            "fixed": collection.fixed,
            "past": [] if collection.fixed else past(collection.root),
            "places": list(settings.places(collection)),
            "kinds": {kind: n for kind, n in counts.items()},
            "compared": collection.compared,
            "calm": ["reg", "held", *(["turned"] if collection.config.data.exif_rotation else [])],
            "titles": {**{kind: title for kind, (title, _) in KINDS.items()}, "trigger": "Without the trigger word"},
            "captioned": sum(bool(p.words) and not p.foreign for p in collection.pictures),
        }


def trigger_of(sent: ApiRequest) -> Callable[[str], bool] | None:
    """The test for the trigger word, if there is one."""
    return tags.trigger(sent.text("trigger")) if sent.text("trigger").strip() else None


def row(collection: ImageCollection, picture: Picture, has: Callable[[str], bool] | None) -> JsonObject:
    """An image as the page shows it."""
    fit, group = picture.fit, collection.doubles.get(picture.name)
    return {
        "name": picture.name,
        "path": picture.path,
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
    """The changes of a folder that can be undone."""
    return [{"id": one.id, "title": one.title, "when": one.when, "count": one.count} for one in trash.history(root)]
