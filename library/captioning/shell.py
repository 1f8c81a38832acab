"""`kohya caption`: captions for a folder of images, by a model in a local folder or from the Hugging Face Hub."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message, Report, counted, option_name
from library.downloads import model_folder
from library.downloads.shell import default_folder
from library.jobs.work import run_command

if TYPE_CHECKING:
    from library.captioning.writing import Captioner

EXIT_DONE = 0
BLIP = "Salesforce/blip-image-captioning-large"  # the weights that make_captions.py reads, in .safetensors
# What a model writes and the size of its download, by way and id; the first of each is the default.
MODELS = {
    "wd14": {
        "SmilingWolf/wd-vit-tagger-v3": "WD ViT v3, tags, 0.4 GB",
        "SmilingWolf/wd-eva02-large-tagger-v3": "WD EVA02 large v3, the most accurate tags, 1.3 GB",
    },
    "hf": {
        "Qwen/Qwen2.5-VL-3B-Instruct": "Qwen2.5-VL 3B, sentences as your prompt asks for, 7.5 GB",
        "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2.5-VL 7B, the same with fewer mistakes, 16.6 GB",
        BLIP: "BLIP large, one short sentence without a prompt, 1.9 GB",
        "Salesforce/blip-image-captioning-base": "BLIP base, one short sentence without a prompt, 1.0 GB",
    },
}


def main(argv: list[str]) -> int:
    return run_command("caption", build_caption_parser(), argv, _caption_folder)


def _caption_folder(arguments: argparse.Namespace, report: Report) -> int:
    from library.captioning import writing  # on demand, so that --help is instant

    choices = writing.CaptioningOptions(
        arguments.extension, arguments.existing, arguments.prefix, arguments.suffix, arguments.depth
    )
    folder = Path(os.path.expanduser(arguments.folder))
    files, skipped, foreign = writing.list_images_to_caption(folder, choices)
    if not files:
        if skipped:
            captioned = counted(skipped, "image")
            print(f"{folder}: {captioned} with captions, and none without: choose to add to captions or replace them")
        if foreign:
            print(writing.describe_foreign_captions(foreign))
        return EXIT_DONE
    captioner = _load_captioner(arguments, report)
    callbacks = [print] if arguments.debug else []
    print(writing.summarise_captioning(folder, writing.write_captions(folder, captioner, choices, report, *callbacks)))
    return EXIT_DONE


def build_caption_parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """Return the parser of the options, from which the page also builds its form."""
    parser = kind(
        "kohya caption",
        description="Caption images with a model. The page's tab Data shows what was written, and can undo it.",
    )
    ways = parser.add_subparsers(dest="way", metavar="COMMAND", required=True)
    text = "write tags with a WD14 tagger (model.onnx and selected_tags.csv in a folder)"
    tagger = ways.add_parser("wd14", help=text, description=text)
    _add_model_arguments(tagger, "wd14", "folder with model.onnx and selected_tags.csv, or a Hugging Face id")
    tagger.add_argument("--general", type=float, default=0.35, help="least probability of a tag")
    tagger.add_argument("--character", type=float, default=0.75, help="least probability of a character's name")
    tagger.add_argument("--undesired", default="", help="tags that are never written, separated by commas")
    tagger.add_argument("--rating", action="store_true", help="begin with the rating (general, sensitive and so on)")
    tagger.add_argument("--underscores", action="store_true", help="keep underscores instead of spaces")
    _add_caption_options(tagger, 4)
    text = "write sentences with a vision language model (Qwen2.5-VL, LLaVA, Gemma 3) or a captioner (BLIP, GIT)"
    describer = ways.add_parser("hf", help=text, description=text)
    _add_model_arguments(describer, "hf", "folder with config.json and .safetensors, or a Hugging Face id")
    describer.add_argument("--prompt", default="", help="the question to the model; BLIP and GIT take none")
    describer.add_argument(
        "--max_tokens", type=int, default=75, help="longest caption, in tokens; 300 for a detailed one"
    )
    describer.add_argument("--beams", type=int, default=1, help="beam search width; 1 is fastest")
    _add_caption_options(describer, 1)
    _add_blip(ways)
    return parser


def _add_blip(ways: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the flags of sd-scripts' finetune/make_captions.py, with its defaults."""
    text = "write captions with BLIP and the flags of sd-scripts' make_captions.py, replacing existing captions"
    parser = ways.add_parser("blip", help=text, description=text)
    parser.add_argument("folder", type=Path, metavar="train_data_dir", help="folder of images")
    parser.add_argument(
        "--caption_weights",
        dest="model",
        default=BLIP,
        metavar="MODEL",
        help="BLIP in .safetensors: a folder or a Hugging Face id",
    )
    parser.add_argument(
        "--caption_extension",
        "--caption_extention",  # sd-scripts still accepts this misspelling of earlier versions
        dest="extension",
        default=".caption",
        help="extension of the caption files",
    )
    parser.add_argument(
        "--beam_search", action="store_true", help="beam search; else tokens are drawn (nucleus sampling)"
    )
    parser.add_argument("--num_beams", type=int, default=1, help="beam search width")
    parser.add_argument("--top_p", type=float, default=0.9, help="of nucleus sampling")
    parser.add_argument("--max_length", type=int, default=75, help="most tokens of a caption")
    parser.add_argument("--min_length", type=int, default=5, help="fewest tokens of a caption")
    parser.add_argument("--seed", type=int, default=42, help="of nucleus sampling")
    parser.add_argument("--batch_size", type=int, default=1, help="images at once")
    parser.add_argument(
        "--recursive",
        dest="depth",
        action="store_const",
        const=None,
        default=0,
        help="folders inside the folder as well",
    )
    parser.add_argument("--debug", action="store_true", help="print each caption")
    parser.add_argument("--max_data_loader_n_workers", type=int, help="accepted; it changes nothing here")
    parser.add_argument("--pin_memory", action="store_true", help="accepted; it changes nothing here")
    parser.set_defaults(existing="replace", prefix="", suffix="", device="auto")


def _add_model_arguments(parser: argparse.ArgumentParser, way: str, model: str) -> None:
    parser.set_defaults(depth=1, debug=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    parser.add_argument(
        "--model", default=next(iter(MODELS[way])), metavar="MODEL", help=f"{model} (default: %(default)s)"
    )
    rows = "\n".join(f"  {name}\n      {text}" for name, text in MODELS[way].items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"models, each downloaded once:\n{rows}"


def _add_caption_options(parser: argparse.ArgumentParser, batch: int) -> None:
    parser.add_argument("--extension", default=".txt", help="extension of the caption files")
    parser.add_argument(
        "--existing",
        choices=("skip", "add", "replace"),
        default="skip",
        help="what to do with images that have a caption",
    )
    parser.add_argument("--prefix", default="", help="tags in front of every caption, such as the trigger word")
    parser.add_argument("--suffix", default="", help="tags at the end of every caption")
    parser.add_argument("--batch_size", type=int, default=batch, help="images at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")


def _load_captioner(arguments: argparse.Namespace, report: Report) -> "Captioner":
    """Load the model; download it first if it is given by its id. The options are checked before."""
    if arguments.batch_size < 1:
        raise ConfigError(
            "{name} is {value}: it must be at least 1", name=option_name("batch_size"), value=arguments.batch_size
        )
    if arguments.way == "wd14":
        from library.captioning.wd14 import Limits, Tagger

        limits = Limits(
            arguments.general, arguments.character, arguments.rating, arguments.undesired, arguments.underscores
        )
        folder = model_folder.find_model_folder(arguments.model, model_folder.TAGGER, default_folder(), report)
        report(Message("loading the model"), 0, 1)
        return Tagger(folder, limits, arguments.batch_size, arguments.device)
    from library.captioning.describer import Describer, Generation

    if arguments.way == "blip":
        if arguments.model.lower().endswith((".pth", ".pt", ".bin")):
            raise ConfigError(
                "{model} may hold code and is not opened: leave caption_weights out, or name a folder "
                "with BLIP in .safetensors",
                model=arguments.model,
            )
        top_p = 0 if arguments.beam_search else arguments.top_p
        beams = arguments.num_beams if arguments.beam_search else 1
        generation, prompt = Generation(arguments.max_length, arguments.min_length, beams, top_p, arguments.seed), ""
    else:
        generation, prompt = Generation(arguments.max_tokens, beams=arguments.beams), arguments.prompt
    folder = model_folder.find_model_folder(arguments.model, model_folder.TRANSFORMERS, default_folder(), report)
    report(Message("loading the model"), 0, 1)
    return Describer(folder, prompt, generation, arguments.batch_size, arguments.device)
