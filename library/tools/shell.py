"""`kohya tools NAME`: the tools in a shell. Nothing heavy is loaded before the arguments are understood."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from library.config.arguments import Arguments
from library.config.problems import ConfigError, Message, counted
from library.jobs.terminal import progress_line
from library.jobs.work import joined

DONE, FAILED, MISUSED = 0, 1, 2
DTYPES = ("float", "fp16", "bf16")


def main(argv: list[str]) -> int:
    """Run one tool; 0 when it worked (verify: when the file is in order), 1 when not. Raises ConfigError."""
    known = parser()
    if not argv:
        known.print_help()
        return MISUSED
    asked = known.parse_args(argv)
    with joined("tools") as work:
        asked.report, asked.store = work.phase if work.folder else progress_line(), work.store
        if code := asked.run(asked):
            work.fail()
    return code


# ---- the tools


def merge(asked: argparse.Namespace) -> int:
    """LoRAs into a checkpoint, or into one LoRA."""
    from library.tools import merge as tool

    loras = [_weighted(text) for text in asked.loras]
    if asked.base:
        if asked.rank or asked.conv_rank or asked.trained_on:
            raise ConfigError(
                "rank, conv_rank and trained_on are for merging LoRAs into one: leave them out with --base"
            )
        done = tool.merge(asked.base, loras, asked.out, dtype=asked.dtype, report=asked.report)
        print(f"{done.path}: {counted(done.modules, 'change')} added to the weights")
        if done.left_out:
            print(
                f"note: {counted(len(done.left_out), 'module')} of text encoders left out, as {asked.base} holds none"
            )
        return DONE
    if asked.dtype == "fp8":
        raise ConfigError("fp8 is for checkpoints: use float, fp16 or bf16 for a LoRA")
    done = tool.join(
        loras,
        asked.out,
        ranks=tool.joining.Ranks(asked.rank, asked.conv_rank),
        dtype=asked.dtype,
        trained_on=asked.trained_on,
        report=asked.report,
    )
    print(f"{done.path}: one LoRA of {len(loras)}, with {counted(done.modules, 'module')}")
    return DONE


def extract(asked: argparse.Namespace) -> int:
    """A LoRA from the difference of two checkpoints."""
    from library.tools import extract as tool

    choices = tool.ExtractOptions(
        **{field.name: getattr(asked, field.name) for field in dataclasses.fields(tool.ExtractOptions)}
    )
    done = tool.extract(asked.tuned, asked.base, asked.out, choices=choices, dtype=asked.dtype, report=asked.report)
    print(f"{done.path}: {counted(done.modules, 'module')}; left out as they do not differ: {done.same}")
    for part in done.left_out:
        print(f"note: {part} differs by no more than {choices.min_diff:g} and was left out")
    return DONE


def resize(asked: argparse.Namespace) -> int:
    """A LoRA with smaller ranks."""
    from library.tools import resize as tool

    choices = tool.ResizeOptions(asked.rank, asked.conv_rank, asked.method, asked.parameter)
    done = tool.resize(asked.lora, asked.out, choices=choices, dtype=asked.dtype, report=asked.report)
    for name, (before, after) in done.ranks.items() if asked.verbose else ():
        print(f"  {name}: {before} -> {after}")
    if all(after >= before for before, after in done.ranks.values()):
        print(f"note: no module has more ranks than asked for, so nothing was cut: {done.path} equals {asked.lora}")
    ranks = sorted(after for _, after in done.ranks.values())
    print(f"{done.path}: ranks {ranks[0]} to {ranks[-1]}; every module keeps at least {done.kept:.1%} of its norm")
    return DONE


def convert(asked: argparse.Namespace) -> int:
    """A LoRA under other names."""
    from library.tools.convert import convert as tool

    said: list[Message] = []
    written = tool(asked.lora, asked.out, to=asked.to, dtype=asked.dtype, report=asked.report, note=said.append)
    print(f"{written}: {asked.to} names")
    for sentence in said:
        print(f"note: {str(sentence)}")
    return DONE


def verify(asked: argparse.Namespace) -> int:
    """Is this LoRA in order?"""
    from library.adapter_files.verify import verify as tool

    found = tool(asked.lora, asked.base, report=asked.report)
    asked.store({"problems": found.problems, "warnings": found.warnings})
    if asked.json:
        print(json.dumps({"ok": found.ok, **dataclasses.asdict(found)}, indent=1, default=str))
        return DONE if found.ok else FAILED
    for row in found.modules if asked.verbose else ():
        mark = "  dead" if row.dead else ""
        norm = "" if row.norm is None else f"norm {row.norm:.4g}, "
        rank = f"rank {row.rank}, alpha {row.alpha:g}, " if row.rank else ""
        print(f"  {row.module}: {row.kind}, {rank}{norm}up to {row.largest:.4g}{mark}")
    if found.modules:
        ranks = sorted({row.rank for row in found.modules if row.rank})
        norms = sorted(row.norm for row in found.modules if row.norm is not None)
        kinds = ", ".join(sorted({row.kind for row in found.modules}))
        family = found.family or "unknown family"
        modules = counted(len(found.modules), "module")
        print(f"{modules} of {kinds}, {family}, {found.style} names, ranks {ranks or 'none'}")
        if norms:
            print(f"norms {norms[0]:.4g} to {norms[-1]:.4g}, middle {norms[len(norms) // 2]:.4g}")
    for text in found.warnings:
        print(f"warning: {text}")
    for text in found.problems:
        print(f"error: {text}", file=sys.stderr)
    if found.ok:
        against = f", and fits {asked.base}" if asked.base else ""
        print(f"{asked.lora} is in order{against}")
    return DONE if found.ok else FAILED


def metadata(asked: argparse.Namespace) -> int:
    """Show what a file says about itself, or change it."""
    from library.tools import metadata as tool

    values = dict(_pair(text) for text in asked.set)
    if not values and not asked.remove:
        found = tool.show(asked.file)
        print(json.dumps(found, indent=1, ensure_ascii=False, default=str) if asked.json else _listed(found))
        return DONE
    if asked.in_place and not asked.yes:
        raise ConfigError("this would change {file} itself: add --yes if that is meant, or give --out", file=asked.file)
    written = tool.edit(
        asked.file, asked.out, values=values, remove=asked.remove, in_place=asked.in_place, report=asked.report
    )
    print(f"{written}: metadata written, tensors unchanged")
    return DONE


# ---- their arguments


def parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """The options of all tools; the page makes its forms of these (forms.py)."""
    made = kind("kohya tools", description="Tools for LoRA files. Nothing that exists is ever overwritten.")
    tools = made.add_subparsers(metavar="NAME", required=True)

    def tool(run: Callable[[argparse.Namespace], int], about: str) -> Any:
        one = tools.add_parser(run.__name__, help=about, description=about)
        one.set_defaults(run=run)
        return one

    _merge(tool(merge, "merge LoRAs into a checkpoint (base), or several into one"))
    _extract(tool(extract, "make a LoRA from a tuned checkpoint minus its base"))
    _resize(tool(resize, "reduce the ranks of a LoRA"))
    one = tool(convert, "change the names in a LoRA: kohya, diffusers (PEFT), comfy")
    one.add_argument("lora", type=Path, help="the file to convert")
    one.add_argument("--to", required=True, choices=("kohya", "diffusers", "comfy"), help="the names to write")
    _output(one)
    one = tool(verify, "check a LoRA for errors; the exit code is 1 when there are some")
    one.add_argument("lora", type=Path, help="the file to check")
    one.add_argument("--base", type=Path, help="a checkpoint that must have every module in the right size")
    one.add_argument("--json", action="store_true", help="everything as JSON")
    one.add_argument("--verbose", action="store_true", help="a line for every module")
    _metadata(tool(metadata, "show or change the metadata of a file"))
    return made


def _output(one: argparse.ArgumentParser, dtypes: tuple[str, ...] = DTYPES, default: str | None = None) -> None:
    one.add_argument("--out", type=Path, required=True, help="the new .safetensors file")
    text = f"how numbers are stored ({default or 'as in the input'} when not given)"
    one.add_argument("--dtype", choices=dtypes, default=default, help=text)


def _merge(one: argparse.ArgumentParser) -> None:
    one.add_argument("loras", nargs="+", metavar="LORA[=WEIGHT]", help="files with their weights (1 when not given)")
    one.add_argument("--base", type=Path, help="the model to merge into")
    one.add_argument("--rank", type=int, help="cut the sum to this rank; without it the sum is exact and ranks add up")
    one.add_argument("--conv_rank", type=int, help="the same for convolutions")
    text = "the model that files were trained on, which DoRA, OFT, BOFT, GLoRA and iA3 need to become one LoRA"
    one.add_argument("--trained_on", type=Path, help=text)
    _output(one, (*DTYPES, "fp8"))


def _extract(one: argparse.ArgumentParser) -> None:
    one.add_argument("tuned", type=Path, help="the checkpoint that was fine-tuned")
    one.add_argument("base", type=Path, help="the checkpoint that it was made from")
    one.add_argument("--rank", type=int, default=16, help="rank of every module (%(default)s)")
    one.add_argument("--conv_rank", type=int, help="take residual blocks of convolutions as well, 3x3 with this rank")
    one.add_argument(
        "--clamp", type=float, default=0.99, help="quantile to which values are cut; 1: none (%(default)s)"
    )
    text = "text encoders that differ nowhere by more are left out (%(default)s)"
    one.add_argument("--min_diff", type=float, default=0.01, help=text)
    text = "power steps of the quick decomposition; 0: the exact, slow one (%(default)s)"
    one.add_argument("--iterations", type=int, default=4, help=text)
    one.add_argument("--device", default="cpu", help="where to compute: cpu or cuda (%(default)s)")
    _output(one, default="fp16")


def _resize(one: argparse.ArgumentParser) -> None:
    one.add_argument("lora", type=Path, help="the file to make smaller")
    one.add_argument("--rank", type=int, required=True, help="the largest rank")
    one.add_argument("--conv_rank", type=int, help="the same for convolutions (--rank when not given)")
    one.add_argument(
        "--method",
        default="fixed",
        choices=("fixed", "sv_ratio", "sv_fro", "sv_cumulative"),
        help="how the rank of each module is found (%(default)s)",
    )
    text = "of the dynamic methods: sv_ratio above 1, the others a share to keep"
    one.add_argument("--parameter", type=float, help=text)
    one.add_argument("--verbose", action="store_true", help="a line for every module")
    _output(one)


def _metadata(one: argparse.ArgumentParser) -> None:
    one.add_argument("file", type=Path, help="the .safetensors file")
    one.add_argument("--json", action="store_true", help="show as JSON")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="ss_* and modelspec.* keys")
    one.add_argument("--remove", action="append", default=[], metavar="KEY", help="a key, or all that begin so: ss_*")
    one.add_argument("--out", type=Path, help="the new file")
    one.add_argument("--in_place", action="store_true", help="change the file itself; needs --yes")
    one.add_argument("--yes", action="store_true")


def _weighted(text: str) -> tuple[str, float]:
    """ "a.safetensors=0.8" -> its two parts; a name may have a = in it. ConfigError for a weight that is no number."""
    name, found, weight = text.rpartition("=")
    if not found or Path(text).exists():
        return text, 1.0
    try:
        number = float(weight)
    except ValueError:
        raise ConfigError(
            "the weight of {path} is {weight}, which is no number: write {example}",
            path=name,
            weight=repr(weight),
            example=f"{name}=0.5",
        ) from None
    if not math.isfinite(number):
        raise ConfigError(
            "the weight of {path} must be a finite number: write {example}", path=name, example=f"{name}=0.5"
        )
    return name, number


def _pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise ConfigError("--set takes KEY=VALUE, got {text}", text=text)
    return key, value


def _listed(found: dict[str, str]) -> str:
    if not found:
        return "no metadata"
    return "\n".join(
        f"{key}: {value if len(value) < 200 else value[:200] + ' ...'}" for key, value in sorted(found.items())
    )
