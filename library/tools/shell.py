"""`kohya tools NAME`: the tools in a shell. Parses the arguments before loading anything heavy."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library import families
from library.config.arguments import Arguments
from library.config.problems import (
    ConfigError,
    Message,
    Problem,
    attempted,
    counted,
    option_name,
    raise_if_any,
    together,
)
from library.config.strengths import weighted_file
from library.jobs.work import join_work, progress_line

if TYPE_CHECKING:
    from library.adapter_files.verify import Findings

EXIT_DONE, EXIT_FAILED, EXIT_MISUSED = 0, 1, 2
DTYPES = ("float", "fp16", "bf16")


def main(argv: list[str]) -> int:
    """Run one tool; return 0 on success (verify: for a valid file), else 1. Raises ConfigError."""
    parser = build_tools_parser()
    if not argv:
        parser.print_help()
        return EXIT_MISUSED
    arguments = parser.parse_args(argv)
    with join_work("tools") as work:
        arguments.report, arguments.store = work.phase if work.folder else progress_line(), work.store
        if code := arguments.run(arguments):
            work.fail()
    return code


# ---- the tools


def merge(arguments: argparse.Namespace) -> int:
    """Merge LoRAs into a checkpoint, or into one LoRA."""
    from library.tools import merge as tool

    problems: list[Problem] = []
    loras = [*filter(None, [attempted(problems, lambda text=text: weighted_file(text)) for text in arguments.loras])]
    raise_if_any(problems)
    if arguments.base:
        if arguments.rank or arguments.conv_rank or arguments.trained_on:
            template = "{options} are for merging LoRAs into one: leave them out, or leave out {base}"
            options = together([*map(option_name, ("rank", "conv_rank", "trained_on"))])
            raise ConfigError(template, options=options, base=option_name("base"))
        done = tool.merge_into_checkpoint(
            arguments.base, loras, arguments.out, dtype=arguments.dtype, report=arguments.report
        )
        print(f"{done.path}: {counted(done.modules, 'change')} added to the weights")
        if done.left_out:
            modules = counted(len(done.left_out), "module")
            print(f"note: {modules} of text encoders left out, as {arguments.base} holds none")
        return EXIT_DONE
    if arguments.dtype == "fp8":
        raise ConfigError("fp8 is for checkpoints: use float, fp16 or bf16 for a LoRA")
    done = tool.join_loras(
        loras,
        arguments.out,
        ranks=tool.joining.Ranks(arguments.rank, arguments.conv_rank),
        dtype=arguments.dtype,
        trained_on=arguments.trained_on,
        report=arguments.report,
    )
    print(f"{done.path}: one LoRA of {len(loras)}, with {counted(done.modules, 'module')}")
    return EXIT_DONE


def extract(arguments: argparse.Namespace) -> int:
    """Extract a LoRA from the difference of two checkpoints."""
    from library.tools import extract as tool

    choices = tool.ExtractOptions(
        **{field.name: getattr(arguments, field.name) for field in dataclasses.fields(tool.ExtractOptions)}
    )
    done = tool.extract_lora(
        arguments.tuned, arguments.base, arguments.out, choices=choices, dtype=arguments.dtype, report=arguments.report
    )
    print(f"{done.path}: {counted(done.modules, 'module')}; skipped as unchanged: {done.same}")
    for part in done.left_out:
        print(f"note: {part} differs by at most {choices.min_diff:g}, so it was skipped")
    if done.others:
        print(f"note: differing biases, norms and layers that this LoRA leaves as they are in the base: {done.others}")
    return EXIT_DONE


def resize(arguments: argparse.Namespace) -> int:
    """Reduce the ranks of a LoRA."""
    from library.tools import resize as tool

    choices = tool.ResizeOptions(arguments.rank, arguments.conv_rank, arguments.method, arguments.parameter)
    done = tool.resize_lora(
        arguments.lora, arguments.out, choices=choices, dtype=arguments.dtype, report=arguments.report
    )
    for name, (before, after) in done.ranks.items() if arguments.verbose else ():
        print(f"  {name}: {before} -> {after}")
    if all(after >= before for before, after in done.ranks.values()):
        print(f"note: no module has more ranks than requested, so nothing was cut: {done.path} equals {arguments.lora}")
    ranks = sorted(after for _, after in done.ranks.values())
    print(f"{done.path}: {_rank_text(ranks)}; every module keeps at least {done.kept_share:.1%} of its norm")
    return EXIT_DONE


def _rank_text(ranks: list[int]) -> str:
    """Return the range of sorted ranks: "rank 16", or "ranks 4 to 16"."""
    return f"rank {ranks[0]}" if ranks[0] == ranks[-1] else f"ranks {ranks[0]} to {ranks[-1]}"


def convert(arguments: argparse.Namespace) -> int:
    """Convert the names of a LoRA."""
    from library.tools.convert import convert_lora as tool

    notes: list[Message] = []
    path = tool(
        arguments.lora,
        arguments.out,
        to=arguments.to,
        dtype=arguments.dtype,
        report=arguments.report,
        note=notes.append,
    )
    print(f"{path}: {arguments.to} names")
    for sentence in notes:
        print(f"note: {str(sentence)}")
    return EXIT_DONE


def verify(arguments: argparse.Namespace) -> int:
    """Verify a LoRA."""
    from library.adapter_files.verify import verify_lora as tool

    findings = tool(arguments.lora, arguments.base, report=arguments.report)
    arguments.store({"problems": findings.problems, "warnings": findings.warnings})
    if arguments.json:
        print(json.dumps({"ok": findings.ok, **dataclasses.asdict(findings)}, indent=1, default=str))
        return EXIT_DONE if findings.ok else EXIT_FAILED
    for line in _module_lines(findings) if arguments.verbose else ():
        print(line)
    for line in _summary_lines(findings):
        print(line)
    for text in findings.warnings:
        print(f"warning: {text}")
    for text in findings.problems:
        print(f"error: {text}", file=sys.stderr)
    if findings.ok:
        against = f", and fits {arguments.base}" if arguments.base else ""
        print(f"{arguments.lora} is in order{against}")
    return EXIT_DONE if findings.ok else EXIT_FAILED


def _module_lines(findings: "Findings") -> Iterator[str]:
    for row in findings.modules:
        mark = "  dead" if row.dead else ""
        norm = "" if row.norm is None else f"norm {row.norm:.4g}, "
        rank = f"rank {row.rank}, alpha {row.alpha:g}, " if row.rank else ""
        yield f"  {row.module}: {row.kind}, {rank}{norm}up to {row.largest:.4g}{mark}"


def _summary_lines(findings: "Findings") -> Iterator[str]:
    if not findings.modules:
        return
    ranks = sorted({row.rank for row in findings.modules if row.rank})
    norms = sorted(row.norm for row in findings.modules if row.norm is not None)
    kinds = ", ".join(sorted({row.kind for row in findings.modules}))
    model = f" for {families.facts_of(findings.family).title}" if findings.family else ""
    modules = counted(len(findings.modules), "module")
    rank = f", {_rank_text(ranks)}" if ranks else ""
    yield f"{modules} of {kinds}{model}, {findings.style} names{rank}"
    if norms:
        yield f"norms {norms[0]:.4g} to {norms[-1]:.4g}, median {norms[len(norms) // 2]:.4g}"


def metadata(arguments: argparse.Namespace) -> int:
    """Show or change a file's metadata."""
    from library.tools import metadata as tool

    values = dict(_pair(text) for text in arguments.set)
    if not values and not arguments.remove:
        entries = tool.read_metadata(arguments.file)
        print(
            json.dumps(entries, indent=1, ensure_ascii=False, default=str)
            if arguments.json
            else _metadata_lines(entries)
        )
        return EXIT_DONE
    if arguments.in_place and not arguments.yes:
        raise ConfigError(
            "this would change {file} itself: add --yes if that is meant, or give --out", file=arguments.file
        )
    path = tool.edit(
        arguments.file,
        arguments.out,
        values=values,
        remove=arguments.remove,
        in_place=arguments.in_place,
        report=arguments.report,
    )
    print(f"{path}: metadata written, tensors unchanged")
    return EXIT_DONE


# ---- their arguments


def build_tools_parser(kind: type[argparse.ArgumentParser] = Arguments) -> argparse.ArgumentParser:
    """Return the options of all tools; the page derives its forms from these (forms.py)."""
    parser = kind("kohya tools", description="Tools for LoRA files. Nothing that exists is ever overwritten.")
    tools = parser.add_subparsers(metavar="COMMAND", required=True)

    def tool(run: Callable[[argparse.Namespace], int], description: str) -> Any:
        subparser = tools.add_parser(run.__name__, help=description, description=description)
        subparser.set_defaults(run=run)
        return subparser

    _merge(tool(merge, "merge LoRAs into a base model, or several LoRAs into one"))
    _extract(tool(extract, "make a LoRA from a tuned checkpoint minus its base"))
    _resize(tool(resize, "reduce the ranks of a LoRA"))
    command = tool(convert, "change the names in a LoRA: kohya, diffusers (PEFT), comfy")
    command.add_argument("lora", type=Path, help="the file to convert")
    command.add_argument("--to", required=True, choices=("kohya", "diffusers", "comfy"), help="the names to write")
    _add_output_options(command)
    command = tool(verify, "check a LoRA for errors")
    command.add_argument("lora", type=Path, help="the file to check")
    command.add_argument("--base", type=Path, help="a checkpoint that must have every module in the right size")
    command.add_argument("--json", action="store_true", help="everything as JSON")
    command.add_argument("--verbose", action="store_true", help="a line for every module")
    _metadata(tool(metadata, "show or change the metadata of a file"))
    return parser


def _add_output_options(
    parser: argparse.ArgumentParser, dtypes: tuple[str, ...] = DTYPES, default: str | None = None
) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the new .safetensors file")
    text = f"how numbers are stored (default: {default or 'as in the input'})"
    parser.add_argument("--dtype", choices=dtypes, default=default, help=text)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("loras", nargs="+", metavar="LORA[=STRENGTH]", help="files with their strengths (1 if empty)")
    parser.add_argument("--base", type=Path, help="the model to merge into")
    parser.add_argument(
        "--rank", type=int, help="cut the sum to this rank; without it the sum is exact and ranks add up"
    )
    parser.add_argument("--conv_rank", type=int, help="the same for convolutions")
    text = "the model that files were trained on, which DoRA, OFT, BOFT, GLoRA and iA3 need to become one LoRA"
    parser.add_argument("--trained_on", type=Path, help=text)
    _add_output_options(parser, (*DTYPES, "fp8"))


def _extract(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tuned", type=Path, help="the checkpoint that was fine-tuned")
    parser.add_argument("base", type=Path, help="the checkpoint that it was made from")
    parser.add_argument("--rank", type=int, default=16, help="rank of every module")
    parser.add_argument(
        "--conv_rank", type=int, help="take residual blocks of convolutions as well, 3x3 with this rank"
    )
    parser.add_argument("--clamp", type=float, default=0.99, help="quantile to which values are cut; 1: none")
    text = "text encoders that differ nowhere by more are left out"
    parser.add_argument("--min_diff", type=float, default=0.01, help=text)
    text = "power steps of the quick decomposition; 0: the exact, slow one"
    parser.add_argument("--iterations", type=int, default=4, help=text)
    parser.add_argument("--device", default="cpu", help="where to compute: cpu or cuda")
    _add_output_options(parser, default="fp16")


def _resize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", type=Path, help="the file to make smaller")
    parser.add_argument("--rank", type=int, required=True, help="the largest rank")
    parser.add_argument("--conv_rank", type=int, help="the same for convolutions (empty: the rank)")
    parser.add_argument(
        "--method",
        default="fixed",
        choices=("fixed", "sv_ratio", "sv_fro", "sv_cumulative"),
        help="how the rank of each module is found",
    )
    text = "for a ratio, a number above 1; for a share, how much is kept, such as 0.9"
    parser.add_argument("--parameter", type=float, help=text)
    parser.add_argument("--verbose", action="store_true", help="a line for every module")
    _add_output_options(parser)


def _metadata(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the .safetensors file")
    parser.add_argument("--json", action="store_true", help="show as JSON")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="ss_* and modelspec.* keys, such as modelspec.title=Zorb",
    )
    parser.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="a key, or all that begin like it: ss_*"
    )
    parser.add_argument("--out", type=Path, help="the new file; not needed to show the metadata")
    parser.add_argument("--in_place", action="store_true", help="change the file itself; needs --yes")
    parser.add_argument("--yes", action="store_true")


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("{name} takes KEY=VALUE, got {text}", name=option_name("set"), text=text)
    return key, value


def _metadata_lines(entries: dict[str, str]) -> str:
    if not entries:
        return "no metadata"
    return "\n".join(
        f"{key}: {value if len(value) < 200 else value[:200] + ' ...'}" for key, value in sorted(entries.items())
    )
