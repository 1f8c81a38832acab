"""The files of a demo: created once, kept if complete, and never overwriting anything else."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from library.demo import configs, images, learning, small_model, zorb
from library.families import facts_of, owner, random_module
from library.files import clear_errors, replace, write_atomic

RECORD = "demo.json"


@dataclass(frozen=True)
class Demo:
    """The paths of one demo."""

    folder: Path
    images: Path
    models: Mapping[str, Mapping[str, Path]]  # family, or a relative of one -> which file -> path
    configs: Mapping[str, Path]  # script, of a relative <relative>_<script> -> its TOML


def prepare_demo(folder: Path, families: Iterable[str], compiled: bool = False, trained: Collection[str] = ()) -> Demo:
    """Make what is missing of a demo in `folder`, or in `folder-2` and so on if that holds something else.

    `families` may name relatives, too, which have models and TOML files of their own; new ones say `compiled`. Those
    that are also in `trained` get their small trained model, and tiny random ones only for scripts that do not train
    it. Raises ConfigError for a folder that cannot be written, and for a small model that is damaged.
    """
    families = tuple(families)
    with clear_errors(folder):
        folder = _free_demo_folder(folder)
        if not (folder / RECORD).exists():
            write_atomic(folder / RECORD, json.dumps({"demo": fingerprint_demo()}) + "\n")
        tomls = {}
        for family in (name for name in families if name in trained):
            tomls |= _prepare_learning(folder, family, compiled)
        at_random = [name for name in families if name not in trained or _further_scripts(name)]
        pictures = folder / "images"
        if at_random or not families:
            _once(pictures, images.draw_images)
            _once(folder / "references", lambda place: images.write_references(pictures, place))
        for family in at_random:
            _once(folder / "models" / family, lambda place, family=family: _write_demo_model(family, place))
        models = {
            list_file.parent.name: _demo_file_paths(list_file)
            for list_file in sorted((folder / "models").glob("*/files.json"))
        }
        tomls = configs.write_demo_configs(folder, models, pictures, folder / "output", compiled) | tomls
    return Demo(folder, pictures, models, tomls)


def _prepare_learning(folder: Path, family: str, compiled: bool) -> dict[str, Path]:
    """Make the training pictures, the small model, its prompts and its TOML files; return the latter by script."""
    _once(folder / zorb.NAME, zorb.write_zorbs)
    _once(folder / small_model.KNOWN_PICTURES, small_model.copy_known_pictures)
    model_folder = folder / "small-models" / family
    _once(model_folder, lambda new: small_model.copy_small_model(family, new))
    model = small_model.small_model_of(family)
    assert model is not None
    return learning.write_learning_files(
        folder, family, {part: model_folder / name for part, name in model.files.items()}, compiled
    )


def _further_scripts(family: str) -> set[str]:
    return set(facts_of(family).scripts) - set(learning.scripts(family))


def fingerprint_demo() -> str:
    """Return what the files of a demo depend on; a change makes an older demo's files obsolete."""
    package = Path(__file__).resolve().parent
    sources = [
        *(package / f"{module}.py" for module in ("images", "configs", "learning", "zorb")),
        *package.parent.glob("families/**/random*.py"),
        *package.glob(f"small_models/{small_model.CHECKSUMS}"),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]


def _free_demo_folder(folder: Path) -> Path:
    """Return the first of folder, folder-2, ... that is new, empty, or a demo made by this version."""
    if not folder.name:  # the root of a drive
        folder /= "demo"
    number, candidate = 1, folder
    while not _fits(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    if candidate != folder:
        print(f"{folder} holds other files, or the demo of another version; using {candidate}")
    return candidate


def _fits(folder: Path) -> bool:
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    if (folder / RECORD).exists():
        try:
            return json.loads((folder / RECORD).read_text(encoding="utf-8")).get("demo") == fingerprint_demo()
        except (ValueError, AttributeError):
            return False
    return not any(folder.iterdir())


def _once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder under another name and rename it."""
    # An existing folder is then always complete.
    if folder.exists():
        return
    print(f"making {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupted demo
    unfinished.mkdir()
    fill(unfinished)
    replace(unfinished, folder)


def _write_demo_model(family: str, folder: Path) -> None:
    """Create a tiny checkpoint of a family or variant, and a list of its files."""
    module = random_module(owner(family))
    sizes = {} if family == owner(family) else {"sizes": module.VARIANTS[family]}
    paths = module.write_random_model(folder, **sizes)
    files = paths if isinstance(paths, Mapping) else {family: paths}
    relative = {name: Path(path).relative_to(folder).as_posix() for name, path in files.items()}
    write_atomic(folder / "files.json", json.dumps(relative, indent=1) + "\n")


def _demo_file_paths(list_file: Path) -> dict[str, Path]:
    return {name: list_file.parent / path for name, path in json.loads(list_file.read_text(encoding="utf-8")).items()}
