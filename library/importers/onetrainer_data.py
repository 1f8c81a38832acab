"""Import OneTrainer's concepts to a dataset file, samples to a prompt file, and its timestep sampling for FLUX.1."""

import math

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, Problem, counted
from library.config.reading import resolution
from library.importers.builder import ImportBuilder, describe, is_empty, is_on, to_number
from library.importers.shared import (
    NO_IMAGES,
    NO_PROMPTS,
    PREPARED,
    dataset_toml,
    describe_prompts,
    guidance,
    guidance_flag,
    joined_sizes,
    say_nearest,
    small_buckets,
    table_in,
    tables_of_list,
    transformer_of,
)

MAX_REPEAT_FACTOR = 20  # by which repeats are multiplied to be whole
OF_EPOCHS = ("max_train_epochs", "save_every_n_epochs", "sample_every_n_epochs")
NEAREST = {"INVERTED_PARABOLA": "sigmoid", "SIGMOID": "shift", "BETA": "uniform", "COS_MAP": "sigmoid"}


def _import_onetrainer_timesteps(builder: ImportBuilder) -> None:
    """Import the distribution of timesteps."""
    weight, bias = builder.number("noising_weight") or 0.0, builder.number("noising_bias") or 0.0
    kind = str(builder.get("timestep_distribution") or ("SIGMOID" if weight else "UNIFORM"))
    keys = ("timestep_distribution", "noising_weight", "noising_bias", "timestep_shift", "dynamic_timestep_shifting")
    if builder.is_unet:
        for key in keys:
            is_default = builder.source.get(key) in (None, "UNIFORM", 1, 1.0)
            builder.empty(key) if is_default else builder.ignore(
                key, "this model is trained with all timesteps alike here"
            )
        return
    shift, dynamic = builder.number("timestep_shift") or 1.0, is_on(builder.get("dynamic_timestep_shifting"))
    if dynamic:
        shift = round(_dynamic_shift(builder), 4)
    values, is_same = _distribution_options(kind, weight, bias, shift, dynamic)
    if values["timestep_sampling"] in ("shift", "sigma"):
        values |= {"discrete_flow_shift": shift}
    guidance = builder.number("transformer.guidance_scale")
    if values["timestep_sampling"] != "sigma":
        del values["weighting_scheme"]
    if builder.family == "flux" and builder.get("model_type") != "CHROMA_1":
        values |= {"guidance_scale": 1.0 if guidance is None else guidance}
    elif values["timestep_sampling"] == "flux_shift":
        values["timestep_sampling"] = transformer_of(builder).size_shift
    explanation = describe(values)
    key = "timestep_distribution"
    builder.assume(key, kind)
    builder.change(key, explanation if is_same else say_nearest(kind, explanation), values)
    builder.explain("is part of how timesteps are drawn", *keys[1:], "transformer.guidance_scale")


def _distribution_options(
    kind: str, weight: float, bias: float, shift: float, dynamic: bool
) -> tuple[JsonObject, bool]:
    """Return the options of a distribution, and whether they give exactly the same one, not only the nearest."""
    values: JsonObject = {"model_prediction_type": "raw", "weighting_scheme": "none"}
    if kind == "LOGIT_NORMAL" and not bias:
        sampling = "flux_shift" if dynamic else "sigmoid" if shift == 1 else "shift"
        return values | {"timestep_sampling": sampling, "sigmoid_scale": 1 + weight}, True
    if kind == "LOGIT_NORMAL":  # the table of sigma sampling starts at the highest noise
        values |= {"weighting_scheme": "logit_normal", "logit_mean": -bias, "logit_std": 1 + weight}
    elif kind == "HEAVY_TAIL":
        values |= {"weighting_scheme": "mode", "mode_scale": weight}
    elif kind != "UNIFORM":
        sampling = NEAREST.get(kind, "sigmoid")
        return values | {"timestep_sampling": sampling}, False
    elif shift == 1:
        return values | {"timestep_sampling": "uniform"}, True
    return values | {"timestep_sampling": "sigma"}, True


def _dynamic_shift(builder: ImportBuilder) -> float:
    """Return the shift of FLUX.1's scheduler for images of the largest size."""
    width, height = max(_parse_onetrainer_sizes(builder), key=lambda size: size[0] * size[1], default=(1024, 1024))
    tokens = width * height / 256  # a token is 16 x 16 pixels
    return math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))


def _parse_onetrainer_sizes(builder: ImportBuilder) -> list[tuple[int, int]]:
    """Parse resolutions: "512,1024" are two squares, "1024x768" is one exact size."""
    sizes = []
    for text in str(builder.get("resolution") or "").split(","):
        sides = [int(side) for part in text.casefold().split("x") if (side := to_number(part)) and side > 0]
        if sides:
            sizes.append((sides[0], sides[-1]))
    return sizes


def _import_onetrainer_images(builder: ImportBuilder) -> None:
    """Convert concepts to a dataset file."""
    sizes = _parse_onetrainer_sizes(builder)
    exact = any(width != height for width, height in sizes)
    buckets = is_on(builder.get("aspect_ratio_bucketing")) and not exact
    listed = tables_of_list(builder.get("concepts"), "concepts", builder.notes)
    for number, concept in enumerate(listed, 1):
        if is_empty(concept.get("path")) and concept.get("enabled", True):
            reason = Message("it names no folder ({key})", key="path")
            builder.notes.append(Message("data set {name} is left out: {reason}", name=number, reason=reason))
    concepts = [c for c in listed if c.get("path") and c.get("enabled", True)]
    if concepts:
        _import_concepts(builder, concepts, sizes or [(512, 512)], buckets)
        builder.empty("concept_file_name")
    elif builder.get("concept_file_name"):
        builder.ignore("concept_file_name", NO_IMAGES)
    if sizes:
        text = resolution(joined_sizes(sizes))
        explanation: MessageLike = text
        if len(sizes) > 1:
            explanation = Message(
                "{sizes}: each image is trained at each size, where OneTrainer draws one each time", sizes=text
            )
        limits = small_buckets(text) if buckets else {}
        builder.change("resolution", explanation, {} if concepts else {"resolution": text} | limits)
    values: JsonObject = {"enable_bucket": buckets, "max_bucket_reso": 2048, "caption_extension": ".txt"}
    explanation = describe({"enable_bucket": str(buckets).lower()})
    builder.change("aspect_ratio_bucketing", explanation, {} if concepts else values)  # a dataset file has its own
    _import_onetrainer_caching(builder, concepts)


def _import_concepts(
    builder: ImportBuilder, concepts: list[JsonMapping], sizes: list[tuple[int, int]], buckets: bool
) -> None:
    general: JsonObject = {"enable_bucket": buckets, "max_bucket_reso": 2048, "caption_extension": ".txt"}
    sets: list[tuple[JsonObject, list[JsonObject]]] = []
    included = []
    for concept in concepts:
        if concept.get("validation_concept") or str(concept.get("type")) == "VALIDATION":
            template = "concept {path} is left out: validation_split holds images back here"
            builder.notes.append(Message(template, path=concept["path"]))
        else:
            included.append(concept)
    own_sizes = {id(c): _overridden_sizes(c) for c in included}
    repeats = {id(c): count for c, count in zip(included, _whole_repeats(builder, included), strict=True)}
    shared = [_onetrainer_subset(builder, c, repeats[id(c)]) for c in included if not own_sizes[id(c)]]
    sets += [({"resolution": joined_sizes(sizes)}, shared)] if shared else []
    sets += [
        ({"resolution": joined_sizes(own_sizes[id(c)])}, [_onetrainer_subset(builder, c, repeats[id(c)])])
        for c in included
        if own_sizes[id(c)]
    ]
    if sets:
        builder.texts["dataset_config"] = dataset_toml(general, sets)
    builder.change("concepts", Message("{folders}: {place}", folders=counted(len(included), "folder"), place=PREPARED))


def _overridden_sizes(concept: JsonMapping) -> list[tuple[int, int]]:
    image = dict(*tables_of_list([concept.get("image")]))
    if not is_on(image.get("enable_resolution_override")):
        return []
    return _parse_onetrainer_sizes(ImportBuilder({"resolution": image.get("resolution_override")}, "", ""))


def _whole_repeats(builder: ImportBuilder, concepts: list[JsonMapping]) -> list[int]:
    """Return the repeats of concepts as whole numbers in the same ratio: 0.5 and 2.5 become 1 and 5, with half as many
    epochs."""
    repeats = [to_number(concept.get("balancing", concept.get("repeats"))) for concept in concepts]
    by_count = [str(concept.get("balancing_strategy") or "REPEATS") == "SAMPLES" for concept in concepts]
    repeats = [1.0 if not count or samples else count for count, samples in zip(repeats, by_count, strict=True)]
    if all(count == round(count) and count >= 1 for count in repeats):
        return [round(count) for count in repeats]
    factor = next((factor for factor in range(1, MAX_REPEAT_FACTOR + 1) if _is_whole(repeats, factor)), 0)
    counts = {name: builder.values[name] for name in OF_EPOCHS if builder.values.get(name)}
    whole = {}
    if factor:
        whole = {name: number for name in counts if (number := to_number(counts[name])) and number % factor == 0}
    if factor and whole.keys() == counts.keys():
        builder.values |= {name: int(number) // factor for name, number in whole.items()}
        template = "repeats of concepts are multiplied by {factor} to be whole, and epochs divided by it"
        builder.notes.append(Message(template, factor=factor))
    else:
        factor = factor or max(1, min(MAX_REPEAT_FACTOR, round(1 / min(repeats))))
        shown = ", ".join(f"{concept['path']}: {count:g}" for concept, count in zip(concepts, repeats, strict=True))
        template = (
            "has whole numbers of repeats, and those of concepts are not whole: {repeats}; change num_repeats in the "
            "dataset file until the ratio is right, and max_train_epochs with it"
        )
        builder.problems.append(Problem("dataset_config", template, repeats=shown))
    return [max(1, round(count * factor)) for count in repeats]


def _is_whole(counts: list[float], factor: int) -> bool:
    """Return whether counts times a factor are whole numbers, to within 1 %."""
    return all(
        count * factor >= 0.99 and abs(count * factor - round(count * factor)) <= 0.01 * count * factor
        for count in counts
    )


def _onetrainer_subset(builder: ImportBuilder, concept: JsonMapping, repeats: int) -> JsonObject:
    place = Message("concept {path}", path=concept["path"])
    text, image = (table_in(concept, part, place, builder.notes) for part in ("text", "image"))
    path, shuffles = concept["path"], is_on(text.get("enable_tag_shuffling"))

    def note(sentence: Message) -> None:
        builder.notes.append(Message("concept {path}: {text}", path=path, text=sentence))

    subset = {
        "image_dir": path,
        "num_repeats": repeats,
        "shuffle_caption": shuffles,
        "keep_tokens": int(to_number(text.get("keep_tags_count")) or 0) if shuffles else None,
        "caption_separator": text.get("tag_delimiter") if shuffles and text.get("tag_delimiter") != "," else None,
        "flip_aug": is_on(image.get("enable_random_flip")),
    }
    if concept.get("type") == "PRIOR_PREDICTION":
        # Only a network beside the model can be left out for the base model's prediction, there too.
        subset |= {"custom_attributes": {"diff_output_preservation": True}} if builder.adapters else {"is_reg": True}
    if is_on(text.get("tag_dropout_enable")):
        subset["caption_tag_dropout_rate"] = to_number(text.get("tag_dropout_probability"))
    if str(concept.get("balancing_strategy") or "REPEATS") == "SAMPLES":
        subset["num_repeats"] = 1
        note(Message("a number of images to take is not offered; each is seen once"))
    if (source := str(text.get("prompt_source") or "sample")) != "sample":
        note(Message("captions come from text files beside the images here, not from {source}", source=source))
    if is_on(concept.get("include_subdirectories")):
        note(Message("folders inside it are not read; name each as an image_dir"))
    if (weight := to_number(concept.get("loss_weight"))) not in (None, 1):
        note(Message("its loss weight {weight} is not offered here; num_repeats weighs images", weight=f"{weight:g}"))
    return {key: value for key, value in subset.items() if not is_empty(value) and value is not False}


def _import_onetrainer_caching(builder: ImportBuilder, concepts: list[JsonMapping]) -> None:
    """Import caching: OneTrainer's cache on disk includes the outputs of frozen text encoders."""
    is_cached = is_on(builder.get("latent_caching"))
    values: JsonObject = {"cache_latents": is_cached, "cache_latents_to_disk": is_cached}
    of_encoders = (builder.values.get(name) for name in ("train_text_encoder", "token_string"))
    learns = any(of_encoders) or (builder.adapters and not builder.values.get("network_train_unet_only"))
    texts = [dict(*tables_of_list([concept.get("text")])) for concept in concepts]
    varied = any(is_on(t.get("enable_tag_shuffling")) or is_on(t.get("tag_dropout_enable")) for t in texts)
    if is_cached and not learns and not varied and not builder.values.get("caption_dropout_rate"):
        values |= {"cache_text_encoder_outputs": True, "cache_text_encoder_outputs_to_disk": True}
    builder.convert("latent_caching", values)


def _import_onetrainer_samples(builder: ImportBuilder) -> None:
    """Convert prompts of the config, or of the file that it names, to a prompt file."""
    listed = tables_of_list(builder.get("samples"), "samples", builder.notes)
    enabled = [s for s in listed if s.get("enabled", True) and not is_empty(s.get("prompt"))]
    keys = ("sample_after", "sample_after_unit")
    if not enabled:
        if builder.get("sample_definition_file_name"):
            builder.ignore("sample_definition_file_name", NO_PROMPTS)
        for key in keys:
            builder.change(key, "there are no prompts to sample")
    else:
        builder.texts["sample_prompts"] = (
            "\n".join(_onetrainer_prompt_line(builder, sample) for sample in enabled) + "\n"
        )
        builder.change("samples", describe_prompts(len(enabled)))
        builder.empty("sample_definition_file_name")
        _import_sample_interval(builder)
    for key in (
        "sample_skip_first",
        "sample_image_format",
        "sample_video_format",
        "sample_audio_format",
        "samples_to_tensorboard",
        "non_ema_sampling",
    ):
        if key in builder.left():
            builder.ignore(key, "samples are .png files of the model that learns")


def _import_sample_interval(builder: ImportBuilder) -> None:
    unit, count = str(builder.get("sample_after_unit")), builder.number("sample_after")
    if unit in ("STEP", "EPOCH") and count:
        name = f"sample_every_n_{unit.casefold()}s"
        builder.convert("sample_after", {name: int(count)})
    elif unit not in ("NEVER", "ALWAYS"):
        explanation = "samples are generated every N epochs or steps here, not by time; once per epoch is set"
        builder.change("sample_after", explanation, {"sample_every_n_epochs": 1})
    builder.change("sample_after_unit", "is the unit of sample_after")
    builder.empty("sample_after")


def _onetrainer_prompt_line(builder: ImportBuilder, sample: JsonMapping) -> str:
    flags = {"width": "--w", "height": "--h", "diffusion_steps": "--s", "negative_prompt": "--n"}
    flags["cfg_scale"] = guidance_flag(builder, chroma=builder.get("model_type") == "CHROMA_1")
    sample = {**sample, "cfg_scale": guidance(builder, sample.get("cfg_scale"))}
    if not is_on(sample.get("random_seed")):
        flags["seed"] = "--d"
    words = [" ".join(str(sample["prompt"]).split())]
    return " ".join([*words, *(f"{flag} {sample[k]}" for k, flag in flags.items() if not is_empty(sample.get(k)))])


DATA_IMPORTS = (_import_onetrainer_timesteps, _import_onetrainer_samples, _import_onetrainer_images)
