"""OneTrainer: concepts as a dataset file, samples as a prompt file, and how noise is drawn for FLUX.1."""

import math

from library.config.json_types import JsonMapping, JsonObject
from library.importers.ledger import KeyLedger, is_empty, is_on, to_number
from library.importers.shared import PREPARED, dataset_toml, tables

NEAREST = {"INVERTED_PARABOLA": "sigmoid", "SIGMOID": "shift", "BETA": "uniform", "COS_MAP": "sigmoid"}


def _timesteps(ledger: KeyLedger) -> None:
    """How the amount of noise is drawn."""
    weight, bias = ledger.number("noising_weight") or 0.0, ledger.number("noising_bias") or 0.0
    kind = str(ledger.get("timestep_distribution") or ("SIGMOID" if weight else "UNIFORM"))
    keys = ("timestep_distribution", "noising_weight", "noising_bias", "timestep_shift", "dynamic_timestep_shifting")
    if ledger.family == "sdxl":
        for key in keys:
            off = ledger.source.get(key) in (None, "UNIFORM", 1, 1.0)
            ledger.empty(key) if off else ledger.ignore(key, "SDXL is trained with all timesteps alike here")
        return
    shift, dynamic = ledger.number("timestep_shift") or 1.0, is_on(ledger.get("dynamic_timestep_shifting"))
    if dynamic:
        shift = round(_dynamic(ledger), 4)
    values, near = _sampling(kind, weight, bias, shift, dynamic)
    if values["timestep_sampling"] in ("shift", "sigma"):
        values |= {"discrete_flow_shift": shift}
    guidance = ledger.number("transformer.guidance_scale")
    if ledger.family == "flux":
        values |= {"guidance_scale": 1.0 if guidance is None else guidance}
    elif values["timestep_sampling"] == "flux_shift":
        values["timestep_sampling"] = {"qwen_image": "qwen_shift", "flux_2": "flux2_shift"}.get(
            ledger.family, "flux_shift"
        )
    said = near + ", ".join(f"{name} = {value}" for name, value in values.items())
    key = "timestep_distribution"
    ledger.assume(key, kind)
    ledger.change(key, said, values)
    ledger.explain("is part of how timesteps are drawn", *keys[1:], "transformer.guidance_scale")


def _sampling(kind: str, weight: float, bias: float, shift: float, dynamic: bool) -> tuple[JsonObject, str]:
    """The options of a distribution, and how a sentence about it begins where it is only near."""
    values: JsonObject = {"model_prediction_type": "raw", "weighting_scheme": "none"}
    if kind == "LOGIT_NORMAL" and not bias:
        sampling = "flux_shift" if dynamic else "sigmoid" if shift == 1 else "shift"
        return values | {"timestep_sampling": sampling, "sigmoid_scale": 1 + weight}, ""
    if kind == "LOGIT_NORMAL":  # the table of sigma sampling begins with the noisiest
        values |= {"weighting_scheme": "logit_normal", "logit_mean": -bias, "logit_std": 1 + weight}
    elif kind == "HEAVY_TAIL":
        values |= {"weighting_scheme": "mode", "mode_scale": weight}
    elif kind != "UNIFORM":
        sampling = NEAREST.get(kind, "sigmoid")
        return values | {"timestep_sampling": sampling}, f"{kind} is not offered here; the nearest is "
    elif shift == 1:
        return values | {"timestep_sampling": "uniform"}, ""
    return values | {"timestep_sampling": "sigma"}, ""


def _dynamic(ledger: KeyLedger) -> float:
    """The shift that FLUX.1's scheduler gives to images of the largest size."""
    width, height = max(_sizes(ledger), key=lambda size: size[0] * size[1], default=(1024, 1024))
    tokens = width * height / 256
    return math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))


def _sizes(ledger: KeyLedger) -> list[tuple[int, int]]:
    """The resolutions: "512,1024" are two, and "1024x768" is one exact one."""
    found = []
    for text in str(ledger.get("resolution") or "").split(","):
        sides = [int(side) for part in text.casefold().split("x") if (side := to_number(part)) and side > 0]
        if sides:
            found.append((sides[0], sides[-1]))
    return found


def _images(ledger: KeyLedger) -> None:
    """Concepts, which become a dataset file with one dataset for each resolution."""
    sizes = _sizes(ledger)
    exact = any(one != two for one, two in sizes)
    buckets = is_on(ledger.get("aspect_ratio_bucketing")) and not exact
    concepts = [c for c in tables(ledger.get("concepts")) if c.get("path") and c.get("enabled", True)]
    if concepts:
        _dataset(ledger, concepts, sizes or [(512, 512)], buckets)
        ledger.empty("concept_file_name")
    elif ledger.get("concept_file_name"):
        said = "this file was not found; name the images with train_data_dir or dataset_config"
        ledger.ignore("concept_file_name", said)
    if sizes:
        largest = max(sizes, key=lambda size: size[0] * size[1])
        text = f"{largest[0]},{largest[1]}" if exact else str(largest[0])
        more = f"; {len(sizes)} sizes are datasets of their own" if len(sizes) > 1 else ""
        ledger.change("resolution", f"{text}{more}", {"resolution": text})
    ledger.change("aspect_ratio_bucketing", f"enable_bucket = {str(buckets).lower()}",
                  {"enable_bucket": buckets, "max_bucket_reso": 2048, "caption_extension": ".txt"})  # fmt: skip
    _caching(ledger, concepts)


def _dataset(ledger: KeyLedger, concepts: list[JsonMapping], sizes: list[tuple[int, int]], buckets: bool) -> None:
    general: JsonObject = {"enable_bucket": buckets, "max_bucket_reso": 2048, "caption_extension": ".txt"}
    general["batch_size"] = int(ledger.number("batch_size") or 1)
    if rate := ledger.values.get("caption_dropout_rate"):
        general["caption_dropout_rate"] = rate
    sets: list[tuple[JsonObject, list[JsonObject]]] = []
    used = []
    for concept in concepts:
        if concept.get("validation_concept") or str(concept.get("type")) == "VALIDATION":
            ledger.notes.append(f"concept {concept['path']} is left out: validation_split holds images back here")
        else:
            used.append(concept)
    own = {id(c): _override(c) for c in used}
    shared = [_subset(ledger, c) for c in used if not own[id(c)]]
    sets += [({"resolution": list(size)}, shared) for size in sizes if shared]
    sets += [({"resolution": list(size)}, [_subset(ledger, c)]) for c in used for size in own[id(c)]]
    if sets:
        ledger.texts["dataset_config"] = dataset_toml(general, sets)
    ledger.change("concepts", f"{len(used)} folders: {PREPARED}")


def _override(concept: JsonMapping) -> list[tuple[int, int]]:
    image = dict(*tables([concept.get("image")]))
    if not is_on(image.get("enable_resolution_override")):
        return []
    return _sizes(KeyLedger({"resolution": image.get("resolution_override")}, "", ""))


def _subset(ledger: KeyLedger, concept: JsonMapping) -> JsonObject:
    text, image = (dict(*tables([concept.get(part)])) for part in ("text", "image"))
    path, shuffles = concept["path"], is_on(text.get("enable_tag_shuffling"))
    subset = {
        "image_dir": path,
        "num_repeats": max(1, round(to_number(concept.get("balancing", concept.get("repeats"))) or 1)),
        "shuffle_caption": shuffles,
        "keep_tokens": int(to_number(text.get("keep_tags_count")) or 0) if shuffles else None,
        "caption_separator": text.get("tag_delimiter") if shuffles and text.get("tag_delimiter") != "," else None,
        "flip_aug": is_on(image.get("enable_random_flip")),
        "is_reg": concept.get("type") == "PRIOR_PREDICTION",
    }
    if is_on(text.get("tag_dropout_enable")):
        subset["caption_tag_dropout_rate"] = to_number(text.get("tag_dropout_probability"))
    if str(concept.get("balancing_strategy") or "REPEATS") == "SAMPLES":
        subset["num_repeats"] = 1
        ledger.notes.append(f"concept {path}: a number of images to take is not offered; each is seen once")
    if (source := str(text.get("prompt_source") or "sample")) != "sample":
        ledger.notes.append(f"concept {path}: captions come from text files beside the images here, not from {source}")
    if is_on(concept.get("include_subdirectories")):
        ledger.notes.append(f"concept {path}: folders inside of it are not read; name each as an image_dir")
    if (weight := to_number(concept.get("loss_weight"))) not in (None, 1):
        ledger.notes.append(f"concept {path}: its loss weight {weight:g} has no place here; num_repeats weighs images")
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}


def _caching(ledger: KeyLedger, concepts: list[JsonMapping]) -> None:
    """OneTrainer's cache holds the outputs of frozen text encoders, too, on disk."""
    on = is_on(ledger.get("latent_caching"))
    values: JsonObject = {"cache_latents": on, "cache_latents_to_disk": on}
    learns = ledger.values.get("train_text_encoder") or (
        ledger.adapters and not ledger.values.get("network_train_unet_only")
    )
    texts = [dict(*tables([concept.get("text")])) for concept in concepts]
    varied = any(is_on(t.get("enable_tag_shuffling")) or is_on(t.get("tag_dropout_enable")) for t in texts)
    if on and not learns and not varied and not ledger.values.get("caption_dropout_rate"):
        values |= {"cache_text_encoder_outputs": True, "cache_text_encoder_outputs_to_disk": True}
    ledger.change("latent_caching", f"{', '.join(values)}: {'on' if on else 'off'}", values)


def _samples(ledger: KeyLedger) -> None:
    """Prompts that stand in the config, or in the file that it names, as a prompt file."""
    found = [s for s in tables(ledger.get("samples")) if s.get("enabled", True) and not is_empty(s.get("prompt"))]
    keys = ("sample_after", "sample_after_unit")
    if not found:
        if ledger.get("sample_definition_file_name"):
            ledger.ignore(
                "sample_definition_file_name", "this file was not found; name the prompts with sample_prompts"
            )
        for key in keys:
            ledger.change(key, "there are no prompts to sample")
    else:
        ledger.texts["sample_prompts"] = "\n".join(_line(ledger, sample) for sample in found) + "\n"
        ledger.change("samples", f"{len(found)} prompts in a file of their own")
        ledger.empty("sample_definition_file_name")
        _sample_interval(ledger)
    for key in ("sample_skip_first", "sample_image_format", "sample_video_format", "sample_audio_format",
                "samples_to_tensorboard", "non_ema_sampling"):  # fmt: skip
        if key in ledger.left():
            ledger.ignore(key, "samples are .png files of the model that learns")


def _sample_interval(ledger: KeyLedger) -> None:
    unit, count = str(ledger.get("sample_after_unit")), ledger.number("sample_after")
    if unit in ("STEP", "EPOCH") and count:
        name = f"sample_every_n_{unit.casefold()}s"
        ledger.change("sample_after", f"{name} = {int(count)}", {name: int(count)})
    elif unit not in ("NEVER", "ALWAYS"):
        said = "samples are generated every N epochs or steps here, not by time; once per epoch is set"
        ledger.change("sample_after", said, {"sample_every_n_epochs": 1})
    ledger.change("sample_after_unit", "is the unit of sample_after")
    ledger.empty("sample_after")


def _line(ledger: KeyLedger, sample: JsonMapping) -> str:
    flags = {"width": "--w", "height": "--h", "diffusion_steps": "--s", "negative_prompt": "--n"}
    flags["cfg_scale"] = "--g" if ledger.family == "flux" else "--l"
    if not is_on(sample.get("random_seed")):
        flags["seed"] = "--d"
    words = [" ".join(str(sample["prompt"]).split())]
    return " ".join([*words, *(f"{flag} {sample[k]}" for k, flag in flags.items() if not is_empty(sample.get(k)))])


PARTS = (_timesteps, _images, _samples)
