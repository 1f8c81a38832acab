"""Stamps of the image files that a cache was made from, to detect later changes."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from library.config.outside_files import open_regular

if TYPE_CHECKING:
    from library.data.images import ControlImage


def image_stamp(image: str) -> list[Any]:
    """Return length, modification time and hash of a file: the first two are quick to compare, the third survives
    copying.
    """
    status = os.stat(image)
    return [status.st_size, status.st_mtime_ns, _hash(image)]


def control_stamps(controls: "Iterable[ControlImage]") -> list[Any]:
    return [_control_stamp(control) for control in controls]


def same_image(image: str, stamp: Any) -> bool:
    """Return whether an image still matches the stamp."""
    if not os.path.exists(image):  # a data set may consist of cached latents alone
        return True
    if not isinstance(stamp, list) or len(stamp) != 3:
        return False
    status = os.stat(image)
    if status.st_size != stamp[0]:
        return False
    return status.st_mtime_ns == stamp[1] or _hash(image) == stamp[2]


def _hash(file: str) -> str:
    with open_regular(file) as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _control_stamp(control: "ControlImage") -> list[Any]:
    mask: Any = None if control.drawn is None else f"drawn {control.drawn}"
    if control.mask and control.mask != control.path:
        mask = image_stamp(control.mask)
    return [image_stamp(control.path), mask, list(control.fit.resized), *reading(control)]


def reading(control: "ControlImage") -> list[Any]:
    """Return how a control image and its mask are decoded; [] if they are read as stored."""
    of_image, mask_decoding = control.how.marks(control.path), replace(control.how, ground="")
    mask = mask_decoding.marks(control.mask) if control.mask else []
    return [of_image, mask] if of_image or mask else []


def same_controls(controls: "Sequence[ControlImage]", stamps: Any) -> bool:
    """Return whether the control and reference images are unchanged."""
    if not isinstance(stamps, list) or len(stamps) != len(controls):
        return False
    for control, stamp in zip(controls, stamps, strict=True):
        decoding = reading(control)
        if not isinstance(stamp, list) or stamp[2:] != [list(control.fit.resized), *decoding]:
            return False
        has_mask_file = control.mask and control.mask != control.path
        drawn = None if control.drawn is None else f"drawn {control.drawn}"
        same_mask = same_image(control.mask, stamp[1]) if has_mask_file else stamp[1] == drawn
        if not same_mask or not same_image(control.path, stamp[0]):
            return False
    return True
