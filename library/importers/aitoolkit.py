"""Import ai-toolkit's YAML files of a training (job: extension), as far as this trainer has equivalent options."""

from collections.abc import Mapping

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message, Problem
from library.importers import aitoolkit_data, aitoolkit_learning
from library.importers.builder import ImportBuilder, describe, is_on, script_of_family
from library.importers.shared import (
    ONLY,
    chooses_chroma,
    chooses_version,
    equal,
    flatten_tables,
    import_assistant,
    load_tables,
    other_model_error,
    other_networks,
    own_name,
    precision,
    say_nearest,
    steps_of_kept,
    takes_4_bits,
    transformer_of,
)

TRAINER = "ai-toolkit"
APPLIES_EXIF = True  # its data loader calls exif_transpose
AITOOLKIT_TABLES = load_tables("aitoolkit")
TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
# Switches of models that are not trained here.
OTHER_SWITCHES = {
    "model.is_v2": "Stable Diffusion 2",
    "model.is_v3": "SD3",
    "model.is_pixart": "PixArt Alpha",
    "model.is_pixart_sigma": "PixArt Sigma",
    "model.is_auraflow": "AuraFlow",
    "model.is_lumina2": "Lumina 2",
    "model.is_vega": "Segmind Vega",
    "model.is_ssd": "SSD-1B",
}


def recognises(settings: JsonMapping) -> bool:
    inner = settings.get("config")
    return isinstance(inner, Mapping) and isinstance(inner.get("process"), list)


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key of the first process to our values and an outcome. Raises ConfigError for unsupported
    models."""
    inner = settings["config"]
    if not inner["process"] or not isinstance(inner["process"][0], Mapping):
        raise ConfigError("config.process is empty: there is no training in this file")
    process = {"name": inner.get("name"), **inner["process"][0], "meta": settings.get("meta")}
    _refuse_process(process, str(settings.get("job") or "extension"))
    flat = flatten_tables(process)
    script = script or _aitoolkit_script(flat)
    defaults = AITOOLKIT_TABLES["defaults"] | (
        AITOOLKIT_TABLES["adapter_defaults"] if script.endswith("_network") else {}
    )
    for key, other in (("network.rank", "network.linear"), ("network.alpha", "network.linear_alpha")):
        if key in flat:
            defaults.pop(other, None)
    nulls = {key: value for key, value in defaults.items() if flat.get(key) is None}
    builder = ImportBuilder({**flat, **nulls}, script, TRAINER, absent=frozenset(nulls.keys() - flat.keys()))
    builder.import_keys(AITOOLKIT_TABLES["renamed"])
    builder.import_keys({key: option for key, option in AITOOLKIT_TABLES["numbers"].items() if builder.number(key)})
    for part in (
        _import_aitoolkit_model,
        _import_aitoolkit_output,
        *aitoolkit_learning.LEARNING_IMPORTS,
        *aitoolkit_data.DATA_IMPORTS,
    ):
        part(builder)
    if len(inner["process"]) > 1:
        builder.notes.append(Message("only the first of {count} processes is read", count=len(inner["process"])))
    _report_other_losses(builder)
    builder.ignore_rest(AITOOLKIT_TABLES["ignored"])
    if "chroma" in _identifying_strings(flat) and builder.family == "flux":
        chooses_chroma(builder, "model.arch" if builder.get("model.arch") else "model.is_flux")
    return builder


def _identifying_strings(flat: JsonMapping) -> str:
    return f"{flat.get('model.arch')} {flat.get('model.name_or_path')}".casefold()


def _refuse_process(process: JsonMapping, job: str) -> None:
    """Raise ConfigError, naming the process, if it trains neither a LoRA nor a whole model."""
    kind = str(process.get("type") or "")
    adapter = process.get("adapter")
    jobs, unsupported = AITOOLKIT_TABLES["other_jobs"], AITOOLKIT_TABLES["other_processes"]
    description = jobs.get(job, "")
    if kind not in TRAINERS:
        description = (
            description or unsupported.get(kind, "") or Message("a process of the type {kind}", kind=kind or "(none)")
        )
    elif isinstance(adapter, Mapping) and adapter:
        template = "an adapter of the type {kind} (images as prompts or control images)"
        description = Message(template, kind=adapter.get("type") or "(none)")
    elif isinstance(process.get("embedding"), Mapping):
        description = unsupported["textual_inversion_trainer"]
    elif isinstance(process.get("slider"), Mapping):
        description = unsupported["slider"]
    if description:
        verb = "makes" if job in jobs else "trains"
        raise ConfigError(
            "this file of {trainer} {verb} {what}, which is not done here: use {trainer} for it; {advice}",
            trainer=TRAINER,
            verb=verb,
            what=description,
            advice=ONLY,
        )


def _aitoolkit_script(flat: JsonMapping) -> str:
    arch = str(flat.get("model.arch") or "").casefold()
    arch = arch if "o_edit" in arch else arch.partition(":")[0]  # its own way of training on references is not ours
    name = str(flat.get("model.name_or_path") or "")
    switches = {"model.is_flux": "flux", "model.is_xl": "sdxl"}
    families = {"flux": "flux", "sdxl": "sdxl", "xl": "sdxl", "qwen_image": "qwen_image", "zimage": "zimage"}
    families |= {"anima": "anima", "krea2": "krea_2", "sd1": "sd15", "sd15": "sd15"}
    families |= dict.fromkeys(("flux2", "flux2_klein_4b", "flux2_klein_9b"), "flux_2")
    families |= dict.fromkeys(("qwen_image_edit", "qwen_image_edit_plus"), "qwen_image")
    family = families.get(arch, "flux" if arch in AITOOLKIT_TABLES["model_types"] else "")
    if not arch:
        arch = next((title for key, title in OTHER_SWITCHES.items() if is_on(flat.get(key))), "")
        of_name = "sd15" if name and not arch else ""  # its model of files that say nothing else
        family = next((f for key, f in switches.items() if is_on(flat.get(key))), of_name)
    if family == "flux" and "flux.2" in name.casefold():
        family = "flux_2"
    other = next((model for word, model in AITOOLKIT_TABLES["other_models"].items() if word in name.casefold()), "")
    if not family or (other and family in ("flux", "sd15")):
        model = other or AITOOLKIT_TABLES["other_archs"].get(arch, arch) or name or "a model that it does not name"
        raise other_model_error(TRAINER, model)
    return script_of_family(family, any(key.startswith("network.") for key in flat))


def _report_other_losses(builder: ImportBuilder) -> None:
    """Report loss switches without an equivalent as problems: without them the training differs, so the user must
    decide."""
    for switch, keys in AITOOLKIT_TABLES["other_ways"].items():
        if is_on(builder.get(switch)):
            for key in (switch, *keys):
                if key in builder.source:
                    builder.ignore(key, Message("{switch} is not offered here", switch=switch))
            template = "{switch} is on in the file and not offered here: without it the training differs"
            advice = "regularisation images (is_reg) keep what the model knows"
            builder.problems.append(
                Problem("", "{problem}; {advice}", problem=Message(template, switch=switch), advice=advice)
            )


def _import_aitoolkit_model(builder: ImportBuilder) -> None:
    words = f"{str(builder.get('model.arch')).casefold()} {own_name(builder.get('model.name_or_path'))}"
    kind = next((kind for word, kind in AITOOLKIT_TABLES["model_types"].items() if word in words), "")
    relative = {"model_type": kind} if kind and builder.family == "flux" else {}
    for key in ("model.is_flux", "model.is_xl", "model.arch"):
        if builder.get(key):
            builder.chooses_script(key, relative)
    chooses_version(builder, "model.arch", words)
    quantized = is_on(builder.get("model.quantize"))
    if quantized and builder.adapters:
        kind = str(builder.get("model.qtype") or "qfloat8").casefold().partition("|")[0]
        encoders = is_on(builder.get("model.quantize_te")) or "model.quantize_te" not in builder.source
        name = "int8_base" if "int" in kind and "8" in kind else "fp8_base" if encoders else "fp8_base_unet"
        values = {"base_bits": 4} if takes_4_bits(kind) else {name: True}
        is_same = kind in ("qfloat8", "float8", "int8", "qint8", "uint8", "nf4")
        text = equal(kind, describe(values)) if is_same else say_nearest(kind, describe(values))
        builder.change("model.quantize", text, values)
    elif quantized:
        builder.ignore("model.quantize", "weights that learn have at least 16 bits")
    text = "is part of model.quantize" if quantized else "nothing is quantised"
    builder.explain(text, "model.quantize_te", "model.qtype", "model.qtype_te")
    _import_extra_networks(builder)
    if path := builder.get("model.assistant_lora_path"):
        import_assistant(builder, "model.assistant_lora_path", str(path))
    if is_on(builder.get("model.layer_offloading")) and transformer_of(builder).blocks:
        share = builder.number("model.layer_offloading_transformer_percent")
        facts = transformer_of(builder)
        blocks = min(facts.most_swapped, max(1, round((1.0 if share is None else share) * facts.blocks)))
        builder.convert("model.layer_offloading", {"blocks_to_swap": blocks})
        if share is not None:
            builder.change("model.layer_offloading_transformer_percent", "is part of blocks_to_swap")


def _import_extra_networks(builder: ImportBuilder) -> None:
    """Import a second model that provides text encoders and VAE beside a transformer."""
    key = "model.extras_name_or_path"
    if not (extras_path := builder.get(key)) or extras_path == builder.get("model.name_or_path"):
        builder.explain("it is the model itself", key)
        return
    unread = {"clip_l"} if "chroma" in _identifying_strings(builder.source) else set()  # which Chroma does not have
    options = (option for option in transformer_of(builder).parts if option not in {*builder.values, *unread})
    parts = dict.fromkeys(options, extras_path)
    builder.change(key, other_networks(parts), parts)


def _import_aitoolkit_output(builder: ImportBuilder) -> None:
    folder, name = builder.get("training_folder"), builder.get("name")
    if folder:
        path = f"{str(folder).rstrip('/')}/{name}" if name else str(folder)
        builder.convert("training_folder", {"output_dir": path})
    builder.rename("save.dtype", "save_precision", precision(builder.get("save.dtype"), "float"))
    kept_saves, interval = builder.number("save.max_step_saves_to_keep"), builder.number("save.save_every")
    if kept_saves and interval:
        builder.convert("save.max_step_saves_to_keep", {"save_last_n_steps": steps_of_kept(kept_saves, interval)})
    if str(builder.get("save.save_format")) == "diffusers" and builder.is_unet and not builder.adapters:
        builder.rename("save.save_format", "save_model_as", "diffusers_safetensors")
    if is_on(builder.get("save.push_to_hub")) and builder.get("save.hf_repo_id"):
        builder.change("save.push_to_hub", "huggingface_repo_id says so")
        builder.rename("save.hf_repo_id", "huggingface_repo_id")
        builder.convert(
            "save.hf_private",
            {"huggingface_repo_visibility": "private" if is_on(builder.get("save.hf_private")) else "public"},
        )
    if is_on(builder.get("logging.use_wandb")):
        builder.change("logging.use_wandb", "log_with = wandb", {"log_with": "wandb"})
        builder.import_keys({"logging.project_name": "log_tracker_name"})
