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
from library.families.shared import chosen_file, expected_shapes, hub, scaled_weights, weights
from library.families.shared.expected_tensors import IncompleteError, first_names
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
    instead: str = ""  # the supported models of the family, if others have the same tensor names

    def named(self, config: RunConfig, part: str) -> str | None:
        """Return the user's value for a part: its option, or the base model if that is a whole model."""
        option_value = getattr(config.model, self.parts[part].option)
        base = config.model.pretrained_model_name_or_path
        if option_value or part == "denoiser" or not base:
            return option_value
        if hub.is_hub_id(base):
            return base
        whole = whole_model(Path(base))
        try:
            return str(whole) if whole and self.within(whole, part) else None
        except ConfigError:
            return str(whole)  # where `located` says why

    def within(self, folder: Path, part: str) -> Path | None:
        """Return the path of a part in a folder: in its sub-folder, the file that fits, or the folder itself.

        Raises ConfigError if several files fit.
        """
        wanted = self._wanted(part)
        for pattern in self.parts[part].inside:
            if not pattern.endswith(".safetensors") and (matches := sorted(folder.glob(pattern))):
                return chosen_file.inside(matches[0], wanted)
        candidates = chosen_file.checkpoints(folder)
        if len(candidates) > 1:
            return chosen_file.choose(folder, wanted, candidates)
        if named := [path for path in candidates if _is_named(path, self.parts[part])]:
            return named[0]
        # A model alone is no folder of another part.
        return folder if candidates and not _is_named(candidates[0], self.parts["denoiser"]) else None

    def _wanted(self, part: str) -> chosen_file.Wanted:
        definition, words = self.parts[part], self.words.get(part, ())
        # Several transformers are models to choose from; the other parts go by their usual names.
        usual = () if part == "denoiser" else definition.inside
        words = (words,) if isinstance(words, str) else words
        return chosen_file.Wanted(definition.option, definition.what, words, definition.marker, usual)

    def present(self, config: RunConfig, part: str) -> Path | None:
        return None if hub.is_hub_id(self.named(config, part) or "") else self.located(config, part)

    def located(self, config: RunConfig, part: str) -> Path:
        """Return the local path of a part, downloading it if it is on the hub. Raises ConfigError."""
        definition, name = self.parts[part], self.named(config, part) or ""
        if problem := hub.missing_model(definition.option, name, definition.what):
            raise ConfigError(problem)
        path = hub.local(
            name, definition.option, lambda names: self.files_to_download(names, part), config.hub.huggingface_token
        )
        if not path.is_dir():
            return path
        part_path = self.within(path, part)
        if part_path is None:
            if len(chosen_file.checkpoints(path)) > 1:
                raise chosen_file.none_fits(path, self._wanted(part))
            raise ConfigError(
                Problem(
                    definition.option,
                    ": the folder {path} does not hold {what}: give its file or folder",
                    path=path,
                    what=Message(definition.what),
                )
            )
        return part_path

    def files_to_download(self, names: Iterable[str], part: str) -> list[str]:
        """Return the files of a repository to download for a part: its sub-folder, else the file with its usual name.
        Raises ConfigError if there is neither.
        """
        names = list(names)
        for pattern in self.parts[part].inside:
            if pattern.endswith(".safetensors"):
                if matches := sorted(fnmatch.filter(names, pattern)):
                    return matches[:1]
            elif any(name.startswith(f"{pattern}/") and name.endswith(".safetensors") for name in names):
                return [n for n in names if n.startswith(f"{pattern}/") and n.endswith((".safetensors", ".json"))]
        what = Message(self.parts[part].what)
        raise ConfigError(Problem(self.parts[part].option, ": this repository has no {what}", what=what))

    def problems(self, config: RunConfig, look: Look) -> Iterator[Problem]:
        """Yield problems of the parts, from their headers, each with its option and the fix. `look` checks a part that
        is on this machine.
        """
        for part, definition in self.parts.items():
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
                    yield why if why.option == definition.option else Problem(definition.option, ": {why}", why=why)

    def fitting(
        self,
        config: RunConfig,
        plain_shapes: Callable[[Entries, str], Shapes],
        of_denoiser: Callable[[Path, Shapes], Iterator[Problem]],
        widths: Callable[[Shapes], Mapping[str, tuple[str, int]]],
    ) -> Iterator[Problem]:
        """Yield problems of the parts and of their combination. `plain_shapes` returns shapes by a part's own keys.

        `of_denoiser` does further checks of a valid denoiser, by its path and shapes; `widths` returns the widths for
        `mismatched` from the denoiser's shapes.
        """
        shapes_by_part: dict[str, Shapes] = {}

        def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
            stored, missing = weights.shapes_of(entries), ""
            try:
                shapes = plain_shapes(entries, part)
            except KeyError as e:  # the layout cannot be determined
                shapes, missing = stored, e.args[0]
            family, words = recognition.family_and_description(stored)
            problem = incomplete(path, words, [missing]) if missing and family and family is self.facts else None
            if problem := problem or self.unfit(part, path, entries, shapes):
                yield Problem(self.parts[part].option, ": {problem}", problem=problem)
                return
            shapes_by_part[part] = shapes
            if part == "denoiser":
                yield from of_denoiser(path, shapes)

        yield from self.problems(config, look)
        yield from self.mismatched(shapes_by_part, widths(shapes_by_part.get("denoiser", {})))

    def unfit(self, part: str, path: Path, entries: Entries, shapes: Shapes) -> Message | None:
        """Return why a file cannot serve as a part, in a sentence with the fix; None if it can. `shapes` are by the
        part's own keys.
        """
        definition = self.parts[part]
        family, description = recognition.family_and_description(weights.shapes_of(entries))
        if description == "a LoRA file":
            return lora_in_place_of(part, path, definition)
        words = self.words.get(part, description)
        expected_words = (words,) if isinstance(words, str) else words
        marked = any(name.endswith(definition.marker) for name in shapes)
        recognised = description if description in expected_words and description != UNKNOWN else ""
        if (recognised or description == UNKNOWN) and (
            problem := incomplete_part(path, definition, shapes, recognised)
        ):
            return problem
        # Missing tensors of an unknown one are reported where it is opened.
        if marked and description in (*expected_words, UNKNOWN):
            return scaled_weights.stored_oddly(path, entries, scaled=True)
        if family and family is self.facts and description not in family.base_models:
            return Message(
                "{path} is {found}, which is not trained here: use {instead}",
                path=path,
                found=description,
                instead=self.instead,
            )
        other = family if part == "denoiser" and family is not self.facts else None
        return other_kind(path, definition, description, other)

    def mismatched(self, shapes: Mapping[str, Shapes], widths: Mapping[str, tuple[str, int]]) -> Iterator[Problem]:
        """Yield problems of parts that are valid but do not match: `widths` has a tensor of each part, and its number
        of columns for this denoiser.
        """
        for part, (name, expected) in widths.items() if "denoiser" in shapes else ():
            width = shapes[part][name][1] if name in shapes.get(part, {}) else expected
            if expected and width != expected:  # 0: the denoiser lacks that tensor, which loading reports
                yield Problem(
                    self.parts[part].option,
                    ": has {got} channels where this model expects {expected}: give {what}",
                    got=width,
                    expected=expected,
                    what=Message(self.parts[part].what),
                )

    def unreachable(self, config: RunConfig, part: str) -> Problem | None:
        """Return why a part on the hub cannot be downloaded, only once for a repository of several parts."""
        name = self.named(config, part) or ""
        if name == self.named(config, "denoiser") and part != "denoiser":
            return None
        token = config.hub.huggingface_token
        return hub.unreachable_model(
            self.parts[part].option, name, lambda names: self.files_to_download(names, part), token
        )


def lora_in_place_of(part: str, path: Path, definition: Part) -> Message:
    """Return the message for a LoRA file that was given as a part."""
    template = "{path} is a LoRA file, not a model; expected {what}"
    if part == "denoiser":
        template = "{path} is a LoRA file, not a model: give it as --network_weights; expected {what}"
    return Message(template, path=path, what=definition.what)


def other_kind(path: Path, definition: Part, description: str, family: FamilyFacts | None) -> Message:
    """Return the message for a file of another kind than a part, with the scripts of its family if it has one."""
    template, scripts = "{path} is {found}; expected {what}", {}
    if family:
        template = "{path} is {found}; train it with {scripts}; expected {what}"
        scripts = {"scripts": either(family.scripts)}
    return Message(template, path=path, found=description, what=definition.what, **scripts)


def _is_named(path: Path, part: Part) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in part.inside if pattern.endswith(".safetensors"))


def pipeline(path: str | Path | None) -> str:
    whole = whole_model(Path(path)) if path else None
    return str(recognition.index_of(whole).get("_class_name", "")) if whole else ""


def read_entries(path: Path) -> dict[str, JsonObject]:
    """Return shape and dtype by key, over all files of a part, from their headers alone."""
    entries: dict[str, JsonObject] = {}
    for file in weights.files(path):
        if file.suffix.lower() in weights.PICKLED:
            raise ConfigError("{path} may hold code and is not opened: convert it to .safetensors first", path=file)
        of_file = {scaled_weights.IN_FILE: str(file)}
        entries |= {name: entry | of_file for name, entry in weights.header_entries(file).items()}
    return entries


def plain_shapes_of(
    of_denoiser: Callable[[Entries], Shapes], **names_of_part: Callable[[Iterable[str]], Mapping[str, str]]
) -> Callable[[Entries, str], Shapes]:
    """Return a function: the entries of a part -> shapes by the network's own keys.

    `names_of_part` has a function for each part but the denoiser: keys of a file -> {own key: key in the file}.
    """

    def plain_shapes(entries: Entries, part: str) -> Shapes:
        if part == "denoiser":
            return of_denoiser(entries)
        return {plain: tuple(entries[name]["shape"]) for plain, name in names_of_part[part](entries).items()}

    return plain_shapes


def incomplete_part(path: Path, definition: Part, shapes: Shapes, description: str) -> Message | None:
    """Return the message for an incomplete or misshapen file of a part; None for a usable one, or one of mostly other
    tensors.

    `description` is the one by its header, "" if unknown.
    """
    expected = definition.tensors(shapes)
    missing = [name for name in expected if name not in shapes]
    if missing and (description or 2 * (len(expected) - len(missing)) > len(shapes)):
        return incomplete(path, description or definition.what, missing, len(expected))
    if description and not expected and not any(name.endswith(definition.marker) for name in shapes):
        return incomplete(path, description, [definition.marker[0]])
    return expected_shapes.misshapen(path, shapes) if expected else None


def incomplete(path: Path, what: str, missing: list[str], num_expected: int = 0) -> Message:
    """Return the message for a file that lacks tensors of `num_expected`, if that number is known."""
    if not num_expected:
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
        wanted=num_expected,
        names=first_names(missing),
    )


@contextmanager
def complete(path: Path, what: str) -> Iterator[None]:
    """Convert errors of missing tensors and wrong shapes to a ConfigError about the file."""
    try:
        yield
    except IncompleteError as e:
        raise ConfigError(incomplete(path, what, e.missing, e.num_expected)) from e
    except KeyError as e:  # of those that determine the sizes of the network
        raise ConfigError(incomplete(path, what, [e.args[0]])) from e
    except RuntimeError as e:  # torch's error for wrong shapes; the last line names one
        raise ConfigError(
            "{path} does not fit together: {why}", path=path, why=str(e).strip().splitlines()[-1].strip()
        ) from e
