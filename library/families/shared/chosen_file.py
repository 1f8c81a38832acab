"""Choose the file that fits among several in a folder, by their headers."""

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from library.config.problems import ConfigError, Message, Problem, as_message
from library.families import recognition
from library.families.facts import Shapes
from library.families.shared import weights
from library.families.shared.folder_checkpoints import checkpoints, version
from library.families.shared.known_files import UNKNOWN

USUAL = ("diffusion_pytorch_model.*", "model.*")  # what diffusers and transformers read
MAX_FILES_NAMED = 6  # files in a message


@dataclass(frozen=True)
class Wanted:
    """The kind of file that an option needs."""

    option: str
    what: str | Message  # as part of a sentence
    words: tuple[str, ...]  # descriptions by `recognise`
    markers: tuple[str, ...] = ()  # ends of tensor names, one of which a file of an unknown kind must have
    usual: tuple[str, ...] = ()  # patterns of names that decide between several that fit
    channels: int = 0  # of a VAE's latents, where others have the same names

    def fits(self, shapes: Shapes) -> bool:
        """Return whether a checkpoint with these shapes is of this kind."""
        description = recognition.describe_checkpoint(shapes)
        marked = description == UNKNOWN and any(name.endswith(self.markers) for name in shapes)
        inputs = (shape[1] for name, shape in shapes.items() if name.endswith("decoder.conv_in.weight"))
        is_other_vae = self.channels and next(inputs, self.channels) != self.channels
        return (description in self.words or marked) and not is_other_vae


def choose(folder: Path, wanted: Wanted, among: Iterable[Path] | None = None) -> Path | None:
    """Return the only checkpoint in a folder that fits; None if none does. Raises ConfigError if several do."""
    candidates = checkpoints(folder) if among is None else among
    fitting = [path for path in candidates if _fits(wanted, path, version(path))]
    for pattern in (*wanted.usual, *USUAL) if len(fitting) > 1 else ():
        if named := [path for path in fitting if fnmatch.fnmatch(path.name, pattern)]:
            fitting = named
            break
    if len(fitting) > 1:
        template = ": more than one file in {path} is {what}: {files}; give one of them"
        raise ConfigError(
            Problem(
                wanted.option, template, path=folder, what=as_message(wanted.what), files=_names(fitting), place="--"
            )
        )
    return fitting[0] if fitting else None


def inside(folder: Path, wanted: Wanted) -> Path:
    """Return the checkpoint of a folder: the folder itself if there is only one in it. Raises ConfigError if several
    fit, or none of several does.
    """
    candidates = checkpoints(folder)
    if len(candidates) < 2:
        return folder
    if path := choose(folder, wanted, candidates):
        return path
    raise none_fits(folder, wanted)


def none_fits(folder: Path, wanted: Wanted) -> ConfigError:
    """Return the error for a folder of several checkpoints, with their names, of which none fits."""
    return ConfigError(
        Problem(
            wanted.option,
            ": none of the files in {path} is {what}: {files}; give its file or folder",
            path=folder,
            what=as_message(wanted.what),
            files=_names(checkpoints(folder)),
            place="--",
        )
    )


def _names(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join([*names[:MAX_FILES_NAMED], *(["..."] if len(names) > MAX_FILES_NAMED else [])])


@functools.lru_cache(maxsize=1024)  # forms check the same folders repeatedly
def _fits(wanted: Wanted, path: Path, _version: tuple[int, int]) -> bool:
    try:
        shapes = {name: shape for file in weights.files(path) for name, shape in weights.header(file).items()}
        return wanted.fits(shapes)
    except ConfigError:  # it is damaged
        return False
