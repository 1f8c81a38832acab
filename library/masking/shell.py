"""`kohya mask`: masks for a folder of images, from a segmentation model or from their transparency."""

import argparse
import os
from pathlib import Path

from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message, Report, counted, option_name
from library.data.folders import some
from library.downloads import model_folder
from library.downloads.shell import default_folder
from library.jobs.work import run_command
from library.masking import files
from library.masking.segmenter import SegmentationModel

EXIT_DONE = 0


def main(argv: list[str]) -> int:
    return run_command("mask", build_mask_parser(), argv, _make_masks)


def _make_masks(arguments: argparse.Namespace, report: Report) -> int:
    options = files.MaskOptions(arguments.existing, arguments.outside, arguments.invert, arguments.into)
    images = Path(os.path.expanduser(arguments.folder)).absolute()
    masks = Path(os.path.expanduser(arguments.masks)).absolute() if arguments.masks else files.usual_folder(images)
    if arguments.way == "alpha":
        done = files.make_of_alpha(images, masks, options, report)
    else:
        if arguments.batch_size < 1:
            raise ConfigError(
                "{name} is {value}: it must be at least 1", name=option_name("batch_size"), value=arguments.batch_size
            )
        folder = model_folder.find_model_folder(arguments.model, model_folder.TRANSFORMERS, default_folder(), report)
        report(Message("loading the model"), 0, 1)
        model = SegmentationModel(folder, arguments.words, arguments.threshold, arguments.batch_size, arguments.device)
        done = files.make_masks(images, masks, model, options, report)
    print(f"{images if options.into == files.ALPHA else masks}: {counted(done.written, 'mask')} written")
    if arguments.way == "alpha" and not (done.written or done.skipped or done.unreadable):
        print("no image is transparent anywhere: masks can be made of PNG and WebP files that are")
    if done.skipped:
        print(f"{counted(done.skipped, 'image')} had a mask already")
    if done.unreadable:
        print(f"{counted(len(done.unreadable), 'image')} cannot be read: {some(done.unreadable)}")
    return EXIT_DONE


def build_mask_parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """Return the parser of the options, from which the page also builds its form."""
    parser = kind(
        "kohya mask",
        description="Make masks: bright where a training learns. The page shows them over the images, to be corrected.",
    )
    ways = parser.add_subparsers(dest="way", metavar="COMMAND", required=True)
    text = (
        "make masks with CLIPSeg, which finds what words describe, or with a model that knows classes (SegFormer, "
        "Mask2Former)"
    )
    model_parser = ways.add_parser("model", help=text, description=text)
    model_parser.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    text = "folder with config.json and .safetensors, or a Hugging Face id such as CIDAS/clipseg-rd64-refined"
    model_parser.add_argument("--model", required=True, metavar="MODEL", help=text)
    model_parser.add_argument("--words", required=True, help="what is to be learned, such as: person, dog")
    model_parser.add_argument(
        "--threshold", type=float, default=0.4, help="for CLIPSeg: lower values take more of the image"
    )
    _add_mask_options(model_parser)
    model_parser.add_argument(
        "--into",
        choices=files.INTO,
        default=files.FOLDER,
        help="a folder of masks, or the alpha channel of PNG and WebP images (alpha_mask)",
    )
    model_parser.add_argument("--batch_size", type=int, default=1, help="images at once")
    model_parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    text = "make masks from the transparency of images: what is transparent is not learned"
    model_parser = ways.add_parser("alpha", help=text, description=text)
    model_parser.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    model_parser.set_defaults(into=files.FOLDER)
    _add_mask_options(model_parser)
    return parser


def _add_mask_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--masks", type=Path, metavar="FOLDER", help="where masks are; else FOLDER-masks beside it")
    parser.add_argument(
        "--existing", choices=files.EXISTING, default=files.SKIP, help="what to do with images that have a mask"
    )
    parser.add_argument("--outside", type=int, default=0, help="how much the rest of the image counts, in percent")
    parser.add_argument("--invert", action="store_true", help="learn the rest, and leave out what was found")
