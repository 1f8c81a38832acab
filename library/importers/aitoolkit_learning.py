"""Import ai-toolkit's adapters, length, optimizer, schedule, dtypes and noise."""

from library.config.json_types import JsonObject
from library.config.problems import Message, counted, join_messages, option_name
from library.importers.builder import ImportBuilder, describe, is_on, to_number
from library.importers.shared import (
    ALL_LAYERS_OF_KREA_2,
    OWN_LAYERS,
    QUANTIZED,
    equal,
    equivalent_optimizer,
    load_tables,
    optimizer_args,
    precision,
    say_nearest,
    simplify_name,
)

TRAINER_NAME = "ai-toolkit"
# In order of precedence.
RANKS = (
    ("network.rank", "network_dim"),
    ("network.linear", "network_dim"),
    ("network.linear_alpha", "network_alpha"),
    ("network.alpha", "network_alpha"),
)
# Arguments that choose layers, by family.
CHOOSING = {"sdxl": "block_dims, conv_block_dims", "": "exclude_patterns, include_patterns"}
LOSSES = {"mse": {}, "mae": {"loss_type": "l1"}, "pseudo_huber": {"loss_type": "huber", "huber_schedule": "constant"}}


def _import_aitoolkit_network(builder: ImportBuilder) -> None:
    if not builder.adapters:
        return
    kind = str(builder.get("network.type") or "lora").casefold()
    whole = kind == "lokr" and builder.source.get("network.lokr_full_rank", True) is not False
    for key, option in RANKS:
        if builder.get(key) is not None and option not in builder.values:
            builder.rename(key, option)
        elif key in builder.source:
            builder.change(key, Message("another key says {option}", option=option_name(option)))
    arguments = _convolution_arguments(builder)
    if kind in ("lokr", "locon", "loha", "dora"):
        algo = {"dora": ["algo=lora", "dora_wd=True"]}.get(kind, [f"algo={kind}"])
        if kind == "lokr":
            algo += [f"factor={builder.get('network.lokr_factor') or -1}", *(["full_matrix=True"] if whole else [])]
        algo += ["bypass_mode=True"] if QUANTIZED & builder.values.keys() else []
        values = {"network_module": "lycoris.kohya", "network_args": [*algo, *arguments]}
        builder.change("network.type", equal(kind, f"lycoris.kohya {' '.join(values['network_args'])}"), values)
        builder.explain("becomes one of network_args", "network.lokr_full_rank", "network.lokr_factor")
    else:
        text = "LoRA" if kind == "lora" else say_nearest(kind, "LoRA")
        # Its page always writes empty lists of layers.
        is_narrow = any(key.startswith("network.network_kwargs.") and builder.get(key) for key in builder.source)
        arguments = [*ALL_LAYERS_OF_KREA_2] if builder.family == "krea_2" and not is_narrow else arguments
        builder.change("network.type", text, {"network_args": arguments} if arguments else {})
    for key in builder.left():
        if key.startswith("network.network_kwargs."):
            is_lycoris = "network_module" in builder.values
            argument_names = "preset" if is_lycoris else CHOOSING.get(builder.family, CHOOSING[""])
            builder.ignore(key, Message(OWN_LAYERS, names=argument_names))
    builder.explain("adapters are in the blocks of the model", "network.transformer_only")


def _convolution_arguments(builder: ImportBuilder) -> list[str]:
    """Return the arguments conv_dim and conv_alpha; without network.conv_alpha, ai-toolkit uses network.conv for
    both."""
    arguments = []
    if not builder.is_unet:
        builder.explain("this model's blocks have no convolutions", "network.conv", "network.conv_alpha")
        return []
    for key, argument in (("network.conv", "conv_dim"), ("network.conv_alpha", "conv_alpha")):
        value = builder.get(key) if builder.get(key) is not None else builder.get("network.conv")
        if builder.number("network.conv") and to_number(value) is not None:
            arguments.append(f"{argument}={value}")
            option = Message("{option} {value}", option=option_name("network_args"), value=argument)
            builder.explain(Message("is {option} here", option=option), key)
    return arguments


def _import_aitoolkit_length(builder: ImportBuilder) -> None:
    """Import the number of steps. ai-toolkit's older gradient accumulation counts each batch as a step."""
    steps, batches = int(builder.number("train.steps") or 1000), int(builder.number("train.gradient_accumulation") or 1)
    old_accumulation = int(builder.number("train.gradient_accumulation_steps") or 1)
    text, key = describe({"max_train_steps": steps}), "train.gradient_accumulation"
    if old_accumulation > 1 and batches <= 1:
        steps, batches, key = max(1, steps // old_accumulation), old_accumulation, "train.gradient_accumulation_steps"
        template = "max_train_steps = {steps}: {trainer} counts each of the {count} batches of a step"
        text = Message(template, steps=steps, trainer=TRAINER_NAME, count=old_accumulation)
    elif old_accumulation < 0:
        builder.ignore("train.gradient_accumulation_steps", "gradients are not added up over a whole epoch here")
    builder.change("train.steps", text, {"max_train_steps": steps})
    if key in builder.source:
        count = max(1, batches)
        builder.convert(key, {"gradient_accumulation_steps": count})
    builder.empty("train.gradient_accumulation", "train.gradient_accumulation_steps")


def _import_aitoolkit_optimizer(builder: ImportBuilder) -> None:
    their_name = builder.get("train.optimizer")
    name, near = equivalent_optimizer(their_name)
    builder.change("train.optimizer", near or equal(their_name, name), {"optimizer_type": name})
    optimizer_keys = {key: value for key, value in builder.source.items() if key.startswith("train.optimizer_params.")}
    settings = {key.rpartition(".")[2]: value for key, value in optimizer_keys.items()}
    if near:
        for key in optimizer_keys:
            builder.ignore(key, Message("it is for {name}, which is not offered here", name=their_name))
        settings = {}
    word = simplify_name(name)
    if word == "adafactor":
        settings = {"relative_step": False, "scale_parameter": False, "warmup_init": False} | settings
    elif word in ("adam", "adamw", "adamw8bit", "prodigy", "dadaptadam", "dadaptlion") or "Adam8bit" in name:
        settings = {"eps": 1e-6} | settings
    if arguments := optimizer_args(settings):
        builder.put("train.optimizer", {"optimizer_args": arguments})
    for key in optimizer_keys.keys() - builder.outcomes.keys():
        builder.change(key, "becomes one of optimizer_args")
    rate = builder.number("train.lr")
    if (word.startswith("dadapt") or word == "prodigy") and rate is not None and rate < 0.1:
        text = Message(
            "{rate} is 1.0 with {name}, as {trainer} does it", rate=f"{rate:g}", name=name, trainer=TRAINER_NAME
        )
        builder.change("train.lr", text, {"learning_rate": 1.0})


def _import_aitoolkit_schedule(builder: ImportBuilder) -> None:
    name = str(builder.get("train.lr_scheduler"))
    steps = builder.number("train.steps") or 1000
    period = builder.number("train.lr_scheduler_params.total_iters") or steps
    values: JsonObject = {"lr_scheduler": name}
    text = describe({"lr_scheduler": name})
    if name == "constant_with_warmup":
        values["lr_warmup_steps"] = int(builder.number("train.lr_scheduler_params.num_warmup_steps") or 1000)
    elif name == "cosine_with_restarts":
        values["lr_scheduler_num_cycles"] = max(1, round(steps / period))
    elif name == "linear":  # PyTorch's LinearLR rises from a third of the rate to the full rate
        values = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": int(period)}
        template = "{trainer}'s linear rises over {steps}; the nearest is {nearest}"
        text = Message(
            template, trainer=TRAINER_NAME, steps=counted(int(period), "step"), nearest="constant_with_warmup"
        )
    elif name == "step":
        values, text = {"lr_scheduler": "constant"}, say_nearest("step", "constant")
    elif warmup := builder.number("train.lr_scheduler_params.num_warmup_steps"):
        values["lr_warmup_steps"] = int(warmup)
    builder.change("train.lr_scheduler", text, values)
    for key in builder.left():
        if key.startswith("train.lr_scheduler_params"):
            builder.change(key, "is part of lr_scheduler")


def _import_trained_parts(builder: ImportBuilder) -> None:
    dtype = precision(builder.get("train.dtype"))
    full_precision = {} if builder.adapters or dtype == "no" else {f"full_{dtype}": True}
    text = join_messages([describe({"mixed_precision": dtype}), *map(option_name, full_precision)])
    builder.change("train.dtype", text, {"mixed_precision": dtype, **full_precision})
    encoders = is_on(builder.get("train.train_text_encoder"))
    key = "train.train_text_encoder"
    if builder.adapters and not encoders:
        builder.change(key, "false is network_train_unet_only", {"network_train_unet_only": True})
    elif builder.is_unet and not builder.adapters:
        builder.rename(key, "train_text_encoder", encoders)
    elif not builder.adapters:
        builder.ignore(key, "this fine-tune trains no text encoder")
    else:
        builder.change(key, "text encoders get adapters, too")
    _import_aitoolkit_rates(builder, encoders)
    if is_on(builder.get("train.ema_config.use_ema")):
        decay = builder.number("train.ema_config.ema_decay") or 0.999
        template = "ema_decay = {decay}; the average is saved beside each file as <name>-ema, not in its place"
        builder.change("train.ema_config.use_ema", Message(template, decay=f"{decay:g}"), {"ema_decay": decay})
        builder.empty("train.ema_config.ema_decay")


def _import_aitoolkit_rates(builder: ImportBuilder, encoders: bool) -> None:
    """Import the parts' learning rates, and which parts are trained."""
    rate = builder.number("train.text_encoder_lr")
    if rate is not None and encoders and builder.adapters:
        builder.rename("train.text_encoder_lr", "text_encoder_lr", [rate])
    elif rate is not None and encoders and builder.is_unet:
        names = ("learning_rate_te",) if builder.family == "sd15" else ("learning_rate_te1", "learning_rate_te2")
        text = " = ".join([*names, f"{rate:g}"])
        builder.change("train.text_encoder_lr", text, dict.fromkeys(names, rate))
    unet_rate = builder.number("train.unet_lr")
    if unet_rate is not None:
        builder.rename("train.unet_lr", "unet_lr" if builder.adapters else "learning_rate", unet_rate)
    if not is_on(builder.get("train.train_unet")):
        only = {"network_train_text_encoder_only": True} if builder.adapters and encoders else {}
        builder.change(
            "train.train_unet", "only text encoders learn" if only else "the image model always learns", only
        )
    else:
        builder.explain("the image model learns", "train.train_unet")


def _import_timestep_range(builder: ImportBuilder) -> None:
    """Import the range of trained timesteps. For flow matching, ai-toolkit counts positions from the noisiest
    timestep."""
    keys = "train.min_denoising_steps", "train.max_denoising_steps"
    first, last = (builder.number(key) for key in keys)
    if builder.is_unet:
        if first:
            builder.rename(keys[0], "min_timestep", int(first))
        if last is not None and last < 999:
            builder.rename(keys[1], "max_timestep", int(last) + 1)
        return
    linear = is_on(builder.get("train.linear_timesteps")) or builder.get("train.timestep_type") == "linear"
    for key, number, option in ((keys[0], first, "max_timestep"), (keys[1], last, "min_timestep")):
        if number is None or number == (0 if key == keys[0] else 999):
            continue
        if linear:
            value = 1000 - int(number)
            text = Message(
                "counted from the noisiest timestep there: {option} = {value}", option=option_name(option), value=value
            )
            builder.change(key, text, {option: value})
        else:
            template = (
                "a place among 1000 drawn timesteps there, the noisiest first; {option} limits the timestep itself"
            )
            builder.ignore(key, Message(template, option=option_name(option)))


def _import_aitoolkit_noise(builder: ImportBuilder) -> None:
    _import_timestep_range(builder)
    kind = str(builder.get("train.loss_type"))
    loss = LOSSES.get(kind)
    text = "loss_type = l2" if kind == "mse" else say_nearest(kind, "loss_type = l2")
    text = equal(kind, describe({"loss_type": loss["loss_type"]})) if loss else text
    builder.change("train.loss_type", text, loss or {})
    if (gamma := builder.number("train.snr_gamma")) and "min_snr_gamma" not in builder.values:
        builder.ignore("train.snr_gamma", say_nearest("snr_gamma", describe({"min_snr_gamma": f"{gamma:g}"})))
    if str(builder.get("train.content_or_style") or "balanced") != "balanced":
        chosen = "min_timestep, max_timestep" if builder.is_unet else "timestep_sampling"
        text = Message("all timesteps count alike; {names} choose others", names=chosen)
        builder.ignore("train.content_or_style", text)
    else:
        builder.explain("balanced: all timesteps count alike", "train.content_or_style")
    key = "train.timestep_type"
    if builder.is_unet:
        if builder.given(key):
            builder.ignore(key, "this model is trained with all timesteps alike here")
        else:
            builder.empty(key)
        return
    kind = "linear" if is_on(builder.get("train.linear_timesteps")) else str(builder.get(key))
    values: JsonObject = {"timestep_sampling": load_tables("aitoolkit")["timestep_sampling"].get(kind, "sigmoid")}
    guided = builder.family == "flux" and not is_on(builder.get("train.bypass_guidance_embedding"))
    values |= {"model_prediction_type": "raw"} | ({"guidance_scale": 1.0} if guided else {})
    prefix = {"qwen_image": "qwen_", "flux_2": "flux2_", "krea_2": "krea2_"}.get(builder.family, "flux_")
    values["timestep_sampling"] = str(values["timestep_sampling"]).replace("flux_", prefix)
    text = describe(values)
    text = text if kind in ("sigmoid", "linear") else say_nearest(kind, text)
    builder.change(key, text, values)
    builder.explain("is part of timestep_sampling", "train.linear_timesteps")


def _import_preservation(builder: ImportBuilder) -> None:
    """Import what keeps the base model's predictions: for captions with the class in place of the trigger word (DOP),
    or for the empty prompt."""
    first = ""
    for switch in ("train.diff_output_preservation", "train.blank_prompt_preservation"):
        if not is_on(builder.get(switch)):
            continue
        if first:
            builder.ignore(switch, Message("only one prompt can be preserved, and {key} is on as well", key=first))
            continue
        first = switch
        if not builder.adapters:
            builder.ignore(
                switch, "only a LoRA or LyCORIS network can be switched off to get the base model's prediction"
            )
            continue
        class_word = builder.get(f"{switch}_class")
        weight, prompt = builder.number(f"{switch}_multiplier"), class_word if isinstance(class_word, str) else ""
        values: JsonObject = {"preserve_weight": 1.0 if weight is None else weight}
        values |= {"preserve_prompt": prompt} if prompt else {}
        builder.convert(switch, values)
        builder.explain(option_name("preserve_weight"), f"{switch}_multiplier")
        builder.explain(option_name("preserve_prompt"), f"{switch}_class")


LEARNING_IMPORTS = (
    _import_aitoolkit_network,
    _import_aitoolkit_length,
    _import_aitoolkit_optimizer,
    _import_aitoolkit_schedule,
    _import_trained_parts,
    _import_aitoolkit_noise,
    _import_preservation,
)
