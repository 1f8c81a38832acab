"""The result of scanning the data: images, problems and warnings, and the facts they were decided by."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from library.config.problems import Problem, Report
from library.config.run_config import ControlUse
from library.data import folders
from library.data.buckets import Size
from library.data.folders import Listing
from library.data.images import Image, ImageSet
from library.data.pixels import AS_STORED, Decoding


class FoundImage(NamedTuple):
    """An image before its size, caption and bucket are determined."""

    path: str
    size: Size | None
    caption: str | None  # None: of the caption file, or else the class tokens
    caption_file: str
    controls: tuple[str, ...] = ()


@dataclass(slots=True)
class Survey:
    """The result of scanning the data: images, problems that stop the training, and warnings."""

    images: ImageSet
    report: Report | None = None
    keep: bool = True  # whether a folder's metadata_cache.json may be written
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    other_captions: list[Problem] = field(default_factory=list)  # folders whose captions have another extension
    unused: list[str] = field(default_factory=list)
    copies: list[Image] = field(default_factory=list)  # of images that are held out for validation
    unread: dict[str, int] = field(default_factory=dict)  # caption file, or image -> unused lines of its caption
    listings: dict[str, Listing] = field(default_factory=dict)
    control_use: ControlUse = ControlUse()
    how: Decoding = AS_STORED
    # folder of reference images -> by the name of their image (with _ where they are numbered): number, file
    control_names: dict[str, dict[str, list[tuple[int, str]]]] = field(default_factory=dict)
    # (conditioning_data_dir, expected place of the mask or control image in it) -> images without one
    unpaired: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # folder of reference images, or metadata file that should name them -> images without one
    unreferenced: dict[str, list[str]] = field(default_factory=dict)
    list_option: str = "in_json"  # the option, or key of a data set, that names a file with a list of images
    takes_masks: bool = False  # whether masks of the loss, or of what is to be painted, have a use
    beside: dict[str, set[str]] = field(default_factory=dict)  # folder of masks or control images -> names in use
    unmasked: list[str] = field(default_factory=list)  # images without a mask of the region to inpaint
    # by id of a subset: its images, with their sizes and captions
    facts: dict[int, list[tuple[FoundImage, Size, str]]] = field(default_factory=dict)

    def files(self, folder: str | Path) -> Listing:
        """List the files of a folder, once; an empty listing if there is no such folder."""
        key = os.fspath(Path(folder))  # one spelling for a file in it: "C:/a/" and "C:\\a" are the same folder
        if key not in self.listings:
            exists = os.path.isdir(key)
            self.listings[key] = folders.looked_into(key) if exists else Listing(key)
        return self.listings[key]
