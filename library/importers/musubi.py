"""Import musubi-tuner's TOML files for FLUX.1, FLUX.2, Krea 2, Qwen-Image and Z-Image, and its dataset files."""

import math
from collections.abc import Mapping
from typing import Any

from library.config import schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, option_name
from library.importers.builder import NOT_HERE, ImportBuilder, describe, family_of_script, is_empty, is_on, to_number
from library.importers.shared import (
    ALL_LAYERS_OF_KREA_2,
    dataset_toml,
    equal,
    load_tables,
    other_model_error,
    say_nearest,
    table_in,
    tables_of_list,
)

TRAINER = "musubi-tuner"
APPLIES_EXIF = False  # it trains images as they are stored
MUSUBI_TABLES = load_tables("musubi")
# Options that musubi-tuner does not have.
OUR_KEYS = {
    "pretrained_model_name_or_path",
    "train_data_dir",
    "resolution",
    "train_batch_size",
    "cache_latents",
    "cache_latents_to_disk",
}
FLUX_1 = "networks.lora_flux"  # the module decides, whatever other keys say
BUCKET_MULTIPLE = 16  # sides of images are multiples of this many pixels
MODULATION_PATTERN = ".*(img_mod|txt_mod|modulation).*"  # layers of FLUX.1


def recognises(settings: JsonMapping) -> bool:
    """Return whether this is a file of musubi-tuner. We share the names of adapter modules, so such a name is not
    enough if the images, the base model or the caches are set with our option names."""
    settings = schema.flatten_sections(settings, [])  # duplicates are reported on reading
    module = str(settings.get("network_module") or "")
    if module in MUSUBI_TABLES["families"]:
        return "dit" in settings or (
            "dataset_config" in settings and module in MUSUBI_TABLES["modules"] and OUR_KEYS.isdisjoint(settings)
        )
    shared = module == "networks.lora"  # sd-scripts' own, which is SDXL's here
    return "dit" in settings or (module in MUSUBI_TABLES["modules"] and not shared)


def our_script(name: str) -> str:
    return MUSUBI_TABLES["scripts"].get(name.removesuffix(".py"), name.removesuffix(".py"))


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key of a flat file to our values and an outcome. Raises ConfigError for unsupported models."""
    data = settings.get("dataset_config")  # a table if the file that it names could be read
    settings = schema.flatten_sections({**settings, "dataset_config": ""} if isinstance(data, Mapping) else settings)
    module = str(settings.get("network_module") or "")
    family = find_musubi_family(settings, script)
    if not script and family == "flux" and (other := _other_model(settings, module)):
        raise other_model_error(TRAINER, other)
    lora = bool(module or settings.get("network_dim"))
    builder = ImportBuilder(settings, script or f"{family}_train{'_network' if lora else ''}", TRAINER)
    kind = "flux" if family == "flux" else "others"
    builder.import_keys(MUSUBI_TABLES["renamed"] | MUSUBI_TABLES[f"renamed_{kind}"])
    if isinstance(data, Mapping) and is_dataset(data):
        builder.texts["dataset_config"], notes = convert_dataset(data)
        builder.notes += notes
        text = "the dataset format of musubi-tuner; converted to a file that the import writes"
        builder.change("dataset_config", text)
    for key, version in MUSUBI_TABLES["old_versions"].items():  # the older switches for one of Qwen-Image-Edit
        if builder.family == "qwen_image" and is_on(builder.get(key)):
            builder.convert(key, {"model_version": version})
    _import_musubi_lycoris(builder, module)
    sampling = _import_musubi_sampling(builder)
    _import_musubi_timesteps(builder, sampling)
    own_keys = MUSUBI_TABLES["own_keys"].get(family, ())
    builder.keep_rest({key: why for key, why in MUSUBI_TABLES["ignored"].items() if key not in own_keys})
    defaults = (
        MUSUBI_TABLES["defaults"] | MUSUBI_TABLES[f"defaults_{kind}"] | MUSUBI_TABLES.get(f"defaults_{family}", {})
    )
    if sampling not in ("", "shift", "sigma"):
        del defaults["discrete_flow_shift"]  # which has no effect then
    for option, value in defaults.items():
        if option not in settings:
            text = Message("not in the file; {trainer} uses {value}", trainer=TRAINER, value=value)
            builder.set_by(option, text, {option: value})
    always = MUSUBI_TABLES["always"] | ({"network_train_unet_only": True} if lora else {})
    text = Message("{trainer} always trains from caches on disk, and no text encoder", trainer=TRAINER)
    builder.set_by("cache_latents", text, always)
    _apply_musubi_defaults(builder, module)
    return builder


def _other_model(settings: JsonMapping, module: str) -> str:
    """Return the model of a file that is not FLUX.1's, which is taken where nothing says otherwise; "" if it is."""
    if module == FLUX_1:
        return ""
    if named := MUSUBI_TABLES["modules"].get(module):
        return named
    if module and module not in MUSUBI_TABLES["lycoris"] and not module.startswith("lycoris"):
        return module
    return next((model for key, model in MUSUBI_TABLES["other_keys"].items() if not is_empty(settings.get(key))), "")


def _import_musubi_timesteps(builder: ImportBuilder, sampling: str) -> None:
    """Convert options of timesteps and loss weights that mean something else here."""
    shift, scheme = builder.number("discrete_flow_shift"), builder.get("weighting_scheme")
    if sampling in ("", "sigma"):  # a position in a table that is not shifted, and whose first step is the noisiest
        if shift not in (None, 1.0):
            text = Message("the timesteps of sigma are not shifted in {trainer}", trainer=TRAINER)
            builder.change("discrete_flow_shift", text, {"discrete_flow_shift": 1.0})
        for key, option, usual in (("min_timestep", "max_timestep", 0), ("max_timestep", "min_timestep", 1000)):
            edge = builder.number(key)
            if edge is not None and edge != usual:
                value = 1000 - int(edge)
                template = "with sigma, {trainer} counts from the noisiest timestep: {option} = {value}"
                text = Message(template, trainer=TRAINER, option=option_name(option), value=value)
                builder.change(key, text, {option: value})
    if builder.family == "flux" and scheme in ("sigma_sqrt", "cosmap"):
        template = "{trainer} weighs the loss by it; for FLUX.1 here that needs model_prediction_type = sigma_scaled"
        builder.ignore("weighting_scheme", Message(template, trainer=TRAINER))


def _import_musubi_sampling(builder: ImportBuilder) -> str:
    """Return how timesteps are sampled, and import it if its name is no value of ours. logsnr draws logarithms of the
    signal-to-noise ratio from a normal distribution, which equals sigmoid sampling with half their spread."""
    sampling = str(builder.get("timestep_sampling") or "")
    if sampling == "logsnr":
        mean, spread = builder.number("logit_mean") or 0.0, builder.number("logit_std")
        values = {"timestep_sampling": "sigmoid", "sigmoid_scale": (1.0 if spread is None else spread) / 2}
        wording = say_nearest if mean else equal
        builder.change("timestep_sampling", wording("logsnr", describe(values)), values)
        builder.explain("is part of timestep_sampling", "logit_mean", "logit_std")
    elif near := MUSUBI_TABLES["timestep_sampling"].get(sampling):
        text = say_nearest(sampling, describe({"timestep_sampling": near}))
        builder.change("timestep_sampling", text, {"timestep_sampling": near})
    return sampling


def _apply_musubi_defaults(builder: ImportBuilder, module: str) -> None:
    """Apply musubi-tuner's defaults for the model and its trained layers."""
    if builder.family == "flux":  # its only script for FLUX.1 trains Kontext, which has the header of dev
        builder.set_by(
            "model_type",
            Message("{trainer} trains {model}", trainer=TRAINER, model="FLUX.1 Kontext"),
            {"model_type": "kontext"},
        )
        arguments = _network_args_list(builder)
        has_patterns = any(argument.startswith("exclude_patterns=") for argument in arguments)
        if module == "networks.lora_flux" and not has_patterns:
            text = Message("{trainer} does not train the modulation of all blocks", trainer=TRAINER)
            builder.set_by(
                "network_args",
                text,
                {"network_args": [*arguments, f"exclude_patterns=[{MODULATION_PATTERN!r}]"]},
            )
    elif module == "networks.lora_qwen_image":
        arguments = [*_network_args_list(builder), "train_modulation=True"]
        text = Message("{trainer} trains the modulation of all blocks as well", trainer=TRAINER)
        builder.set_by("network_args", text, {"network_args": arguments})
    elif module == "networks.lora_krea2":
        arguments = [*_network_args_list(builder), *ALL_LAYERS_OF_KREA_2]
        text = Message("{trainer} trains the layers outside the blocks as well", trainer=TRAINER)
        builder.set_by("network_args", text, {"network_args": arguments})


def _network_args_list(builder: ImportBuilder) -> list[str]:
    stored = builder.get("network_args") or ()
    return [str(argument) for argument in stored] if isinstance(stored, list | tuple) else str(stored).split()


def find_musubi_family(settings: JsonMapping, script: str) -> str:
    """Return the family that a file is for, by its module, model version or keys. Raises ConfigError if these are
    ambiguous."""
    module, version = str(settings.get("network_module") or ""), str(settings.get("model_version") or "").casefold()
    if script or module in MUSUBI_TABLES["families"]:
        return family_of_script(script) or MUSUBI_TABLES["families"][module]
    if version in MUSUBI_TABLES["qwen_versions"] or any(
        is_on(settings.get(key)) for key in MUSUBI_TABLES["old_versions"]
    ):
        return "qwen_image"
    if version in MUSUBI_TABLES["flux_2_versions"] or any(
        not is_empty(settings.get(key)) for key in MUSUBI_TABLES["flux_2_keys"]
    ):
        return "flux_2"
    if all(not is_empty(settings.get(key)) for key in MUSUBI_TABLES["zimage_keys"]):
        return "zimage"
    has_module = bool(module) and module not in MUSUBI_TABLES["lycoris"] and not module.startswith("lycoris")
    if not has_module and not is_empty(settings.get(ambiguous_key := "text_encoder")):
        raise ConfigError(
            "this file of {trainer} is for {other} and does not say which: name it with kohya import --script",
            trainer=TRAINER,
            other=MUSUBI_TABLES["other_keys"][ambiguous_key],
        )
    return "flux"


def _import_musubi_lycoris(builder: ImportBuilder, module: str) -> None:
    """Convert its LoHa and LoKr to those of LyCORIS, which selects layers differently."""
    if module not in MUSUBI_TABLES["lycoris"]:
        return
    stored_args = _network_args_list(builder)
    arguments = [
        argument for argument in stored_args if argument.partition("=")[0].strip() in MUSUBI_TABLES["lycoris_arguments"]
    ]
    left_out = [argument.partition("=")[0] for argument in stored_args if argument not in arguments]
    network_args = [f"algo={MUSUBI_TABLES['lycoris'][module]}", *arguments]
    network_args += ["bypass_mode=True"] if is_on(builder.get("fp8_base")) else []
    template = "{module} is lycoris.kohya with {args} here, whose layers are those of its preset"
    text = Message(template, module=module, args=" ".join(network_args))
    builder.change("network_module", text, {"network_module": "lycoris.kohya"})
    template = "{names}: not an argument of lycoris.kohya"
    args_text = Message(template, names=", ".join(left_out)) if left_out else "those of lycoris.kohya"
    builder.set_by("network_args", args_text, {"network_args": network_args})


# ---- its dataset files


def is_dataset(settings: JsonMapping) -> bool:
    """Return whether this is a dataset file of musubi-tuner: image folders directly in [[datasets]]."""
    kinds = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
    sets = settings.get("datasets")
    return isinstance(sets, list) and any(isinstance(s, Mapping) and any(k in s for k in kinds) for s in sets)


def convert_dataset(settings: JsonMapping) -> tuple[str, list[MessageLike]]:
    """Convert a dataset file of musubi-tuner to the text of ours, and a sentence for each key that was left out."""
    notes: list[MessageLike] = []
    dataset_keys: list[str] = MUSUBI_TABLES["dataset_keys"]
    general = _known_keys(table_in(settings, "general", "dataset_config", notes), dataset_keys, "[general]", notes)
    general = {"resolution": [960, 544], "caption_extension": ".txt"} | general
    repeats = general.pop("num_repeats", 1)
    sets = []
    for i, table in enumerate(tables_of_list(settings["datasets"], "datasets", notes), 1):
        place = Message("dataset {number}", number=i)
        if table.get("image_directory") is None and table.get("image_jsonl_file") is None:
            template = "{place} is left out: only images with caption files, or in a .jsonl file, are read"
            notes.append(Message(template, place=place))
            continue
        options = _known_keys(table, [*dataset_keys, "image_directory", "image_jsonl_file"], place, notes)
        folder, listed = options.pop("image_directory", None), options.pop("image_jsonl_file", None)
        subset = {"image_dir": folder} if folder else {"metadata_file": listed}
        subset |= {"num_repeats": options.pop("num_repeats", repeats)}
        if references := options.pop("control_directory", None):
            subset["control_directory"] = references
        sets.append((_musubi_buckets(general | options) | options, [subset]))
    if not sets:
        raise ConfigError("no dataset in this file is of images (image_directory or image_jsonl_file)")
    return dataset_toml(general, sets), notes


def _musubi_buckets(table: JsonMapping) -> JsonObject:
    """Return bucket options that keep musubi-tuner's crops, and thus its caches, valid: an area in steps of 16 pixels,
    and no side shorter than half of a square's."""
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


def _known_keys(table: Any, keys: list[str], place: MessageLike, notes: list[MessageLike]) -> JsonObject:
    reasons, older = MUSUBI_TABLES["dataset_ignored"], MUSUBI_TABLES["dataset_renamed"]
    table = {older.get(key, key): value for key, value in table.items()} if isinstance(table, Mapping) else {}
    for key in table:
        if key not in keys and not key.startswith("video_"):
            reason = reasons.get(key, NOT_HERE)
            notes.append(Message("{place}: {key} is ignored: {reason}", place=place, key=key, reason=reason))
    return {key: value for key, value in table.items() if key in keys}
