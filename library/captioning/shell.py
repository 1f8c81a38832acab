"""`kohya caption`: captions for a folder of images, by a model that lies in a local folder."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from library.config.schema import ConfigError
from library.runs.job_work import joined

if TYPE_CHECKING:
    from library.captioning.writing import Captioner

DONE, MISUSED = 0, 2


def main(argv: list[str]) -> int:
    """Caption a folder; 0 when it worked. Raises ConfigError."""
    known = parser()
    if not argv:
        known.print_help()
        return MISUSED
    asked = known.parse_args(argv)
    with joined("caption") as work:
        return _captioned(asked, work.phase if work.folder else _told)


def _captioned(asked: argparse.Namespace, report: Callable[[str, int, int], None]) -> int:
    from library.captioning import writing

    choices = writing.CaptioningOptions(asked.extension, asked.existing, asked.prefix, asked.suffix)
    wanted, skipped = writing.to_do(asked.folder, choices)
    if not wanted:
        print(f"{asked.folder}: all {skipped} images have captions already (--existing add or replace changes that)")
        return DONE
    report("loading the model", 0, 1)
    captioner = _captioner(asked)
    print(writing.summary(asked.folder, writing.caption(asked.folder, captioner, choices, report)))
    return DONE


def parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options; the page makes its form of these."""
    made = kind(
        "kohya caption",
        description="Caption images with a local model. The page's data set tab can undo what was written.",
    )
    ways = made.add_subparsers(dest="way", metavar="WAY", required=True)
    text = "tags by a WD14 tagger (model.onnx and selected_tags.csv in a folder)"
    one = ways.add_parser("wd14", help=text, description=text)
    _common(one, "the folder with model.onnx and selected_tags.csv", 4)
    one.add_argument("--general", type=float, default=0.35, help="least probability of a tag")
    one.add_argument("--character", type=float, default=0.75, help="least probability of a character's name")
    one.add_argument("--undesired", default="", help="tags that are never written, separated by commas")
    one.add_argument("--rating", action="store_true", help="begin with the rating (general, sensitive and so on)")
    one.add_argument("--underscores", action="store_true", help="keep underscores instead of spaces")
    text = "sentences by a Hugging Face captioner (BLIP, GIT, ViT-GPT2, chat models) in a local folder"
    one = ways.add_parser("hf", help=text, description=text)
    _common(one, "the folder with config.json and .safetensors weights", 1)
    one.add_argument("--prompt", default="", help="the prompt: a question, or the beginning of the caption")
    one.add_argument("--max_tokens", type=int, default=75, help="the most tokens of a caption")
    one.add_argument("--beams", type=int, default=1, help="beam search width; slower")
    return made


def _common(one: argparse.ArgumentParser, model: str, batch: int) -> None:
    one.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    one.add_argument("--model", type=Path, required=True, metavar="FOLDER", help=model)
    one.add_argument("--extension", default=".txt", help="ending of the caption files")
    one.add_argument("--existing", choices=("skip", "add", "replace"), default="skip",
                     help="what to do with images that have a caption")  # fmt: skip
    one.add_argument("--prefix", default="", help="tags in front of every caption, such as the trigger word")
    one.add_argument("--suffix", default="", help="tags at the end of every caption")
    one.add_argument("--batch_size", type=int, default=batch, help="images at once")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")


def _captioner(asked: argparse.Namespace) -> "Captioner":
    if asked.batch_size < 1:
        raise ConfigError("batch_size is {batch_size}: it must be at least 1", batch_size=asked.batch_size)
    if asked.way == "wd14":
        from library.captioning.wd14 import Limits, Tagger

        limits = Limits(asked.general, asked.character, asked.rating, asked.undesired, asked.underscores)
        return Tagger(asked.model, limits, asked.batch_size, asked.device)
    for name in ("max_tokens", "beams"):
        if getattr(asked, name) < 1:
            raise ConfigError("{name} is {value}: it must be at least 1", name=name, value=getattr(asked, name))
    from library.captioning.hub import Describer

    return Describer(asked.model, asked.prompt, asked.max_tokens, asked.beams, asked.batch_size, asked.device)


def _told(what: str, done: int, total: int) -> None:
    print(f"{what} {done} / {total}", flush=True)
