"""`kohya mask`: masks for a folder of images, from a segmentation model or from their transparency."""

import argparse
from pathlib import Path

from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message, Report, counted
from library.data.folders import some
from library.downloads import model_folder
from library.downloads.shell import default_folder
from library.jobs.work import run_command
from library.masking import files
from library.masking.segmenter import SegmentationModel

DONE = 0


def main(argv: list[str]) -> int:
    """Make masks for a folder. Returns the exit code 0. Raises ConfigError."""
    return run_command("mask", parser(), argv, _make_masks)


def _make_masks(asked: argparse.Namespace, report: Report) -> int:
    options = files.MaskOptions(asked.existing, asked.outside, asked.invert, asked.into)
    images = asked.folder.expanduser().absolute()
    masks = asked.masks.expanduser().absolute() if asked.masks else files.usual_folder(images)
    if asked.way == "alpha":
        done = files.make_of_alpha(images, masks, options, report)
    else:
        if asked.batch_size < 1:
            raise ConfigError("batch_size is {batch_size}: it must be at least 1", batch_size=asked.batch_size)
        folder = model_folder.find(asked.model, model_folder.TRANSFORMERS, default_folder(), report)
        report(Message("loading the model"), 0, 1)
        model = SegmentationModel(folder, asked.words, asked.threshold, asked.batch_size, asked.device)
        done = files.make(images, masks, model, options, report)
    print(f"{images if options.into == files.ALPHA else masks}: {counted(done.written, 'mask')} written")
    if asked.way == "alpha" and not (done.written or done.skipped or done.unreadable):
        print("no image is transparent anywhere: masks can be made of PNG and WebP files that are")
    if done.skipped:
        print(f"{counted(done.skipped, 'image')} had a mask already")
    if done.unreadable:
        print(f"{counted(len(done.unreadable), 'image')} cannot be read: {some(done.unreadable)}")
    return DONE


def parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """The options, of which the page makes its form."""
    made = kind(
        "kohya mask",
        description="Make masks: bright where a training learns. The page shows them over the images, to be corrected.",
    )
    ways = made.add_subparsers(dest="way", metavar="WAY", required=True)
    text = (
        "masks by CLIPSeg, which finds what words describe, or by a model that knows classes (SegFormer, Mask2Former)"
    )
    one = ways.add_parser("model", help=text, description=text)
    one.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    text = "folder with config.json and .safetensors, or a Hugging Face id, downloaded once"
    one.add_argument("--model", required=True, metavar="MODEL", help=text)
    one.add_argument("--words", required=True, help="what is to be learned, such as: person, dog")
    one.add_argument("--threshold", type=float, default=0.4, help="of CLIPSeg: lower takes more of the image")
    _add_common(one)
    one.add_argument(
        "--into",
        choices=files.INTO,
        default=files.FOLDER,
        help="a folder of masks, or the alpha channel of PNG and WebP images (alpha_mask)",
    )
    one.add_argument("--batch_size", type=int, default=1, help="images at once")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    text = "masks of the transparency that images have: what is transparent is not learned"
    one = ways.add_parser("alpha", help=text, description=text)
    one.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    one.set_defaults(into=files.FOLDER)
    _add_common(one)
    return made


def _add_common(one: argparse.ArgumentParser) -> None:
    one.add_argument("--masks", type=Path, metavar="FOLDER", help="where masks are; else FOLDER-masks beside it")
    one.add_argument(
        "--existing", choices=files.EXISTING, default=files.SKIP, help="what to do with images that have a mask"
    )
    one.add_argument("--outside", type=int, default=0, help="how much the rest of the image counts, in percent")
    one.add_argument("--invert", action="store_true", help="learn the rest, and leave out what was found")
