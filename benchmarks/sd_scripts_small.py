"""Runs a script of sd-scripts on a small model: `python sd_scripts_small.py FOLDER SCRIPT LOSSES OPTION...`.

sd-scripts has the sizes of FLUX.1's, SDXL's and SD 1.5's networks in its code. This sets those of the given files,
which their headers tell, before its training starts, and leaves the training itself alone; it also writes the loss of
each step to LOSSES, a line of JSON each. Run it as a file, in an environment of sd-scripts: its package is called
`library`, too.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
CLIP_HEAD = 64  # channels of a head of a CLIP text encoder and, where there is room, of SDXL's U-Net
CLIP_L_STATES = 13  # of the full encoder: what it reads, and what each of 12 layers makes of it
CLIP_L = "conditioner.embedders.0.transformer."
CLIP_G = "conditioner.embedders.1.model."
UNET = "model.diffusion_model."
VAE = "first_stage_model."
CLIP_SD15 = "cond_stage_model.transformer."
PAIRED = "BESIDE_PAIRED"  # set where both trainers draw the same numbers
ALIKE = "BESIDE_ALIKE"  # set where the rival is to compute what this project computes differently on purpose


# ---- the sizes of a file


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a .safetensors file by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}


def count(shapes: Shapes, pattern: str) -> int:
    matches = (re.match(pattern, name) for name in shapes)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def flux_sizes(shapes: Shapes) -> dict[str, Any]:
    """FLUX.1's transformer, by the names of sd-scripts' FluxParams."""
    hidden, channels = shapes["img_in.weight"]
    head = shapes["double_blocks.0.img_attn.norm.key_norm.scale"][0]
    first = 4 * max(head // 32, 1)
    return {
        "in_channels": channels,
        "vec_in_dim": shapes["vector_in.in_layer.weight"][1],
        "context_in_dim": shapes["txt_in.weight"][1],
        "hidden_size": hidden,
        "mlp_ratio": shapes["double_blocks.0.img_mlp.0.weight"][0] / hidden,
        "num_heads": hidden // head,
        "depth": count(shapes, r"double_blocks\.(\d+)\."),
        "depth_single_blocks": count(shapes, r"single_blocks\.(\d+)\."),
        "axes_dim": [first, (head - first) // 2, (head - first) // 2],
    }


def autoencoder_sizes(shapes: Shapes, prefix: str = "") -> dict[str, Any]:
    """An autoencoder, by the names of sd-scripts' AutoEncoderParams."""
    first = shapes[f"{prefix}encoder.conv_in.weight"][0]
    levels = count(shapes, rf"{re.escape(prefix)}encoder\.down\.(\d+)\.")
    widths = [shapes[f"{prefix}encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)]
    return {
        "ch": first,
        "ch_mult": [width // first for width in widths],
        "z_channels": shapes[f"{prefix}decoder.conv_in.weight"][1],
    }


def clip_sizes(shapes: Shapes, prefix: str = "") -> dict[str, Any]:
    """A CLIP text encoder by transformers' names, as a CLIPTextConfig has it."""
    words, width = shapes[f"{prefix}text_model.embeddings.token_embedding.weight"]
    layer = f"{prefix}text_model.encoder.layers."
    return _clip(words, width, shapes[f"{layer}0.mlp.fc1.weight"][0], count(shapes, rf"{re.escape(layer)}(\d+)\."))


def open_clip_sizes(shapes: Shapes, prefix: str) -> dict[str, Any]:
    """A CLIP text encoder by open_clip's names, as a CLIPTextConfig has it."""
    words, width = shapes[f"{prefix}token_embedding.weight"]
    layer = f"{prefix}transformer.resblocks."
    return _clip(words, width, shapes[f"{layer}0.mlp.c_fc.weight"][0], count(shapes, rf"{re.escape(layer)}(\d+)\."))


def _clip(words: int, width: int, inner: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // CLIP_HEAD),
        "projection_dim": width,
    }


def t5_sizes(shapes: Shapes) -> dict[str, Any]:
    """A T5 encoder, as a T5Config has it."""
    words, width = shapes["shared.weight"]
    block = "encoder.block.0.layer."
    heads = shapes[f"{block}0.SelfAttention.relative_attention_bias.weight"][1]
    layers = count(shapes, r"encoder\.block\.(\d+)\.")
    return {
        "vocab_size": words,
        "d_model": width,
        "d_ff": shapes[f"{block}1.DenseReluDense.wi_0.weight"][0],
        "d_kv": shapes[f"{block}0.SelfAttention.q.weight"][0] // heads,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
    }


def unet_sizes(shapes: Shapes) -> dict[str, Any]:
    """SDXL's U-Net: widths and depths (transformer blocks) of its three levels, and what it reads."""
    firsts = ("0.0.weight", "4.0.out_layers.3.weight", "7.0.out_layers.3.weight")
    starts = [f"{UNET}input_blocks.{name}" for name in firsts]
    attention = [rf"{re.escape(UNET)}{name}" for name in (r"input_blocks\.4", r"input_blocks\.7", "middle_block")]
    depths = [count(shapes, rf"{block}\.1\.transformer_blocks\.(\d+)\.") for block in attention]
    return {
        "widths": [shapes[name][0] for name in starts],
        "depths": [0, *depths[:2]],
        "middle": depths[2],
        "text": shapes[f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"][1],
        "time": shapes[f"{UNET}time_embed.0.weight"][0],
        "pooled": shapes[f"{UNET}label_emb.0.0.weight"][1],
    }


def sd15_widths(shapes: Shapes) -> tuple[int, ...]:
    """The widths of the four levels of SD 1.5's U-Net."""
    blocks = (1, 4, 7, 10)
    return tuple(shapes[f"{UNET}input_blocks.{block}.0.out_layers.3.weight"][0] for block in blocks)


# ---- setting them in sd-scripts


def sd_scripts_module(name: str) -> Any:
    return importlib.import_module(f"library.{name}")


def set_flux_sizes(files: Mapping[str, Any]) -> None:
    """Set the sizes of FLUX.1's files in sd-scripts' modules."""
    flux_models, flux_utils = sd_scripts_module("flux_models"), sd_scripts_module("flux_utils")

    published = flux_models.configs["dev"]
    for name, value in flux_sizes(shapes_of(Path(files["pretrained_model_name_or_path"]))).items():
        setattr(published.params, name, value)
    for name, value in autoencoder_sizes(shapes_of(Path(files["ae"]))).items():
        setattr(published.ae_params, name, value)
    flux_utils.CLIPConfig = _changed(flux_utils.CLIPConfig, clip_sizes(shapes_of(Path(files["clip_l"]))))
    flux_utils.T5Config = _changed(flux_utils.T5Config, t5_sizes(shapes_of(Path(files["t5xxl"]))))


def _changed(kind: Callable[..., Any], sizes: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda **usual: kind(**{**usual, **sizes})


def set_sdxl_sizes(files: Mapping[str, Any]) -> None:
    """Set the sizes of SDXL's file in sd-scripts' modules."""
    model_util, sdxl_model_util, sdxl_original_unet = (
        sd_scripts_module("model_util"),
        sd_scripts_module("sdxl_model_util"),
        sd_scripts_module("sdxl_original_unet"),
    )

    shapes = shapes_of(Path(files["pretrained_model_name_or_path"]))
    encoders = {768: clip_sizes(shapes, CLIP_L), 1280: open_clip_sizes(shapes, CLIP_G)}
    kind = sdxl_model_util.CLIPTextConfig
    sdxl_model_util.CLIPTextConfig = lambda **usual: kind(**{**usual, **encoders[usual["hidden_size"]]})
    open_file = sdxl_model_util.load_models_from_sdxl_checkpoint

    def opened(*given: Any, **named: Any) -> tuple[Any, ...]:
        clip_l, *others = open_file(*given, **named)
        clip_l.register_forward_hook(count_as_full)
        return clip_l, *others

    sdxl_model_util.load_models_from_sdxl_checkpoint = opened
    vae, unet = autoencoder_sizes(shapes, VAE), unet_sizes(shapes)
    model_util.VAE_PARAMS_CH, model_util.VAE_PARAMS_CH_MULT = vae["ch"], vae["ch_mult"]
    sdxl_original_unet.MODEL_CHANNELS = unet["widths"][0]
    sdxl_original_unet.TIME_EMBED_DIM = unet["time"]
    sdxl_original_unet.ADM_IN_CHANNELS = unet["pooled"]
    sdxl_original_unet.SdxlUNet2DConditionModel.__init__ = _unet_init(sdxl_original_unet, unet)


def set_sd15_sizes(files: Mapping[str, Any]) -> None:
    """Set the sizes of SD 1.5's file in sd-scripts' modules."""
    model_util, original_unet = sd_scripts_module("model_util"), sd_scripts_module("original_unet")

    shapes = shapes_of(Path(files["pretrained_model_name_or_path"]))
    vae, widths = autoencoder_sizes(shapes, VAE), sd15_widths(shapes)
    text = clip_sizes(shapes, CLIP_SD15)
    model_util.VAE_PARAMS_CH, model_util.VAE_PARAMS_CH_MULT = vae["ch"], vae["ch_mult"]
    model_util.UNET_PARAMS_CONTEXT_DIM = text["hidden_size"]
    model_util.CLIPTextConfig = _changed(model_util.CLIPTextConfig, text)
    original_unet.BLOCK_OUT_CHANNELS, original_unet.TIMESTEP_INPUT_DIM = widths, widths[0]
    original_unet.TIME_EMBED_DIM = 4 * widths[0]


def count_as_full(_module: Any, _given: Any, output: Any) -> None:
    """Let the hidden states of a CLIP-L of few layers be as many as those of the full one, which are counted from the
    first: number 11 is the last but one."""
    states = output.get("hidden_states")
    if states is not None:
        output["hidden_states"] = (states[0],) * (CLIP_L_STATES - len(states)) + tuple(states)


def _unet_init(blocks: Any, sizes: Mapping[str, Any]) -> Callable[..., None]:
    """The constructor of a U-Net with three levels of any widths and depths, of sd-scripts' own layers: its own
    constructor doubles the width from level to level and has 0, 2 and 10 transformer blocks in them."""
    from torch import nn

    widths, levels = sizes["widths"], [*zip(sizes["widths"], sizes["depths"], strict=True)]

    def attention(width: int, depth: int) -> list[Any]:
        heads = max(1, width // CLIP_HEAD)
        block = blocks.Transformer2DModel(
            num_attention_heads=heads,
            attention_head_dim=width // heads,
            in_channels=width,
            num_transformer_layers=depth,
            use_linear_projection=True,
            cross_attention_dim=sizes["text"],
        )
        return [block]

    def block(reads: int, width: int, depth: int) -> list[Any]:
        residual = blocks.ResnetBlock2D(in_channels=reads, out_channels=width)
        return [residual, *(attention(width, depth) if depth else [])]

    def init(self: Any, **_: Any) -> None:
        nn.Module.__init__(self)
        self.in_channels, self.out_channels = blocks.IN_CHANNELS, blocks.OUT_CHANNELS
        self.model_channels, self.time_embed_dim = blocks.MODEL_CHANNELS, blocks.TIME_EMBED_DIM
        self.adm_in_channels, self.gradient_checkpointing = blocks.ADM_IN_CHANNELS, False
        wide = self.time_embed_dim
        embedded = [
            nn.Sequential(nn.Linear(reads, wide), nn.SiLU(), nn.Linear(wide, wide))
            for reads in (self.model_channels, self.adm_in_channels)
        ]
        self.time_embed, self.label_emb = embedded[0], nn.Sequential(embedded[1])
        first = nn.Conv2d(self.in_channels, widths[0], kernel_size=3, padding=1)
        down: list[nn.Module] = [nn.Sequential(first)]
        stored, now = [widths[0]], widths[0]
        for level, (width, depth) in enumerate(levels):
            for _number in range(2):
                down.append(nn.ModuleList(block(now, width, depth)))
                stored.append(now := width)
            if level < len(levels) - 1:
                down.append(nn.Sequential(blocks.Downsample2D(channels=width, out_channels=width)))
                stored.append(width)
        middle = [*block(now, now, 0), *attention(now, sizes["middle"]), *block(now, now, 0)]
        up = []
        for level, (width, depth) in reversed([*enumerate(levels)]):
            for number in range(3):
                layers = block(now + stored.pop(), width, depth)
                now = width
                if number == 2 and level:
                    layers.append(blocks.Upsample2D(channels=width, out_channels=width))
                up.append(nn.ModuleList(layers))
        self.input_blocks, self.middle_block = nn.ModuleList(down), nn.ModuleList(middle)
        self.output_blocks = nn.ModuleList(up)
        last = nn.Conv2d(widths[0], self.out_channels, 3, padding=1)
        self.out = nn.ModuleList([blocks.GroupNorm32(32, widths[0]), nn.SiLU(), last])

    return init


# ---- what else differs from its own start


def stub_missing() -> None:
    """Stand-ins for torchvision and OpenCV where they are missing: the pictures have the right size already."""
    if importlib.util.find_spec("torchvision") is None:
        sys.modules["torchvision"] = module_stub("torchvision", transforms=_transforms())
        sys.modules["torchvision.transforms"] = sys.modules["torchvision"].transforms
    if importlib.util.find_spec("cv2") is None:
        names = ("NEAREST", "LINEAR", "CUBIC", "AREA", "LANCZOS4", "LINEAR_EXACT", "NEAREST_EXACT")
        sys.modules["cv2"] = module_stub("cv2", **{f"INTER_{name}": number for number, name in enumerate(names)})


def module_stub(name: str, **holds: Any) -> Any:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # where packages look whether it is there
    module.__dict__.update(holds)
    return module


def _transforms() -> Any:
    import numpy as np
    import torch

    return module_stub(
        "torchvision.transforms",
        ToTensor=lambda: lambda image: torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1) / 255.0,
        Normalize=lambda mean, std: lambda pixels: (pixels - mean[0]) / std[0],
        Compose=lambda steps: lambda value: [value := step(value) for step in steps][-1],
    )


def log_losses(recorder: Any, path: Path) -> None:
    """Write the loss of each step as it is noted; its progress bar shows the mean of an epoch alone."""
    add, steps = recorder.add, iter(range(1, sys.maxsize))

    def logged(self: Any, *, epoch: int, step: int, loss: float) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": next(steps), "loss": loss}) + "\n")
        add(self, epoch=epoch, step=step, loss=loss)

    recorder.add = logged


def draw_samples_on_host(module: Any) -> None:
    """Draw the noise of sample images in float32 on the host, as this project's trainer does, whatever the device and
    the model's type: then one seed means the same picture in both."""
    sample = module.sample_image_inference

    def sampled(*given: Any, **named: Any) -> Any:
        with host_noise():
            return sample(*given, **named)

    module.sample_image_inference = sampled


@contextlib.contextmanager
def host_noise() -> Iterator[None]:
    """torch.randn on the host: from the seed of its generator, else from the host's own random state."""
    import torch

    randn = torch.randn

    def drawn(*size: Any, generator: Any = None, device: Any = None, dtype: Any = None, **_: Any) -> Any:
        own = None if generator is None else torch.Generator().manual_seed(generator.initial_seed())
        return randn(*size, generator=own, dtype=torch.float32).to(device=device, dtype=dtype)

    torch.randn = drawn
    try:
        yield
    finally:
        torch.randn = randn


def main(arguments: list[str]) -> None:
    """Train as the script of that name does."""
    folder, script, losses, *options = arguments
    sys.path.insert(0, folder)
    stub_missing()
    config = tomllib.loads(Path(options[options.index("--config_file") + 1]).read_text(encoding="utf-8"))
    flux_train_utils, train_util = sd_scripts_module("flux_train_utils"), sd_scripts_module("train_util")

    module = importlib.import_module(script)
    if script.startswith("flux"):
        set_flux_sizes(config)
        draw_samples_on_host(flux_train_utils)
        train = module.FluxNetworkTrainer().train
    elif script.startswith("sdxl"):
        set_sdxl_sizes(config)
        draw_samples_on_host(train_util)
        train = module.SdxlNetworkTrainer().train
    else:
        set_sd15_sizes(config)
        train = module.NetworkTrainer().train if script == "train_network" else module.train
    log_losses(train_util.LossRecorder, Path(losses))
    if PAIRED in os.environ:
        import paired_draws

        paired_draws.install()
    sys.argv = [script, *options]  # which its reading of the TOML parses again
    parser = module.setup_parser()
    asked = parser.parse_args()
    train_util.verify_command_line_training_args(asked)
    train(train_util.read_config_from_file(asked, parser))


if __name__ == "__main__":
    main(sys.argv[1:])
