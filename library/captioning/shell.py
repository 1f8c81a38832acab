"""`kohya caption`: captions for a folder of images, by a model in a local folder or from the Hugging Face Hub."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message, Report, counted
from library.downloads import model_folder
from library.downloads.shell import default_folder
from library.jobs.work import run_command

if TYPE_CHECKING:
    from library.captioning.writing import Captioner

DONE = 0
BLIP = "Salesforce/blip-image-captioning-large"  # the weights that make_captions.py reads, in .safetensors


def main(argv: list[str]) -> int:
    """Caption a folder. Returns the exit code 0. Raises ConfigError."""
    return run_command("caption", parser(), argv, _captioned)


def _captioned(asked: argparse.Namespace, report: Report) -> int:
    from library.captioning import writing

    choices = writing.CaptioningOptions(asked.extension, asked.existing, asked.prefix, asked.suffix, asked.depth)
    folder = asked.folder.expanduser()
    wanted, skipped, foreign = writing.to_do(folder, choices)
    if not wanted:
        if skipped:
            there = counted(skipped, "image")
            print(f"{folder}: {there} with captions, and none without (--existing add or replace changes that)")
        if foreign:
            print(writing.left_alone(foreign))
        return DONE
    captioner = _captioner(asked, report)
    shown = [print] if asked.debug else []
    print(writing.summary(folder, writing.caption(folder, captioner, choices, report, *shown)))
    return DONE


def parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """The options, of which the page makes its form."""
    made = kind(
        "kohya caption",
        description="Caption images with a model. The page's data set tab shows and can undo what was written.",
    )
    ways = made.add_subparsers(dest="way", metavar="WAY", required=True)
    text = "tags by a WD14 tagger (model.onnx and selected_tags.csv in a folder)"
    one = ways.add_parser("wd14", help=text, description=text)
    _add_first(one, "folder with model.onnx and selected_tags.csv, or a Hugging Face id, downloaded once")
    one.add_argument("--general", type=float, default=0.35, help="least probability of a tag")
    one.add_argument("--character", type=float, default=0.75, help="least probability of a character's name")
    one.add_argument("--undesired", default="", help="tags that are never written, separated by commas")
    one.add_argument("--rating", action="store_true", help="begin with the rating (general, sensitive and so on)")
    one.add_argument("--underscores", action="store_true", help="keep underscores instead of spaces")
    _add_common(one, 4)
    text = "sentences by a vision language model (Qwen2.5-VL, LLaVA, Gemma 3) or a captioner (BLIP, GIT)"
    one = ways.add_parser("hf", help=text, description=text)
    _add_first(one, "folder with config.json and .safetensors, or a Hugging Face id, downloaded once")
    one.add_argument("--prompt", default="", help="what the model is asked to write; BLIP and GIT cannot be asked")
    one.add_argument("--max_tokens", type=int, default=75, help="longest caption, in tokens; 300 for a detailed one")
    one.add_argument("--beams", type=int, default=1, help="beam search width; 1 is fastest")
    _add_common(one, 1)
    _add_blip(ways)
    return made


def _add_blip(ways: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The flags of sd-scripts' finetune/make_captions.py, with its defaults."""
    text = "captions by BLIP, with the flags of sd-scripts' make_captions.py; existing captions are replaced"
    one = ways.add_parser("blip", help=text, description=text)
    one.add_argument("folder", type=Path, metavar="train_data_dir", help="folder of images")
    one.add_argument(
        "--caption_weights",
        dest="model",
        default=BLIP,
        metavar="MODEL",
        help="BLIP in .safetensors: a folder or a Hugging Face id (default: %(default)s)",
    )
    one.add_argument(
        "--caption_extension",
        "--caption_extention",
        dest="extension",
        default=".caption",
        help="ending of the caption files (default: %(default)s)",
    )
    one.add_argument("--beam_search", action="store_true", help="beam search; else tokens are drawn (nucleus sampling)")
    one.add_argument("--num_beams", type=int, default=1, help="beam search width (default: %(default)s)")
    one.add_argument("--top_p", type=float, default=0.9, help="of nucleus sampling (default: %(default)s)")
    one.add_argument("--max_length", type=int, default=75, help="most tokens of a caption (default: %(default)s)")
    one.add_argument("--min_length", type=int, default=5, help="fewest tokens of a caption (default: %(default)s)")
    one.add_argument("--seed", type=int, default=42, help="of nucleus sampling (default: %(default)s)")
    one.add_argument("--batch_size", type=int, default=1, help="images at once (default: %(default)s)")
    one.add_argument(
        "--recursive",
        dest="depth",
        action="store_const",
        const=None,
        default=0,
        help="folders inside the folder as well",
    )
    one.add_argument("--debug", action="store_true", help="print each caption")
    one.add_argument("--max_data_loader_n_workers", type=int, help="accepted; it changes nothing here")
    one.add_argument("--pin_memory", action="store_true", help="accepted; it changes nothing here")
    one.set_defaults(existing="replace", prefix="", suffix="", device="auto")


def _add_first(one: argparse.ArgumentParser, model: str) -> None:
    one.set_defaults(depth=1, debug=False)
    one.add_argument("folder", type=Path, metavar="FOLDER", help="images, or folders with images")
    one.add_argument("--model", required=True, metavar="MODEL", help=model)


def _add_common(one: argparse.ArgumentParser, batch: int) -> None:
    one.add_argument("--extension", default=".txt", help="ending of the caption files")
    one.add_argument(
        "--existing",
        choices=("skip", "add", "replace"),
        default="skip",
        help="what to do with images that have a caption",
    )
    one.add_argument("--prefix", default="", help="tags in front of every caption, such as the trigger word")
    one.add_argument("--suffix", default="", help="tags at the end of every caption")
    one.add_argument("--batch_size", type=int, default=batch, help="images at once")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")


def _captioner(asked: argparse.Namespace, report: Report) -> "Captioner":
    """The loaded model, downloaded first if it was given by its id. Other options are validated before."""
    if asked.batch_size < 1:
        raise ConfigError("batch_size is {batch_size}: it must be at least 1", batch_size=asked.batch_size)
    if asked.way == "wd14":
        from library.captioning.wd14 import Limits, Tagger

        limits = Limits(asked.general, asked.character, asked.rating, asked.undesired, asked.underscores)
        folder = model_folder.find(asked.model, model_folder.TAGGER, default_folder(), report)
        report(Message("loading the model"), 0, 1)
        return Tagger(folder, limits, asked.batch_size, asked.device)
    from library.captioning.describer import Describer, Generation

    if asked.way == "blip":
        if asked.model.lower().endswith((".pth", ".pt", ".bin")):
            raise ConfigError(
                "{model} may hold code and is not opened: leave caption_weights out, or name a folder "
                "with BLIP in .safetensors",
                model=asked.model,
            )
        top_p = 0 if asked.beam_search else asked.top_p
        beams = asked.num_beams if asked.beam_search else 1
        generation, prompt = Generation(asked.max_length, asked.min_length, beams, top_p, asked.seed), ""
    else:
        generation, prompt = Generation(asked.max_tokens, beams=asked.beams), asked.prompt
    folder = model_folder.find(asked.model, model_folder.TRANSFORMERS, default_folder(), report)
    report(Message("loading the model"), 0, 1)
    return Describer(folder, prompt, generation, asked.batch_size, asked.device)
