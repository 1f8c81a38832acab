"""Masks in the room Data: shown over the images, painted by hand, and undone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.responses import Response

from kohya_gui.server import paths
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler, PieceHandler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.curation import changes, thumbs, trash
from library.curation.collection import ImageCollection
from library.masking import files


class MaskEditing:
    """Handlers for masks; `collection_of` finds the folder of a request."""

    def __init__(self, roots: Sequence[Path], collection_of: Callable[[ApiRequest], ImageCollection]) -> None:
        self.roots, self.collection_of = roots, collection_of

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"masks": self.look, "masks_undo": self.undo}

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"mask": self.show}

    @property
    def piece_handlers(self) -> dict[str, PieceHandler]:
        return {"mask_put": self.put}

    def look(self, request: ApiRequest) -> JsonObject:
        """Return the folder of the masks, their number, and the last change that can be undone."""
        collection = self.collection_of(request)
        masks = self._folder(collection)
        past = trash.history(masks) if masks.is_dir() else []
        return {
            "folder": str(masks),
            "count": files.count_masked_images(collection.root, masks),
            "images": len(collection.pictures),
            "past": past[0].title if past else "",
        }

    def show(self, query: Mapping[str, str]) -> Response:
        """Return a mask, red where the image is not trained; a single transparent pixel if there is none."""
        collection = self.collection_of(ApiRequest(dict(query)))
        side = query.get("side", "")
        picture = files.mask_overlay(
            self._file(collection, query),
            int(side) if side in map(str, thumbs.SIDES) else thumbs.SIDES[0],
            collection.config.data.exif_rotation,
        )
        headers = {"Cache-Control": "no-store", "Content-Security-Policy": "default-src 'none'"}
        return Response(picture, media_type="image/webp", headers=headers)

    def put(self, query: Mapping[str, str], body: bytes) -> JsonObject:
        """Save a painted mask."""
        request = ApiRequest(dict(query))
        collection = self.collection_of(request)
        picture = collection.find(request.text("name"))
        changes.changeable(collection, [picture])
        file, is_turned = self._file(collection, query), collection.config.data.exif_rotation
        files.replace_mask(self._folder(collection), file, body, picture.size, Path(picture.path), is_turned)
        return self.look(request)

    def undo(self, request: ApiRequest) -> JsonObject:
        """Undo the last change of masks."""
        collection = self.collection_of(request)
        changes.changeable(collection)
        masks = self._folder(collection)
        if not masks.is_dir():
            raise ConfigError("there is nothing to undo")
        return {"undone": trash.undo(masks).title, **self.look(request)}

    def _folder(self, collection: ImageCollection) -> Path:
        return paths.allowed_path(str(files.usual_folder(collection.root)), self.roots, "mask folder", is_new=True)

    def _file(self, collection: ImageCollection, query: Mapping[str, str]) -> Path:
        """Return the mask file of an image in the opened folder. Links are not followed."""
        picture = collection.find(query.get("name", ""))
        masks = self._folder(collection)
        path = files.mask_file(collection.root / picture.name, collection.root, masks)
        if paths.allowed_path(str(path), [masks], "mask") != path:
            raise ConfigError("{path} is a link: remove it", path=path)
        return path
