"""Locate the networks of a model in separate files, by options or inside one folder."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, Problem, either
from library.config.run_config import RunConfig
from library.families import recognition
from library.families.facts import FamilyFacts, Shapes
from library.families.recognition import whole_model
from library.families.shared import hub, weights
from library.families.shared.expected_tensors import IncompleteError, few
from library.families.shared.known_files import UNKNOWN

Entries = Mapping[str, JsonMapping]  # dtype and shape by key, from a header
Look = Callable[[str, Path, Entries], Iterator[Problem]]  # part, its file, the entries of its header


@dataclass(frozen=True)
class Part:
    """One of the networks: its option, and its place inside a whole model's folder."""

    option: str
    what: str
    inside: tuple[str, ...]  # patterns of paths, the preferred one first
    marker: tuple[str, ...]  # a tensor that only this network has, in each of its layouts
    # Plain names of a file -> all names of a complete one, if they follow from names alone.
    tensors: Callable[[Shapes], list[str]] = lambda _shapes: []


@dataclass(frozen=True)
class PartFiles:
    """The files of a family's models. The denoiser's option can also name a folder that has all parts."""

    parts: Mapping[str, Part]
    facts: FamilyFacts | None = None  # of the family, for `unfit`
    # The descriptions by `recognise` of a part's files, one or several.
    words: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    instead: str = ""  # which models of the family are supported, where others have the same tensor names

    def named(self, config: RunConfig, part: str) -> str | None:
        """The user's value for a part: its option, or the base model if that is a whole model."""
        given = getattr(config.model, self.parts[part].option)
        base = config.model.pretrained_model_name_or_path
        if given or part == "denoiser" or not base:
            return given
        if hub.is_hub_id(base):
            return base
        whole = whole_model(Path(base))
        return str(whole) if whole and self.within(whole, part) else None

    def within(self, folder: Path, part: str) -> Path | None:
        """The path of a part inside a folder: its sub-folder, a file with its usual name, or the folder itself."""
        for pattern in self.parts[part].inside:
            if found := sorted(p for p in folder.glob(pattern) if not p.name.startswith("._")):
                return found[0]
        models = [pattern for pattern in self.parts["denoiser"].inside if pattern.endswith(".safetensors")]
        own = any(folder.glob("*.safetensors*")) and not any(any(folder.glob(pattern)) for pattern in models)
        return folder if own else None

    def present(self, config: RunConfig, part: str) -> Path | None:
        """The local path of a part; None when it is on the hub. Raises ConfigError."""
        return None if hub.is_hub_id(self.named(config, part) or "") else self.located(config, part)

    def located(self, config: RunConfig, part: str) -> Path:
        """The local path of a part, downloaded when it is on the hub. Raises ConfigError."""
        about, name = self.parts[part], self.named(config, part) or ""
        if problem := hub.missing_model(about.option, name, about.what):
            raise ConfigError(problem)
        path = hub.local(name, about.option, lambda names: self.wanted(names, part), config.hub.huggingface_token)
        if not path.is_dir():
            return path
        found = self.within(path, part)
        if found is None:
            raise ConfigError(
                Problem(
                    about.option,
                    ": the folder {path} does not hold {what}: give its file or folder",
                    path=path,
                    what=Message(about.what),
                )
            )
        return found

    def wanted(self, names: Iterable[str], part: str) -> list[str]:
        """The files of a repository to download for a part: its sub-folder, else the file with its usual name."""
        names = list(names)
        for pattern in self.parts[part].inside:
            if pattern.endswith(".safetensors"):
                if found := sorted(fnmatch.filter(names, pattern)):
                    return found[:1]
            elif any(name.startswith(f"{pattern}/") and name.endswith(".safetensors") for name in names):
                return [n for n in names if n.startswith(f"{pattern}/") and n.endswith((".safetensors", ".json"))]
        what = Message(self.parts[part].what)
        raise ConfigError(Problem(self.parts[part].option, ": this repository has no {what}", what=what))

    def problems(self, config: RunConfig, look: Look) -> Iterator[Problem]:
        """Problems of the parts, from their headers, each with its option and the fix. `look` checks a part that is on
        this machine."""
        for part, about in self.parts.items():
            if part == "denoiser" and not self.named(config, part):
                continue  # the config's own checks report it
            try:
                path = self.present(config, part)
                if path is not None:
                    yield from look(part, path, read_entries(path))
                elif problem := self.unreachable(config, part):  # downloads are checked afterwards
                    yield problem
            except ConfigError as e:
                for why in e.problems:
                    yield why if why.option == about.option else Problem(about.option, ": {why}", why=why)

    def fitting(
        self,
        config: RunConfig,
        plain_shapes: Callable[[Entries, str], Shapes],
        of_denoiser: Callable[[Path, Shapes], Iterator[Problem]],
        widths: Callable[[Shapes], Mapping[str, tuple[str, int]]],
    ) -> Iterator[Problem]:
        """Problems of parts whose own keys `plain_shapes` returns, and of their combination.

        `of_denoiser` does further checks of a valid denoiser, by its path and shapes; `widths` is for `mismatched`,
        from the denoiser's shapes.
        """
        found: dict[str, Shapes] = {}

        def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
            stored, missing = {name: tuple(entry["shape"]) for name, entry in entries.items()}, ""
            try:
                shapes = plain_shapes(entries, part)
            except KeyError as e:  # the layout cannot be determined
                shapes, missing = stored, e.args[0]
            of, words = recognition.family_and_description(stored)
            problem = incomplete(path, words, [missing]) if missing and of and of is self.facts else None
            if problem := problem or self.unfit(part, path, entries, shapes):
                yield Problem(self.parts[part].option, ": {problem}", problem=problem)
                return
            found[part] = shapes
            if part == "denoiser":
                yield from of_denoiser(path, shapes)

        yield from self.problems(config, look)
        yield from self.mismatched(found, widths(found.get("denoiser", {})))

    def unfit(self, part: str, path: Path, entries: Entries, shapes: Shapes) -> Message | None:
        """Why a file cannot serve as a part, in a sentence with the fix; None when it can. `shapes` are those of the
        part's own keys."""
        about = self.parts[part]
        of, description = recognition.family_and_description(
            {name: tuple(entry["shape"]) for name, entry in entries.items()}
        )
        if description == "a LoRA file":
            template = "{path} is a LoRA file, not a model; expected {what}"
            if part == "denoiser":
                template = "{path} is a LoRA file, not a model: give it as --network_weights; expected {what}"
            return Message(template, path=path, what=about.what)
        words = self.words.get(part, description)
        wanted = (words,) if isinstance(words, str) else words
        marked = any(name.endswith(about.marker) for name in shapes)
        known = description if description in wanted and description != UNKNOWN else ""
        if (known or description == UNKNOWN) and (problem := incomplete_part(path, about, shapes, known)):
            return problem
        if marked and description in (
            *wanted,
            UNKNOWN,
        ):  # missing tensors of an unknown one are reported where it is opened
            return weights.stored_oddly(path, entries, scaled=True)
        if of and of is self.facts and description not in of.base_models:
            return Message(
                "{path} is {found}, which is not trained here: use {instead}",
                path=path,
                found=description,
                instead=self.instead,
            )
        other = of if part == "denoiser" and of is not self.facts else None
        if other:
            return Message(
                "{path} is {found}; train it with {scripts}; expected {what}",
                path=path,
                found=description,
                scripts=either(other.scripts),
                what=about.what,
            )
        return Message("{path} is {found}; expected {what}", path=path, found=description, what=about.what)

    def mismatched(self, shapes: Mapping[str, Shapes], widths: Mapping[str, tuple[str, int]]) -> Iterator[Problem]:
        """Problems of parts that are valid but do not match: `widths` has a tensor of each part, and its number of
        columns for this denoiser."""
        for part, (name, expected) in widths.items() if "denoiser" in shapes else ():
            got = shapes[part][name][1] if name in shapes.get(part, {}) else expected
            if expected and got != expected:  # 0: the denoiser lacks that tensor, which loading reports
                yield Problem(
                    self.parts[part].option,
                    ": has {got} channels where this model expects {expected}: give {what}",
                    got=got,
                    expected=expected,
                    what=Message(self.parts[part].what),
                )

    def unreachable(self, config: RunConfig, part: str) -> Problem | None:
        """Why a part on the hub cannot be downloaded; reported once for a repository of several parts."""
        name = self.named(config, part) or ""
        if name == self.named(config, "denoiser") and part != "denoiser":
            return None
        token = config.hub.huggingface_token
        return hub.unreachable_model(self.parts[part].option, name, lambda names: self.wanted(names, part), token)


def pipeline(path: str | Path | None) -> str:
    whole = whole_model(Path(path)) if path else None
    return str(recognition.index_of(whole).get("_class_name", "")) if whole else ""


def read_entries(path: Path) -> dict[str, JsonObject]:
    """Shape and dtype by key, over all files of a part, from their headers alone."""
    entries: dict[str, JsonObject] = {}
    for file in weights.files(path):
        if file.suffix.lower() in weights.PICKLED:
            raise ConfigError("{file} may hold code and is not opened: convert it to .safetensors", file=file)
        entries |= weights.header_entries(file)
    return entries


def incomplete_part(path: Path, about: Part, shapes: Shapes, description: str) -> Message | None:
    """The message for an incomplete file of a part; None for a complete one, or one of mostly other tensors.

    `found`: the description by its header, "" if unknown.
    """
    wanted = about.tensors(shapes)
    missing = [name for name in wanted if name not in shapes]
    if missing and (description or 2 * (len(wanted) - len(missing)) > len(shapes)):
        return incomplete(path, description or about.what, missing, len(wanted))
    if description and not wanted and not any(name.endswith(about.marker) for name in shapes):
        return incomplete(path, description, [about.marker[0]])
    return None


def incomplete(path: Path, what: str, missing: list[str], wanted: int = 0) -> Message:
    """The message for a file that lacks tensors; `wanted`: their expected number, if known."""
    if not wanted:
        template = (
            "{path} is {what} that is not complete: {tensor} is missing; download it again, or join all files that it "
            "came in"
        )
        return Message(template, path=path, what=Message(what), tensor=missing[0])
    return Message(
        "{path} is {what} that is not complete: it lacks {number} of its {wanted} tensors ({names}); "
        "download it again, or join all files that it came in",
        path=path,
        what=Message(what),
        number=len(missing),
        wanted=wanted,
        names=few(missing),
    )


@contextmanager
def complete(path: Path, what: str) -> Iterator[None]:
    """Convert errors of missing tensors and wrong shapes to a ConfigError about the file."""
    try:
        yield
    except IncompleteError as e:
        raise ConfigError(incomplete(path, what, e.missing, e.wanted)) from e
    except KeyError as e:  # of those that determine the sizes of the network
        raise ConfigError(incomplete(path, what, [e.args[0]])) from e
    except RuntimeError as e:  # torch's error for wrong shapes; the last line names one
        raise ConfigError(
            "{path} does not fit together: {why}", path=path, why=str(e).strip().splitlines()[-1].strip()
        ) from e
