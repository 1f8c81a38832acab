"""Import OneTrainer's trained parts, their dtypes, and the adapters."""

from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, join_messages, option_name, option_values
from library.importers.builder import ImportBuilder, describe, is_on
from library.importers.shared import ALL_LAYERS_OF_KREA_2, equal, load_tables, precision, say_nearest, transformer_of

EIGHT = load_tables("onetrainer")["eight_bit_formats"]
SAME = ("FLOAT_8", "INT_8")
ENCODER_KEYS = ("text_encoder", "text_encoder_2")


def image_part(builder: ImportBuilder) -> str:
    return "unet" if builder.is_unet else "transformer"


def dtype(builder: ImportBuilder, part: str) -> str:
    """Return the dtype of a part; in old files NONE means that of the whole model."""
    part_dtype = str(builder.get(f"{part}.weight_dtype") or "NONE").upper()
    if part_dtype == "NONE" or not builder.given(f"{part}.weight_dtype"):
        return str(builder.get("weight_dtype") or part_dtype).upper().replace("NONE", "FLOAT_32")
    return part_dtype


def import_dtypes(builder: ImportBuilder) -> None:
    """Convert train_dtype and the dtypes of the parts, which are one option here."""
    part = image_part(builder)
    stored_dtype, compute_dtype = dtype(builder, part), str(builder.get("train_dtype")).upper()
    mixed, half = precision(compute_dtype), precision(stored_dtype)
    values: JsonObject = {"mixed_precision": mixed}
    text = describe({"mixed_precision": mixed})
    if compute_dtype == "TFLOAT_32":
        values = {"mixed_precision": "no", "cuda_allow_tf32": True}
        text = describe(values)
    elif not builder.adapters and half in ("bf16", "fp16"):
        shared_dtype = "bf16" if "bf16" in (half, mixed) else "fp16"
        values = {"mixed_precision": shared_dtype, f"full_{shared_dtype}": True}
        template = "with weights in {format}: {options}, since both have one format here"
        text = Message(template, format=stored_dtype, options=describe(values))
        if half != mixed:
            template = "OneTrainer computes in {used} with weights in {kept}; both are {ours} here"
            builder.notes.append(Message(template, used=compute_dtype, kept=stored_dtype, ours=shared_dtype))
    builder.change("train_dtype", text, values)
    key = f"{part}.weight_dtype" if f"{part}.weight_dtype" in builder.source else "weight_dtype"
    if stored_dtype in EIGHT and builder.adapters:
        encoders = [name for name in ENCODER_KEYS if dtype(builder, name) in EIGHT]
        _import_8_bit_base(builder, key, stored_dtype, bool(encoders))
    elif key in builder.source:
        trained_dtype = half if half in ("bf16", "fp16") else "float32"
        trained_text = Message("weights that learn are kept in {format}", format=trained_dtype)
        builder.change(key, "frozen weights are kept in mixed_precision" if builder.adapters else trained_text)
    import_other_dtypes(builder)


def _import_8_bit_base(builder: ImportBuilder, key: str, stored_dtype: str, encoders: bool) -> None:
    of_kinds: dict[str, JsonObject] = {"int8": {"int8_base": True}, "nf4": {"base_bits": 4}}
    ours = of_kinds.get(EIGHT[stored_dtype]) or {"fp8_base" if encoders else "fp8_base_unet": True}
    name = next(iter(ours))
    if stored_dtype in ("FLOAT_W8A8", "FLOAT_W8A8_COMPRESSED"):
        ours["fp8_compute"] = True
    is_same = stored_dtype in SAME or "W8A8" in stored_dtype or "base_bits" in ours
    builder.change(key, describe(ours) if is_same else say_nearest(stored_dtype, describe(ours)), ours)
    if builder.values["mixed_precision"] == "no":
        builder.values["mixed_precision"] = "bf16"
        builder.notes.append(Message("mixed_precision is bf16 instead of float32, which {name} needs", name=name))


def import_other_dtypes(builder: ImportBuilder) -> None:
    """Import the dtypes of text encoders, VAE and adapters, as far as they are options here."""
    for name in ENCODER_KEYS:
        if builder.get(f"{name}.weight_dtype"):
            text = "text encoders have the format of fp8_base if that is set, else mixed_precision"
            builder.change(f"{name}.weight_dtype", text)
    full = dtype(builder, "vae") in ("FLOAT_32", "TFLOAT_32")
    key = "vae.weight_dtype"
    if builder.family in ("krea_2", "qwen_image", "zimage", "anima"):
        builder.ignore(key, "the VAE is in mixed_precision, and in float32 instead of fp16")
    elif builder.family == "flux_2":
        kind = "float32" if full else "bfloat16"
        builder.convert(key, {"vae_dtype": kind})
    elif builder.is_unet or builder.adapters:
        builder.change(key, describe({"no_half_vae": str(full).lower()}), {"no_half_vae": full})
    else:
        builder.ignore(key, "the autoencoder of a FLUX.1 fine-tune is always run in the same way")
    if builder.get("weight_dtype") and "weight_dtype" not in builder.outcomes:
        builder.change("weight_dtype", "the format of the parts that name none")
    if precision(builder.get("lora_weight_dtype") or "") == "bf16" and builder.adapters:
        builder.change("lora_weight_dtype", "full_bf16", {"full_bf16": True, "mixed_precision": "bf16"})


def import_adapters(builder: ImportBuilder) -> None:
    """Import the kind of the adapters, their size, and which layers get them."""
    if not builder.adapters:
        for key in builder.left():
            if key.startswith(("peft_", "lora_", "lokr_", "oft_", "dropout_")):
                builder.ignore(key, "no adapters learn in a fine-tune")
            elif key.startswith("layer_filter"):
                builder.ignore(key, "a fine-tune trains all layers here")
        return
    rank, alpha = builder.number("lora_rank") or 16, builder.number("lora_alpha")
    kind = str(builder.get("peft_type") or "LORA").upper()
    builder.rename("lora_rank", "network_dim", int(rank))
    builder.rename("lora_alpha", "network_alpha", alpha)
    if builder.number("dropout_probability"):
        builder.rename("dropout_probability", "network_dropout")
    arguments: list[str] = []
    if kind == "LORA" and not is_on(builder.get("lora_decompose")):
        text, module = "LoRA", {}
        arguments = _import_adapter_layers(builder, int(rank), alpha or 1.0)
    else:
        text, algo = _import_onetrainer_lycoris(builder, kind)
        module = {"network_module": "lycoris.kohya"}
        arguments = algo + _lycoris_preset(builder)
        if dtype(builder, image_part(builder)) in EIGHT:
            arguments.append("bypass_mode=True")
    values = {**module, "network_args": arguments} if arguments else module
    builder.change("peft_type", join_messages([text, " ".join(arguments)]) if arguments else text, values)


def _import_onetrainer_lycoris(builder: ImportBuilder, kind: str) -> tuple[MessageLike, list[str]]:
    decompose = ["dora_wd=True"] if is_on(builder.get("lora_decompose")) else []
    if kind == "LOKR":
        if size := builder.number("lokr_dim"):
            builder.rename("lokr_dim", "network_dim", int(size))
        arguments = [f"factor={int(builder.number('lokr_decompose_factor') or -1)}"]
        flags = {
            "lokr_decompose_both": "decompose_both",
            "lokr_use_tucker": "use_tucker",
            "lokr_weight_decompose": "dora_wd",
            "lokr_full_matrix": "full_matrix",
        }
        arguments += [f"{name}=True" for key, name in flags.items() if is_on(builder.get(key))]
        text, algo = equal("LoKr", "LyCORIS"), ["algo=lokr", *arguments]
    elif kind == "LOHA":
        text, algo = equal("LoHa", "LyCORIS"), ["algo=loha"]
    elif kind.startswith("OFT"):
        text, algo = say_nearest("OFT", "LyCORIS"), ["algo=diag-oft"]
    else:
        text, algo = equal(kind, "LyCORIS"), ["algo=lora", *decompose]
    for key in builder.left():
        if key.startswith("lokr_") or key == "lora_decompose":
            builder.change(key, "becomes one of network_args" if builder.get(key) else "is off")
    return text, algo


def _layer_filter(builder: ImportBuilder) -> str:
    """Return which layers get adapters: "full", "attn-mlp", "attn-only", "blocks", or a custom filter."""
    preset = str(builder.get("layer_filter_preset") or "full")
    typed = str(builder.get("layer_filter") or "")
    return preset if preset != "custom" else typed or "full"


def _lycoris_preset(builder: ImportBuilder) -> list[str]:
    layer_filter = _layer_filter(builder)
    presets = {"attn-mlp": "attn-mlp", "attn-only": "attn-only", "blocks": "attn-mlp"}
    _say_layers(builder, equal(layer_filter, f"preset={presets.get(layer_filter, 'full')}"))
    return [f"preset={presets[layer_filter]}"] if layer_filter in presets else []


def _import_adapter_layers(builder: ImportBuilder, rank: int, alpha: float) -> list[str]:
    """Return the choice of layers that get adapters, as arguments of networks.lora and networks.lora_flux."""
    layer_filter = _layer_filter(builder)
    if builder.is_unet:
        if layer_filter == "full":
            _say_layers(builder, "full: convolutions get adapters, too (conv_dim, conv_alpha)")
            return [f"conv_dim={rank}", f"conv_alpha={alpha:g}"]
        is_same = layer_filter == "attn-mlp" or layer_filter == "attentions"
        _say_layers(builder, "attn-mlp is what LoRA does here" if is_same else say_nearest(layer_filter, "attn-mlp"))
        return []
    if builder.family in ("qwen_image", "zimage") and layer_filter in ("full", "blocks"):
        _say_layers(builder, Message("{layers}: the modulation gets adapters, too", layers=layer_filter))
        refiners = ["train_refiners=True"] if builder.family == "zimage" and layer_filter == "full" else []
        return ["train_modulation=True", *refiners]
    if builder.family == "anima" and layer_filter in ("full", "blocks"):
        _say_layers(builder, Message("{layers}: the modulation gets adapters, too", layers=layer_filter))
        return [r"include_patterns=['.*adaln_modulation.*']"]
    if builder.family == "krea_2" and layer_filter in ("full", "attn-mlp", "attn-only"):
        _say_layers(builder, Message("{layers}: the text fusion gets adapters, too", layers=layer_filter))
        narrow = ["network_reg_dims=_mlp_=0"] if layer_filter == "attn-only" else []
        return [*ALL_LAYERS_OF_KREA_2] if layer_filter == "full" else [ALL_LAYERS_OF_KREA_2[0], *narrow]
    if layer_filter == "attn-mlp" and builder.get("model_type") != "CHROMA_1":
        _say_layers(builder, "attn-mlp: the modulation gets no adapters")
        return ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"] if builder.family == "flux" else []
    all_layers = Message("all layers of the blocks get adapters")
    _say_layers(builder, all_layers if layer_filter in ("full", "blocks") else say_nearest(layer_filter, all_layers))
    return []


def _say_layers(builder: ImportBuilder, text: MessageLike) -> None:
    builder.explain(text, "layer_filter_preset", "layer_filter", "layer_filter_regex")


def _import_onetrainer_checkpointing(builder: ImportBuilder) -> None:
    """Import gradient checkpointing: one setting for all parts up to version 10, and one per part since."""
    part = image_part(builder)
    global_key, part_key = "gradient_checkpointing", f"{part}.gradient_checkpointing"
    word = str(builder.source.get(global_key, builder.source.get(part_key, True))).upper()
    share = (
        builder.number("layer_offload_fraction") if global_key in builder.source and word == "CPU_OFFLOADED" else None
    )
    share = share or builder.number(f"{part}.offload_fraction") or 0.0
    offloaded = word == "CPU_OFFLOADED" or is_on(builder.get(f"{part}.activation_offloading"))
    offloaded = offloaded and builder.source.get("enable_activation_offloading", True) is not False
    values: JsonObject = {"gradient_checkpointing": word in ("ON", "TRUE", "1", "CPU_OFFLOADED")}
    text = describe({"gradient_checkpointing": str(values["gradient_checkpointing"]).lower()})
    if share and transformer_of(builder).blocks:
        facts = transformer_of(builder)
        values["blocks_to_swap"] = min(facts.most_swapped, max(1, round(share * facts.blocks)))
        option = describe({"blocks_to_swap": values["blocks_to_swap"]})
        text = Message("{option}, for {share} of the layers", option=option, share=f"{share:g}")
    elif offloaded and values["gradient_checkpointing"]:
        values = {"gradient_checkpointing": False, "cpu_offload_checkpointing": True}
        text = "cpu_offload_checkpointing"
    builder.change(global_key if global_key in builder.source else part_key, text, values)
    if global_key not in builder.source:
        builder.assume(part_key, True)
    if "blocks_to_swap" in values:
        builder.explain(Message("is {option} here", option=option_name("blocks_to_swap")), f"{part}.offload_fraction")
    for key in builder.left():
        if key.endswith((".gradient_checkpointing", ".offload_fraction", ".activation_offloading")) or key in (
            "layer_offload_fraction",
            "enable_activation_offloading",
        ):
            builder.ignore(key, Message("said by {part}; it is not supported for other parts", part=part))


def _import_onetrainer_captions(builder: ImportBuilder) -> None:
    """Import options of captions for the text encoders."""
    if builder.family == "flux":
        encoder = "text_encoder" if builder.get("model_type") == "CHROMA_1" else "text_encoder_2"  # which of them is T5
        key = f"{encoder}_sequence_length"
        if (length := builder.number(key)) is not None:
            builder.rename(key, "t5xxl_max_token_length", int(length))
        else:
            builder.empty(key)
        if is_on(builder.get("text_encoder_2.attention_mask")):
            builder.rename("text_encoder_2.attention_mask", "apply_t5_attn_mask", True)
    for key in (
        "text_encoder_layer_skip",
        "text_encoder_2_layer_skip",
        "text_encoder_sequence_length",
        "text_encoder_2_sequence_length",
    ):
        if key in builder.left():
            builder.ignore(key, "the layer and length that the model was made with are used")
    rates = [builder.number(f"{name}.dropout_probability") or 0.0 for name in ENCODER_KEYS]
    if any(rates):
        template = "{option}; both text encoders miss the same captions here"
        option = option_values({"caption_dropout_rate": f"{max(rates):g}"})
        text = Message(template, option=option) if builder.family in ("sdxl", "flux") else option
        for name, rate in zip(ENCODER_KEYS, rates, strict=True):
            if rate:
                builder.change(f"{name}.dropout_probability", text, {"caption_dropout_rate": max(rates)})


MODEL_IMPORTS = (
    import_dtypes,
    import_adapters,
    _import_onetrainer_checkpointing,
    _import_onetrainer_captions,
)
