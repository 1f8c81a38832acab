"""Locate tokenizers: beside the model, in a folder of tokenizers, in the hub's cache, or online."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import huggingface_hub

from library.config.outside_files import TOKENIZER, check_file_size, read_outside_text, table_of
from library.config.problems import ConfigError, Problem, first_line, together
from library.families.recognition import whole_model
from library.families.shared import hub, token_counting
from library.files import write_atomic

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_G = "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
T5_XXL = "google/t5-v1_1-xxl"
QWEN_VL = "Qwen/Qwen2.5-VL-7B-Instruct"
QWEN3 = "Qwen/Qwen3-4B"
QWEN3_VL = "Qwen/Qwen3-VL-4B-Instruct"
QWEN3_SMALL = "Qwen/Qwen3-0.6B"
MISTRAL_REPOSITORY = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"

_trained_from: ContextVar[str | Path | None] = ContextVar("trained_from", default=None)
UNLIMITED_TOKENS = 1_000_000  # tokens; we truncate captions, so the tokenizer must not warn

# The files of each kind of tokenizer.
STORED = {
    "BPE": ("vocab.json", "merges.txt"),
    "chat BPE": ("vocab.json", "merges.txt"),
    "instruct BPE": ("tokenizer.json",),
    "Unigram": ("spiece.model",),
}
# A special token of each kind of chat tokenizer.
SPECIAL_TOKENS = {"chat BPE": "<|im_start|>", "instruct BPE": "[SYSTEM_PROMPT]"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "spiece.model"),
)


def tokenizer_kind(name: str) -> str:
    """Return the kind of tokenizer behind an id: "Unigram" for T5, "chat BPE" for Qwen, "instruct BPE" for Mistral,
    "BPE" for CLIP.
    """
    if "qwen" in name.lower():
        return "chat BPE"
    if "mistral" in name.lower():
        return "instruct BPE"
    return "Unigram" if "t5" in name.lower() else "BPE"


def has_tokenizer(folder: Path, kind: str) -> bool:
    """Return whether a folder has a tokenizer of a kind."""
    # Kinds have files of the same names, but CLIP's must never be read from a folder made for another.
    if kind != "Unigram" and _marked(folder) != (kind if kind in SPECIAL_TOKENS else ""):
        return False
    if all((folder / file).is_file() for file in STORED[kind]):
        return True
    model = table_of(folder / "tokenizer.json", TOKENIZER).get("model")
    return isinstance(model, dict) and model.get("type") == kind.split()[-1]


def _marked(folder: Path) -> str:
    """Return the kind of chat tokenizer whose special token is in one of a folder's files, "" if none is."""
    for file in ("tokenizer_config.json", "added_tokens.json", "tokenizer.json"):
        with contextlib.suppress(ConfigError):
            text = read_outside_text(folder / file, TOKENIZER)
            if marked_kind := next((kind for kind, mark in SPECIAL_TOKENS.items() if mark in text), ""):
                return marked_kind
    return ""


@contextlib.contextmanager
def trained_from(model: str | Path | None) -> Iterator[None]:
    """Within the context, also look for tokenizers beside this model, as a model trained from it has none."""
    before = _trained_from.set(model)
    try:
        yield
    finally:
        _trained_from.reset(before)


def tokenizer_places(
    name: str, model: str | Path | None, subfolder: str, cache_dir: str | Path | None
) -> Iterator[Path]:
    """Yield the local folders that a tokenizer may be in, in the order of search."""
    for model_path in (model, _trained_from.get()):
        if model_path and Path(model_path).exists():
            model_folder = Path(model_path) if Path(model_path).is_dir() else Path(model_path).parent
            yield model_folder / subfolder
            yield model_folder / "tokenizers" / name.replace("/", "_")
            if model_folder.parent != model_folder:  # models/unet/x.safetensors with models/tokenizers
                yield model_folder.parent / "tokenizers" / name.replace("/", "_")
    if cache_dir:
        yield Path(cache_dir) / name.replace("/", "_")


def find_tokenizer(
    name: str,
    model: str | Path | None = None,
    subfolder: str = "tokenizer",
    cache_dir: str | Path | None = None,
    token: str | None = None,
) -> Path:
    """Return the folder of a tokenizer, downloaded if it is not on this machine.

    `model` is the checkpoint's file or folder and `subfolder` the tokenizer's place in a diffusers layout. A download
    is also copied to `cache_dir`, if given. Raises ConfigError if the tokenizer is unavailable.
    """
    places = list(tokenizer_places(name, model, subfolder, cache_dir))
    for folder in places:
        if has_tokenizer(folder, tokenizer_kind(name)):
            return folder
    folder = cached(name) or download_tokenizer(name, token, places)
    return copy_tokenizer(folder, Path(cache_dir) / name.replace("/", "_")) if cache_dir else folder


def tokenizer_beside(name: str, subfolder: str, config: Any, files: Sequence[str | None]) -> Path:
    """Return the folder of a tokenizer: beside the first of a model's files, in the base model's sub-folder for it,
    beside the other files, or downloaded. Raises ConfigError.
    """
    base, (first, *others) = config.model.pretrained_model_name_or_path, files
    whole = whole_model(Path(base)) if base and Path(base).exists() else None
    for place in (first, whole or base, *others):
        for folder in tokenizer_places(name, place, subfolder, None):
            if has_tokenizer(folder, tokenizer_kind(name)):
                return folder
    return find_tokenizer(
        name, whole or base, subfolder, config.model.tokenizer_cache_dir, config.hub.huggingface_token
    )


def tokenizer_of_option(folder: str, name: str, option: str) -> Path:
    """Return the folder of a tokenizer that an option names. Raises ConfigError if it has none of this kind."""
    if not has_tokenizer(Path(folder), tokenizer_kind(name)):
        raise ConfigError(
            Problem(
                option,
                ": {folder} does not hold the tokenizer {name}: copy its files there ({stored})",
                folder=folder,
                name=name,
                stored=together(STORED[tokenizer_kind(name)]),
            )
        )
    return Path(folder)


def cached(name: str) -> Path | None:
    """Return the tokenizer's folder in the hub's cache, None if it is not there; never go online."""
    for file in ("tokenizer.json", "merges.txt", "spiece.model"):
        path = huggingface_hub.try_to_load_from_cache(name, file)
        if isinstance(path, str) and has_tokenizer(Path(path).parent, tokenizer_kind(name)):
            return Path(path).parent
    return None


def download_tokenizer(name: str, token: str | None, places: list[Path]) -> Path:
    """Fetch a tokenizer's few small files from the hub into the hub's own cache."""
    token = token or os.environ.get("HF_TOKEN")
    try:
        hub.list_repository(name, token)  # fails faster without a network
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(TOKENIZER_FILES), token=token))
    except Exception as e:  # errors of several network libraries, with the same advice
        places_tried = ", ".join(map(str, places)) or "no local folder was given"
        target_folder = places[-1] if places else Path("tokenizers") / name.replace("/", "_")
        raise ConfigError(
            "the tokenizer {name} is missing: go online once, or copy its files ({stored}) into {where}; it is neither "
            "in its folders ({places_tried}) nor in the Hugging Face cache, and its download failed: {reason}",
            name=name,
            stored=together(STORED[tokenizer_kind(name)]),
            where=target_folder,
            places_tried=places_tried,
            reason=first_line(e),
        ) from e
    if not has_tokenizer(folder, tokenizer_kind(name)):
        raise ConfigError(
            "the repository {name} has no tokenizer of the expected kind ({kind})", name=name, kind=tokenizer_kind(name)
        )
    return folder


def copy_tokenizer(folder: Path, target: Path) -> Path:
    """Copy a tokenizer's files to --tokenizer_cache_dir."""
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            write_atomic(target / file, (folder / file).read_bytes())
    return target


class Tokenizers(Mapping[str, Any]):
    """The tokenizers of a model by encoder, each loaded at its first use."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places, self._known = dict(places), dict[str, Any]()

    def __getitem__(self, encoder: str) -> Any:
        if encoder not in self._known:
            self._known[encoder] = load_tokenizer(*self._places[encoder])
        return self._known[encoder]

    def to_count(self, encoder: str) -> Any:
        """Return a tokenizer that only counts the tokens of captions, without special ones."""
        if encoder in self._known:
            return self._known[encoder]
        folder, name = self._places[encoder]
        return token_counting.counting_tokenizer(folder, TOKENIZER_FILES, name, lambda: self[encoder])

    def __contains__(self, encoder: object) -> bool:  # that of Mapping loads it
        return encoder in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def load_tokenizer(folder: Path, name: str) -> Any:
    """Load a tokenizer from its folder, without pickle and without a network."""
    from library.families.shared.tokenizer_classes import BY_KIND

    reader = BY_KIND[tokenizer_kind(name)]
    for file in TOKENIZER_FILES:
        if (folder / file).exists():
            check_file_size(folder / file, TOKENIZER)  # before parsers without limits open it
    try:
        return reader.from_pretrained(str(folder), local_files_only=True, model_max_length=UNLIMITED_TOKENS)
    except Exception as e:
        raise ConfigError(
            "the tokenizer in {folder} cannot be read ({why}): copy {name} there again", folder=folder, why=e, name=name
        ) from e
