"""`kohya import` and `kohya diff`: convert settings of other trainers, and compare two files."""

import json
import sys
from pathlib import Path

from library import importers
from library.config.arguments import Arguments
from library.config.building import find_missing
from library.config.command import quote_command
from library.config.formats import to_toml
from library.config.json_types import JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Problem, counted
from library.families import RUNS, config_class
from library.files import write_atomic
from library.importers import musubi

EXIT_DONE, EXIT_FAILED, EXIT_MISUSED = 0, 1, 2
SUFFIX = {"sample_prompts": ".prompts.txt", "dataset_config": ".dataset.toml"}


def configs() -> dict[str, type]:
    return {script: config_class(script) for script in RUNS}


def main(argv: list[str]) -> int:
    """Convert a file of settings of another trainer. Return 0 on success, 1 on failure or if something must be
    fixed."""
    parser = Arguments(
        "kohya import",
        description="Turn the settings of kohya_ss, OneTrainer or SimpleTuner (JSON), of sd-scripts, musubi-tuner, "
        "diffusion-pipe, lora-scripts or LoRA_Easy_Training_Scripts (TOML), of ai-toolkit (YAML), a command that "
        "trains (sh, bat, cmd, ps1, txt), or the metadata of a LoRA (safetensors) into a TOML for this trainer, and "
        "report what became of every key. Without -o the TOML is printed, and the report goes to stderr.",
    )
    parser.add_argument("file", type=Path, help="the file with the settings, or a LoRA")
    parser.add_argument("-o", "--output", type=Path, help="where to write; an existing file is never overwritten")
    parser.add_argument(
        "--script",
        type=musubi.our_script,
        choices=list(RUNS),
        metavar="SCRIPT",
        default="",
        help="the training script, ours or musubi-tuner's (default: detected from the file)",
    )
    parser.add_argument("--to", choices=["kohya_ss"], help="convert to the JSON of kohya_ss instead")
    parser.add_argument("--base", type=Path, help="with --to: a JSON of kohya_ss, whose other keys stay as they are")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the report, and nothing else")
    arguments = parser.parse_args(argv)
    if arguments.base and not arguments.to:
        parser.error("--base goes with --to kohya_ss")
    if arguments.json and arguments.to:
        parser.error("--json does not go with --to kohya_ss, which prints JSON in any case")
    if arguments.json:
        return _import_as_json(arguments.file, arguments.script, arguments.output)
    if importers.is_foreign_dataset(file := importers.parse_file(arguments.file)):
        return _convert_dataset_file(file, arguments.output)
    imported = importers.import_file(arguments.file, configs(), arguments.script)
    if arguments.to:
        return _export(imported, arguments.base, arguments.output)
    if arguments.output:
        imported = _write(imported, arguments.output, arguments.file)
    else:
        print(_imported_toml(imported, arguments.file), end="")
    _print_report(imported, arguments.output)
    return EXIT_FAILED if imported.problems else EXIT_DONE


def _print_report(imported: importers.Imported, path: Path | None) -> None:
    """Print the report as text: beside the written file, or on stderr if the config itself is printed."""
    stream = sys.stdout if path else sys.stderr
    print(imported.report(), file=stream)
    if blanks := _find_blanks(imported):
        print("\n".join([f"still to fill in ({len(blanks)}):", *(f"  {line}" for line in blanks)]), file=stream)
    for name in () if path else imported.texts:
        print(f"{name} has to be a file of its own: with -o it is written beside the config", file=stream)
    if path:
        written = " and ".join(str(file) for file in (path, *_companions(imported, path).values()))
        print(f"wrote {written}; next: {quote_command(['kohya', 'check', str(path)])}", file=stream)


def _find_blanks(imported: importers.Imported) -> list[Problem]:
    return find_missing(imported.with_files(dict.fromkeys(imported.texts, "beside")).config)


def _import_as_json(file: Path, script: str, path: Path | None) -> int:
    """Convert, and print the report as one JSON object, even if the file is rejected."""
    try:
        if importers.is_foreign_dataset(foreign_file := importers.parse_file(file)):
            text, notes = importers.convert_foreign_dataset(foreign_file)
            if path:
                _write_new(path, text)
            account: JsonObject = {"notes": notes, "problems": [], "files": {"dataset_config": text}}
        else:
            imported = importers.import_file(file, configs(), script)
            imported = _write(imported, path, file) if path else imported
            account = {**imported.account(), "missing": _find_blanks(imported)}
    except ConfigError as error:
        print(json.dumps({"errors": error.problems}, ensure_ascii=False, default=str))
        return EXIT_FAILED
    print(json.dumps({**account, "wrote": str(path) if path else None}, ensure_ascii=False, default=str))
    return EXIT_FAILED if account["problems"] else EXIT_DONE


def diff(argv: list[str]) -> int:
    """Print what differs between two files of settings, of any trainer. Return 0 if nothing does, 1 if something does,
    2 on failure."""
    parser = Arguments("kohya diff", description="List the options that differ between two configs.")
    parser.add_argument("first", type=Path, help="a config, or the folder of a run")
    parser.add_argument("second", type=Path, help="the one to compare it with")
    parser.add_argument(
        "--script",
        choices=list(RUNS),
        metavar="SCRIPT",
        default="",
        help="the training script of both (default: detected from the files)",
    )
    arguments = parser.parse_args(argv)
    try:
        files = [path / "run.toml" if path.is_dir() else path for path in (arguments.first, arguments.second)]
        first, second = (importers.import_file(path, configs(), arguments.script) for path in files)
    except ConfigError as error:
        for line in error.problems:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_MISUSED
    differences = importers.compare_configs(first.config, second.config)
    for path, imported in ((arguments.first, first), (arguments.second, second)):
        ignored = f", {counted(len(imported.of('ignored')), 'key')!s} ignored" if imported.of("ignored") else ""
        print(f"{path}: {imported.trainer}, {imported.config.script}{ignored}")
    for name, first_value, second_value in differences:
        print(f"  {name}: {first_value} -> {second_value}")
    print(
        f"{len(differences)} option{'s differ' if len(differences) > 1 else ' differs'}"
        if differences
        else "no option differs"
    )
    return EXIT_FAILED if differences else EXIT_DONE


def _imported_toml(imported: importers.Imported, source: Path) -> str:
    config = imported.config
    comment = f"{config.title}: accelerate launch sd-scripts/{config.script}.py --config_file THIS_FILE"
    return to_toml(config, f"{comment}\nimported from {source.name} ({imported.trainer})")


def _convert_dataset_file(dataset_file: JsonObject, path: Path | None) -> int:
    """Write or print a dataset file of musubi-tuner in our format."""
    text, notes = importers.convert_foreign_dataset(dataset_file)
    if path is None:
        print(text, end="")
    else:
        _write_new(path, text)
    for line in [*(f"note: {note}" for note in notes), *([f"wrote {path}: name it as dataset_config"] if path else [])]:
        print(line, file=sys.stdout if path else sys.stderr)
    return EXIT_DONE


def _write_new(path: Path, text: str) -> None:
    if path.exists():
        raise ConfigError("{path} exists already; choose another name", path=path)
    write_atomic(path, text)


def _export(imported: importers.Imported, base: Path | None, path: Path | None) -> int:
    """Write or print the JSON of kohya_ss's page, and print what has no place there."""
    prompts = imported.config.sample.sample_prompts
    text = imported.texts.get("sample_prompts") or (
        read_outside_text(prompts) if prompts and Path(prompts).is_file() else ""
    )
    fields, losses = importers.export(imported.config, configs(), importers.parse_file(base) if base else None, text)
    written = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    if path is None:
        print(written, end="")
    else:
        _write_new(path, written)
    stream = sys.stdout if path else sys.stderr
    for line in [*losses, *(f"to fix: {problem}" for problem in imported.problems)]:
        print(f"note: {line}", file=stream)
    if path:
        keys, tab = str(counted(len(fields), "key")), importers.tab_title(fields)
        print(f"wrote {path} ({keys}): load it in the {tab} tab of kohya_ss", file=stream)
    return EXIT_DONE


def _companions(imported: importers.Imported, path: Path) -> dict[str, Path]:
    """Return the files that the config at a path names and the import writes beside it, by option."""
    return {name: path.with_name(path.stem + SUFFIX[name]) for name in imported.texts}


def _write(imported: importers.Imported, path: Path, source: Path) -> importers.Imported:
    """Write the config, and the files that it names; none if one of them exists."""
    if path.suffix.lower() != ".toml":
        raise ConfigError("{path} must end in .toml", path=path)
    companions = {name: file.resolve() for name, file in _companions(imported, path).items()}
    for target in (path, *companions.values()):
        if target.exists():
            raise ConfigError("{each} exists already; choose another name", each=target)
    imported = imported.with_files({name: str(file) for name, file in companions.items()})
    for name, file in companions.items():
        write_atomic(file, imported.texts[name])
    write_atomic(path, _imported_toml(imported, source))
    return imported
