"""Data sets over HTTP, read-only: the images of a folder, their captions, and how a training uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kohya_gui.api.answers import Answer, Sentence, answer
from kohya_gui.dataset import settings
from kohya_gui.server import paths
from library.curation.collection import Picture
from library.curation.scanning import scan_collection

MAX_IMAGES = 200  # images per answer


class ImageAbout(BaseModel):
    """An image of a data set."""

    name: str = Field(description="Its path below the folder")
    caption: str | None = Field(description="null without a caption file")
    width: int
    height: int
    repeats: int
    unused: Sentence = Field(description="Why a training would not use it")
    broken: str = Field(description="Why it cannot be read")


class DatasetAbout(Answer):
    """A folder of images."""

    folder: str
    total: int
    with_caption: int
    start: int
    images: list[ImageAbout]
    counts: dict[str, Any] = Field(description="Images, buckets and steps of a training, as the Data tab counts them")
    notes: list[Sentence]


def router(roots: Sequence[Path]) -> APIRouter:
    """Return the routes of data sets."""
    routes = APIRouter(prefix="/datasets", tags=["datasets"])

    @routes.get("", operation_id="show_dataset", summary="Images and captions of a folder", response_model=DatasetAbout)
    def show_dataset(
        folder: Annotated[str, Query(max_length=paths.MAX_PATH_LENGTH)],
        start: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_IMAGES)] = 50,
    ) -> Any:
        path = paths.existing_folder(folder, roots, "folder")
        config = settings.config_of_tab(str(path), {}, roots)
        scanned = scan_collection(path, config, may=lambda target: paths.is_allowed(target, roots))
        pictures = scanned.pictures
        return answer(
            DatasetAbout,
            folder=str(path),
            total=len(pictures),
            with_caption=sum(bool(picture.caption) for picture in pictures),
            start=start,
            images=[_image(picture) for picture in pictures[start : start + count]],
            counts=scanned.count() if pictures else {},
            notes=scanned.notes,
        )

    return routes


def _image(picture: Picture) -> Any:
    width, height = picture.size
    same = {name: getattr(picture, name) for name in ("name", "caption", "repeats", "unused", "broken")}
    return {**same, "width": width, "height": height}
