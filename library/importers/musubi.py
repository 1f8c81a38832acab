"""Import musubi-tuner's TOML files for FLUX.1, FLUX.2, Qwen-Image and Z-Image, and its format of dataset files."""

import math
from collections.abc import Mapping
from typing import Any

from library.config import schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, option_name
from library.importers.builder import NOT_HERE, ImportBuilder, is_empty, is_on, to_number
from library.importers.shared import (
    ONLY,
    dataset_toml,
    equal,
    import_keys,
    load_tables,
    said_of,
    say_nearest,
    set_by,
    table_in,
    tables_of_list,
)

TRAINER = "musubi-tuner"
APPLIES_EXIF = False  # it trains images as they are stored
MUSUBI_TABLES = load_tables("musubi")
OUR_KEYS = {
    "pretrained_model_name_or_path",
    "train_data_dir",
    "resolution",
    "train_batch_size",
    "cache_latents",
    "cache_latents_to_disk",
}  # options that it does not have
FLUX_1 = "networks.lora_flux"  # the module decides, whatever other keys say
BUCKET_MULTIPLE = 16  # sides of images are multiples of this many pixels
MODULATION_PATTERN = ".*(img_mod|txt_mod|modulation).*"  # layers of FLUX.1


def recognises(found: JsonMapping) -> bool:
    """Whether this is a file of musubi-tuner. The name of an adapter's module, which we share, is not enough where the
    images, the base model or the caches are set with our option names."""
    found = schema.flatten_sections(found, [])  # duplicates are reported on reading
    module = str(found.get("network_module") or "")
    if module in MUSUBI_TABLES["families"]:
        return "dit" in found or (
            "dataset_config" in found and module in MUSUBI_TABLES["modules"] and OUR_KEYS.isdisjoint(found)
        )
    shared = module == "networks.lora"  # sd-scripts' own, which is SDXL's here
    return "dit" in found or (module in MUSUBI_TABLES["modules"] and not shared)


def our_script(name: str) -> str:
    """The equivalent of a script of musubi-tuner, named with or without .py; other names are returned unchanged."""
    return MUSUBI_TABLES["scripts"].get(name.removesuffix(".py"), name.removesuffix(".py"))


def read_config(found: JsonMapping, script: str = "") -> ImportBuilder:
    """Every key of a flat file -> our values and its outcome. Raises ConfigError for unsupported models."""
    data = found.get("dataset_config")  # a table if the file that it names could be read
    found = schema.flatten_sections({**found, "dataset_config": ""} if isinstance(data, Mapping) else found)
    module = str(found.get("network_module") or "")
    other = next((model for key, model in MUSUBI_TABLES["other_keys"].items() if not is_empty(found.get(key))), "")
    family = find_musubi_family(found, script)
    known = module in ("", *MUSUBI_TABLES["lycoris"]) or module.startswith("lycoris")
    other = "" if module == FLUX_1 else MUSUBI_TABLES["modules"].get(module) or ("" if known else module) or other
    other = "" if script or family != "flux" else other
    if other:
        raise ConfigError(
            "this file of {trainer} is for {other}, which is not trained here: use {trainer}; {advice}",
            trainer=TRAINER,
            other=other,
            advice=ONLY,
        )
    lora = bool(module or found.get("network_dim"))
    builder = ImportBuilder(found, script or f"{family}_train{'_network' if lora else ''}", TRAINER)
    kind = "flux" if family == "flux" else "others"
    import_keys(builder, MUSUBI_TABLES["renamed"] | MUSUBI_TABLES[f"renamed_{kind}"])
    if isinstance(data, Mapping) and is_dataset(data):
        builder.texts["dataset_config"], notes = convert_dataset(data)
        builder.notes += notes
        said = "the dataset format of musubi-tuner; converted to a file that the import writes"
        builder.change("dataset_config", said)
    for key, version in MUSUBI_TABLES["old_versions"].items():  # the older switches for one of Qwen-Image-Edit
        if builder.family == "qwen_image" and is_on(builder.get(key)):
            builder.change(key, said_of({"model_version": version}), {"model_version": version})
    _import_musubi_lycoris(builder, module)
    sampling = _sampling(builder)
    _import_musubi_timesteps(builder, sampling)
    own = MUSUBI_TABLES["own_keys"].get(family, ())
    for key in builder.left():
        if key in MUSUBI_TABLES["ignored"] and key not in own:
            builder.ignore(key, MUSUBI_TABLES["ignored"][key])
        elif is_empty(found[key]):
            builder.empty(key)
        else:
            builder.keep(key)
    defaults = (
        MUSUBI_TABLES["defaults"] | MUSUBI_TABLES[f"defaults_{kind}"] | MUSUBI_TABLES.get(f"defaults_{family}", {})
    )
    if sampling not in ("", "shift", "sigma"):
        del defaults["discrete_flow_shift"]  # which has no effect then
    for option, value in defaults.items():
        if option not in found:
            said = Message("not in the file; {trainer} uses {value}", trainer=TRAINER, value=value)
            set_by(builder, option, said, {option: value})
    always = MUSUBI_TABLES["always"] | ({"network_train_unet_only": True} if lora else {})
    said = Message("{trainer} always trains from caches on disk, and no text encoder", trainer=TRAINER)
    set_by(builder, "cache_latents", said, always)
    _defaults(builder, module)
    return builder


def _import_musubi_timesteps(builder: ImportBuilder, sampling: str) -> None:
    """Map its options of timesteps and loss weights that mean something else here."""
    shift, scheme = builder.number("discrete_flow_shift"), builder.get("weighting_scheme")
    if sampling in ("", "sigma"):  # a position in a table that is not shifted, and whose first step is the noisiest
        if shift not in (None, 1.0):
            said = Message("the timesteps of sigma are not shifted in {trainer}", trainer=TRAINER)
            builder.change("discrete_flow_shift", said, {"discrete_flow_shift": 1.0})
        for key, option, usual in (("min_timestep", "max_timestep", 0), ("max_timestep", "min_timestep", 1000)):
            edge = builder.number(key)
            if edge is not None and edge != usual:
                value = 1000 - int(edge)
                template = "with sigma, {trainer} counts from the noisiest timestep: {option} = {value}"
                said = Message(template, trainer=TRAINER, option=option_name(option), value=value)
                builder.change(key, said, {option: value})
    if builder.family == "flux" and scheme in ("sigma_sqrt", "cosmap"):
        template = "{trainer} weighs the loss by it; for FLUX.1 here that needs model_prediction_type = sigma_scaled"
        builder.ignore("weighting_scheme", Message(template, trainer=TRAINER))


def _sampling(builder: ImportBuilder) -> str:
    """How timesteps are sampled, and what it is here where the name is not an option's value. logsnr draws logarithms
    of the signal-to-noise ratio from a normal distribution, which is a sigmoid of half their spread."""
    sampling = str(builder.get("timestep_sampling") or "")
    if sampling == "logsnr":
        mean, spread = builder.number("logit_mean") or 0.0, builder.number("logit_std")
        values = {"timestep_sampling": "sigmoid", "sigmoid_scale": (1.0 if spread is None else spread) / 2}
        said = say_nearest if mean else equal
        builder.change("timestep_sampling", said("logsnr", said_of(values)), values)
        builder.explain("is part of timestep_sampling", "logit_mean", "logit_std")
    elif near := MUSUBI_TABLES["timestep_sampling"].get(sampling):
        said_near = say_nearest(sampling, said_of({"timestep_sampling": near}))
        builder.change("timestep_sampling", said_near, {"timestep_sampling": near})
    return sampling


def _defaults(builder: ImportBuilder, module: str) -> None:
    """musubi-tuner's defaults for the model and its trained layers."""
    if builder.family == "flux":  # its only script for FLUX.1 trains Kontext, which has the header of dev
        set_by(
            builder,
            "model_type",
            Message("{trainer} trains {model}", trainer=TRAINER, model="FLUX.1 Kontext"),
            {"model_type": "kontext"},
        )
        arguments = _network_args_list(builder)
        if module == "networks.lora_flux" and not any(one.startswith("exclude_patterns=") for one in arguments):
            said = Message("{trainer} does not train the modulation of all blocks", trainer=TRAINER)
            set_by(
                builder,
                "network_args",
                said,
                {"network_args": [*arguments, f"exclude_patterns=[{MODULATION_PATTERN!r}]"]},
            )
    elif module == "networks.lora_qwen_image":
        arguments = [*_network_args_list(builder), "train_modulation=True"]
        said = Message("{trainer} trains the modulation of all blocks as well", trainer=TRAINER)
        set_by(builder, "network_args", said, {"network_args": arguments})


def _network_args_list(builder: ImportBuilder) -> list[str]:
    given = builder.get("network_args") or ()
    return [str(one) for one in given] if isinstance(given, list | tuple) else str(given).split()


def find_musubi_family(found: JsonMapping, script: str) -> str:
    """The family that a file is for, by its module, kind of model or keys. ConfigError where these are ambiguous."""
    module, version = str(found.get("network_module") or ""), str(found.get("model_version") or "").casefold()
    if script or module in MUSUBI_TABLES["families"]:
        return script.partition("_train")[0] or MUSUBI_TABLES["families"][module]
    if version in MUSUBI_TABLES["qwen_versions"] or any(is_on(found.get(key)) for key in MUSUBI_TABLES["old_versions"]):
        return "qwen_image"
    if version in MUSUBI_TABLES["flux_2_versions"] or any(
        not is_empty(found.get(key)) for key in MUSUBI_TABLES["flux_2_keys"]
    ):
        return "flux_2"
    if all(not is_empty(found.get(key)) for key in MUSUBI_TABLES["zimage_keys"]):
        return "zimage"
    told = bool(module) and module not in MUSUBI_TABLES["lycoris"] and not module.startswith("lycoris")
    if not told and not is_empty(found.get(either := "text_encoder")):
        raise ConfigError(
            "this file of {trainer} is for {other} and does not say for which: say it with --script",
            trainer=TRAINER,
            other=MUSUBI_TABLES["other_keys"][either],
        )
    return "flux"


def _import_musubi_lycoris(builder: ImportBuilder, module: str) -> None:
    """Map its LoHa and LoKr to those of LyCORIS, which selects layers differently."""
    if module not in MUSUBI_TABLES["lycoris"]:
        return
    given = _network_args_list(builder)
    arguments = [one for one in given if one.partition("=")[0].strip() in MUSUBI_TABLES["lycoris_arguments"]]
    left_out = [one.partition("=")[0] for one in given if one not in arguments]
    made = [f"algo={MUSUBI_TABLES['lycoris'][module]}", *arguments]
    made += ["bypass_mode=True"] if is_on(builder.get("fp8_base")) else []
    template = "{module} is lycoris.kohya with {args} here, whose layers are those of its preset"
    said = Message(template, module=module, args=" ".join(made))
    builder.change("network_module", said, {"network_module": "lycoris.kohya"})
    template = "{names}: not an argument of lycoris.kohya"
    about = Message(template, names=", ".join(left_out)) if left_out else "those of lycoris.kohya"
    set_by(builder, "network_args", about, {"network_args": made})


# ---- its dataset files


def is_dataset(found: JsonMapping) -> bool:
    """Whether this is a dataset file of musubi-tuner: image folders directly in [[datasets]]."""
    kinds = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
    sets = found.get("datasets")
    return isinstance(sets, list) and any(isinstance(s, Mapping) and any(k in s for k in kinds) for s in sets)


def convert_dataset(found: JsonMapping) -> tuple[str, list[MessageLike]]:
    """A dataset file of musubi-tuner -> the text of ours, and a sentence for each key that was left out."""
    notes: list[MessageLike] = []
    known: list[str] = MUSUBI_TABLES["dataset_keys"]
    general = _known_keys(table_in(found, "general", "dataset_config", notes), known, "[general]", notes)
    general = {"resolution": [960, 544], "caption_extension": ".txt"} | general
    repeats = general.pop("num_repeats", 1)
    sets = []
    for i, table in enumerate(tables_of_list(found["datasets"], "datasets", notes), 1):
        place = Message("dataset {number}", number=i)
        if table.get("image_directory") is None and table.get("image_jsonl_file") is None:
            template = "{place} is left out: only images with caption files, or in a .jsonl file, are read"
            notes.append(Message(template, place=place))
            continue
        own = _known_keys(table, [*known, "image_directory", "image_jsonl_file"], place, notes)
        folder, listed = own.pop("image_directory", None), own.pop("image_jsonl_file", None)
        subset = {"image_dir": folder} if folder else {"metadata_file": listed}
        subset |= {"num_repeats": own.pop("num_repeats", repeats)}
        if references := own.pop("control_directory", None):
            subset["control_directory"] = references
        sets.append((_musubi_buckets(general | own) | own, [subset]))
    if not sets:
        raise ConfigError("no dataset in this file is of images (image_directory or image_jsonl_file)")
    return dataset_toml(general, sets), notes


def _musubi_buckets(table: JsonMapping) -> JsonObject:
    """Bucket options that keep musubi-tuner's crops, and so its caches, valid: an area in steps of 16 pixels, no side
    shorter than half of a square's."""
    size = table.get("resolution")
    sides = [int(to_number(side) or 0) for side in (size if isinstance(size, list) else [size])]
    if min(sides, default=0) < 1:
        return {}
    area = sides[0] * sides[-1]
    least = max(BUCKET_MULTIPLE, math.isqrt(area) // 2 // BUCKET_MULTIPLE * BUCKET_MULTIPLE)
    limits = {
        "bucket_reso_steps": BUCKET_MULTIPLE,
        "min_bucket_reso": least,
        "max_bucket_reso": area // least // BUCKET_MULTIPLE * BUCKET_MULTIPLE,
    }
    return {name: value for name, value in limits.items() if name not in table}


def _known_keys(table: Any, known: list[str], place: MessageLike, notes: list[MessageLike]) -> JsonObject:
    reasons, older = MUSUBI_TABLES["dataset_ignored"], MUSUBI_TABLES["dataset_renamed"]
    table = {older.get(key, key): value for key, value in table.items()} if isinstance(table, Mapping) else {}
    for key in table:
        if key not in known and not key.startswith("video_"):
            reason = reasons.get(key, NOT_HERE)
            notes.append(Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason))
    return {key: value for key, value in table.items() if key in known}
