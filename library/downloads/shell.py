"""`kohya models`: list models on this computer, and download others from the Hugging Face Hub."""

import argparse
import os
from pathlib import Path

from library import families
from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message
from library.downloads import finding, hub
from library.downloads.hub_files import default_folder
from library.families.facts import HubModel
from library.files import need_space
from library.jobs.work import join_work

EXIT_DONE = 0
GB = 1e9


def main(argv: list[str]) -> int:
    """List or download models. Returns the exit code 0. Raises ConfigError."""
    arguments = build_download_parser().parse_args(argv)
    if arguments.way == "list":
        folders = arguments.folders or finding.usual_folders([default_folder(), Path.home(), Path.cwd(), hub_cache()])
        print(
            "\n".join(
                f"{model.size / GB:8.2f} GB  {model.words:<34} {model.path}" for model in finding.find_models(folders)
            )
            or "no models found: name folders, or download one with kohya models get"
        )
    elif not arguments.models:
        print(
            "\n".join(
                download_line(family.title, model) for family in families.all_families() for model in family.hub_models
            )
        )
    else:
        _download([file for name in arguments.models for file in files_of_title(name)], arguments.into)
    return EXIT_DONE


def build_download_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = Arguments(
        "kohya models",
        example="kohya models list",
        description="Find models on this computer, or download them from Hugging Face.",
    )
    ways = parser.add_subparsers(dest="way", metavar="COMMAND", required=True)
    text = "list the models on this computer by the content of their files"
    list_parser = ways.add_parser("list", help=text, description=text)
    list_parser.add_argument(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="folders to search; else the usual ones"
    )
    text = "download models from Hugging Face; without a name, list what can be downloaded"
    get_parser = ways.add_parser("get", help=text, description=text)
    get_parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a title from the list, with text encoders and VAE, or owner/name/file",
    )
    get_parser.add_argument(
        "--into", type=Path, default=default_folder(), metavar="FOLDER", help="folder for the files"
    )
    return parser


def hub_cache() -> Path:
    home = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface")))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def download_line(family: str, model: HubModel) -> str:
    parts = " + ".join(f"{file.path.rpartition('/')[2]} {file.size / GB:.1f} GB" for file in model.files)
    return f"{model.title} ({family}): {sum(file.size for file in model.files) / GB:.1f} GB\n  {parts}"


def files_of_title(name: str) -> list[str]:
    """Return files as owner/name/path, from a title or such a name. Raises ConfigError."""
    for family in families.all_families():
        for model in family.hub_models:
            if model.title.lower() == name.strip().lower():
                return [f"{file.repository}/{file.path}" for file in model.files]
    if name.count("/") < 2:
        titles = ", ".join(model.title for facts in families.all_families() for model in facts.hub_models)
        raise ConfigError(
            "{name} is not a known model: write owner/name/file.safetensors, or one of {titles}",
            name=name,
            titles=titles,
        )
    return [name]


def _download(names: list[str], folder: Path) -> None:
    """Download files in order; all problems of the files and their targets are reported before the first."""
    with join_work("models") as work:
        work.phase(Message("asking the hub"))
        files = hub.remote_files(dict.fromkeys(names))
        targets = [hub.target_path(folder, file) for file in files]
        need_space(folder, sum(hub.still_needed(path, file) for path, file in zip(targets, files, strict=True)))
        downloaded: list[str] = []
        shown_percent = -1

        def report(message: Message, now: int, total: int) -> None:
            nonlocal shown_percent
            work.phase(message, now, total)
            percent = now * 100 // max(1, total)
            if not work.folder and percent != shown_percent:
                shown_percent = percent
                print(f"\r{message} {now / GB:.2f} / {total / GB:.2f} GB", end="", flush=True)

        for path, file in zip(targets, files, strict=True):
            hub.download_file(file, path, report)
            downloaded.append(str(path))
            work.store({"files": downloaded})
            print(f"{chr(13) if not work.folder else ''}{path}")
