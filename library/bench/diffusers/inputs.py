"""The inputs of a transformer of diffusers, guessed from its parameters' names and the entries of its config.

Names do not reveal whether a model reads an image as a grid, a row of tokens or frames of a video; each layout is tried
on a copy without memory.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from library.compiler.torch_private import DataDependentOutputException, DynamicOutputShapeException
from library.config.problems import ConfigError
from library.measuring import shapes

FACTOR = 8  # pixels of an image for each of its latents
TEXT_WIDTHS = (
    "caption_channels",
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "in_text_dim",
    "context_in_dim",
    "cap_feat_dim",
    "cross_attention_dim",
)
POOLED_WIDTHS = ("pooled_projection_dim", "pooled_dim", "in_text_dim2", "text_emb_dim")
PACKED = ("img_ids", "img_shapes", "num_frames")  # parameters of models that read images as a row of tokens
LATENTS = ("hidden_states", "sample", "x")
TRIED = 256  # pixels of the images that layouts are tried with
# Raised by models that read values, which a copy without memory lacks.
UNTRIED = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class InputContext:
    """What the inputs of one call depend on."""

    config: Mapping[str, Any]
    batch: int
    text: int  # tokens of a caption
    frames: int
    side: int  # of the latents
    layout: str
    device: torch.device

    @property
    def halved(self) -> int:
        """Return the tokens along a side of the image."""
        return (
            self.side // _first_number(self.config.get("patch_size"), 2) if self.layout != "tokens" else self.side // 2
        )

    @property
    def tokens(self) -> int:
        frames = self.frames if self.layout in ("video", "frames", "last", "tokens") else 1
        return frames * self.halved**2

    def normal(self, *size: int | None) -> Tensor | None:
        # None if a size is unknown.
        return None if None in size else torch.randn(*size, device=self.device)  # type: ignore[arg-type]

    def width(self, *names: str, number: int = 0) -> int | None:
        entry = next((self.config[name] for name in names if self.config.get(name)), None)
        return entry[min(number, len(entry) - 1)] if isinstance(entry, list | tuple) else entry

    def mask(self) -> Tensor:
        # All words of the captions count.
        return torch.ones(self.batch, self.text, dtype=torch.bool, device=self.device)

    def latents(self) -> Any:
        """Return the noised image in the layout that the model reads."""
        n, c, f, s = self.batch, self.width("in_channels", "in_visual_dim") or 16, self.frames, self.side
        sizes = {
            "image": (n, c, s, s),
            "tokens": (n, self.tokens, c),
            "video": (n, c, f, s, s),
            "frames": (n, f, c, s, s),
            "last": (n, f, s, s, c),
        }
        if self.layout == "list":
            return [torch.randn(c, f, s, s, device=self.device) for _ in range(n)]
        return self.normal(*sizes[self.layout])

    def rotary(self) -> Any:
        """Return the rotary embedding of queries and keys if the model does not compute it itself."""
        if not self.config.get("use_rotary_positional_embeddings"):
            return None
        tokens = self.tokens // _first_number(self.config.get("patch_size_t"), 1)
        return tuple(self.normal(tokens, self.width("attention_head_dim")) for _ in range(2))

    def control(self) -> Any:
        """Return control images in the layout of the latents."""
        channels = self.width("vace_in_channels", "in_channels")
        return replace(self, config={**self.config, "in_channels": channels}).latents()


def _first_number(value: Any, otherwise: int) -> int:
    return int((value[-1] if isinstance(value, list | tuple) else value) or otherwise)


def _axes(at: InputContext) -> int:
    return len(at.config.get("axes_dims_rope") or (0, 0, 0))


def _labels(at: InputContext) -> Tensor | None:
    if at.config.get("norm_type") != "ada_norm_zero":
        return None
    return torch.zeros(at.batch, dtype=torch.long, device=at.device)


def _llama(at: InputContext) -> Tensor | None:
    layers = max(at.config.get("llama_layers") or (0,)) + 1
    return at.normal(layers, at.batch, at.text, at.width("caption_channels", number=1))


def _time(at: InputContext) -> Tensor:
    return torch.rand(at.batch, device=at.device)


USUAL_INPUTS: Mapping[str, Callable[[InputContext], Any]] = {
    **dict.fromkeys(LATENTS, InputContext.latents),
    "encoder_hidden_states": lambda at: at.normal(at.batch, at.text, at.width(*TEXT_WIDTHS)),
    "encoder_hidden_states_2": lambda at: at.normal(at.batch, at.text, at.width("text_embed_2_dim")),
    "encoder_attention_mask_2": lambda at: at.mask() if at.width("text_embed_2_dim") else None,
    "encoder_hidden_states_t5": lambda at: at.normal(
        at.batch, at.text, at.width("text_embed_dim_t5", "caption_channels")
    ),
    "encoder_hidden_states_llama3": _llama,
    "cap_feats": lambda at: [torch.randn(at.text, at.width("cap_feat_dim") or 1, device=at.device)] * at.batch,
    "pooled_projections": lambda at: at.normal(at.batch, at.width(*POOLED_WIDTHS)),
    "pooled_embeds": lambda at: at.normal(at.batch, at.width(*POOLED_WIDTHS)),
    "encoder_hidden_states_image": lambda at: at.normal(at.batch, 257, at.width("image_dim")),
    "image_embeds": lambda at: at.normal(at.batch, 729, at.width("image_embed_dim", "image_proj_dim")),
    "control_hidden_states": InputContext.control,
    **dict.fromkeys(("timestep", "timesteps", "t"), _time),
    "guidance": lambda at: _time(at) if at.config.get("guidance_embeds") else None,
    "img_ids": lambda at: at.normal(at.tokens, _axes(at)),
    "txt_ids": lambda at: at.normal(at.text, _axes(at)),
    "img_shapes": lambda at: [[(at.frames, at.halved, at.halved)]] * at.batch,
    "class_labels": _labels,
    "added_cond_kwargs": lambda at: {"resolution": at.normal(at.batch, 2), "aspect_ratio": at.normal(at.batch, 1)},
    **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda at: at.normal(at.batch, 2)),
    "image_rotary_emb": InputContext.rotary,
    "visual_rope_pos": lambda at: [torch.arange(n, device=at.device) for n in (at.frames, at.halved, at.halved)],
    "text_rope_pos": lambda at: torch.arange(at.text, device=at.device),
    "num_frames": lambda at: at.frames,
    **dict.fromkeys(("height", "width"), lambda at: at.halved),
    "return_dict": lambda at: False,
}
# Passed only if a model requires them, as most calls leave them out.
NEEDED: Mapping[str, Callable[[InputContext], Any]] = dict.fromkeys(
    ("encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"), InputContext.mask
)


class DiffusersInputs:
    """The inputs of a class of networks; `given_shapes` are shapes by name, and `text_length`."""

    def __init__(self, cls: type[Any], given_shapes: Mapping[str, Any], batch: int, frames: int) -> None:
        self.cls, self.given_shapes, self.batch, self.frames = cls, dict(given_shapes), batch, frames
        self.parameters = {n: p for n, p in inspect.signature(cls.forward).parameters.items() if n != "self"}
        self.text = int(self.given_shapes.pop("text_length", 128))
        self.layout = ""
        if unknown := sorted(set(self.given_shapes) - set(self.parameters)):
            raise ConfigError(
                "--input {name}: {network} is called with {parameters}",
                name=unknown[0],
                network=cls.__name__,
                parameters=", ".join(self.parameters),
            )

    def settle(self, model: nn.Module) -> None:
        """Find the order of dimensions in which the model reads images. Raises ConfigError if it reads none."""
        errors = []
        for layout in self._layouts(model):
            self.layout = layout
            if not (error := self._tried(model)):
                return
            if isinstance(error, ConfigError):
                raise error
            errors.append(error)
        why = f"{type(errors[0]).__name__}: {str(errors[0]).partition(chr(10))[0][:160]}"
        raise ConfigError(
            "{network} cannot be called with what its parameters' names suggest ({why}): check its config, "
            "or give shapes with --input NAME=1,16,64 for {parameters}",
            network=self.cls.__name__,
            why=why,
            parameters=", ".join(self.parameters),
        )

    def of(self, model: nn.Module, resolution: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a call. Raises ConfigError for one whose shape is unknown."""
        config: Any = model.config
        at = InputContext(config, self.batch, self.text, self.frames, resolution // FACTOR, self.layout, device)
        # 8-bit weights are stored in another type than they are computed in.
        parameter = next(p for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
        return {name: _cast_input(value, parameter.dtype) for name, value in self._each(at)}

    def _each(self, at: InputContext) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.parameters.items():
            needed = parameter.default is inspect.Parameter.empty and parameter.kind < 2  # kinds below 2 are positional
            usual = USUAL_INPUTS.get(name) or (NEEDED.get(name) if needed else None)
            if name in ("img_ids", "img_shapes") and at.layout != "tokens" and not needed:
                continue
            if name in self.given_shapes:
                yield name, _shaped(name, self.given_shapes[name], at.device)
            elif usual and (value := usual(at)) is not None:
                yield name, value
            elif needed:
                raise ConfigError(
                    "{network} is called with {name}, whose shape is not known here: "
                    "give it with --input {name}=1,16,64 (its sizes)",
                    network=self.cls.__name__,
                    name=name,
                )

    def _layouts(self, model: nn.Module) -> list[str]:
        """Return all layouts, the likely ones first."""
        patch = getattr(model.config, "patch_size", None)
        video = "3D" in self.cls.__name__ or (isinstance(patch, list | tuple) and len(patch) == 3)
        first = "tokens" if any(name in self.parameters for name in PACKED) else "video" if video else "image"
        alternatives = ("video" if video else "image", "frames", "last", "tokens", "image", "video")
        return list(dict.fromkeys([first, *(["list"] if "x" in self.parameters else []), *alternatives]))

    def _tried(self, model: nn.Module) -> Exception | None:
        world, device = shapes.FakeTensorContext(), torch.device("cpu")
        copied = world.copy(model, device, torch.float32)
        try:
            with world.inside(), torch.no_grad():
                copied(**self.of(copied, TRIED, device))
        except UNTRIED:
            return None
        except Exception as error:  # a foreign class may raise anything for a wrong shape
            return error
        return None


def _shaped(name: str, size: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an input of a given shape, of the type that its name suggests."""
    if "mask" in name:
        return torch.ones(size, dtype=torch.bool, device=device)
    if name.endswith(("ids", "id", "labels", "indices")) and name not in ("img_ids", "txt_ids"):
        return torch.zeros(size, dtype=torch.long, device=device)
    return torch.randn(size, device=device)


def _cast_input(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast_input(part, dtype) for part in value]
    large = isinstance(value, Tensor) and value.ndim > 1 and value.is_floating_point()
    return value.to(dtype) if large else value
