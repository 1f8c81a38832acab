"""Which tensor of a network contradicts the shapes of its others, from names and shapes alone.

Sizes are letters, whose values the tensors of a network share: capitals in the whole network, the others within one
block. Building the networks would tell more, but importing their packages takes seconds.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from library.config.problems import Message
from library.families.facts import Shapes

NORM = r"(weight|bias|gamma)"
# A pattern of names, whose first group is the block, and the first sizes of its tensors.
SIZES_BY_NAME = (
    # CLIP
    (r"(text_model\.)embeddings\.(token|position)_embedding\.weight", "- W"),
    (r"(text_model\..*layer_norm)\d?\.(weight|bias)", "W"),
    (r"(text_model\.encoder\.layers\.\d+\.self_attn\.)\w+_proj\.weight", "W W"),
    (r"(text_model\.encoder\.layers\.\d+\.self_attn\.)\w+_proj\.bias", "W"),
    (r"(text_model\.encoder\.layers\.\d+\.mlp\.)fc1\.weight", "F W"),
    (r"(text_model\.encoder\.layers\.\d+\.mlp\.)fc1\.bias", "F"),
    (r"(text_model\.encoder\.layers\.\d+\.mlp\.)fc2\.weight", "W F"),
    (r"(text_model\.encoder\.layers\.\d+\.mlp\.)fc2\.bias", "W"),
    (r"()text_projection\.weight", "- W"),
    # T5
    (r"()(shared|encoder\.embed_tokens)\.weight", "- W"),
    (r"(encoder\..*layer_norm)\.weight", "W"),
    (r"(encoder\.block\.\d+\.layer\.0\.SelfAttention\.)[qkv]\.weight", "I W"),
    (r"(encoder\.block\.\d+\.layer\.0\.SelfAttention\.)o\.weight", "W I"),
    (r"(encoder\.block\.\d+\.layer\.1\.DenseReluDense\.)wi(_[01])?\.weight", "F W"),
    (r"(encoder\.block\.\d+\.layer\.1\.DenseReluDense\.)wo\.weight", "W F"),
    # Qwen and Mistral
    (r"()embed_tokens\.weight", "- W"),
    (r"()norm\.weight", "W"),
    (r"(layers\.\d+\.)\w+_layernorm\.weight", "W"),
    (r"(layers\.\d+\.)self_attn\.q_proj\.weight", "Q W"),
    (r"(layers\.\d+\.)self_attn\.[kv]_proj\.weight", "K W"),
    (r"(layers\.\d+\.)self_attn\.q_proj\.bias", "Q"),
    (r"(layers\.\d+\.)self_attn\.[kv]_proj\.bias", "K"),
    (r"(layers\.\d+\.)self_attn\.o_proj\.weight", "W Q"),
    (r"(layers\.\d+\.)self_attn\.[qk]_norm\.weight", "H"),
    (r"(layers\.\d+\.)mlp\.(gate|up)_proj\.weight", "F W"),
    (r"(layers\.\d+\.)mlp\.down_proj\.weight", "W F"),
    # U-Nets and VAEs
    (rf"(.*resnets\.\d+\.)norm1\.{NORM}", "i"),
    (r"(.*resnets\.\d+\.)conv1\.weight", "o i"),
    (r"(.*resnets\.\d+\.)time_emb_proj\.weight", "o T"),
    (r"(.*resnets\.\d+\.)(time_emb_proj|conv1|conv2|conv_shortcut)\.bias", "o"),
    (rf"(.*resnets\.\d+\.)norm2\.{NORM}", "o"),
    (r"(.*resnets\.\d+\.)conv2\.weight", "o o"),
    (r"(.*resnets\.\d+\.)conv_shortcut\.weight", "o i"),
    (r"(.*(?:down|up)samplers\.0\.)conv\.weight", "c c"),
    (r"(.*(?:down|up)samplers\.0\.)conv\.bias", "c"),
    (r"((?:encoder\.|decoder\.)?conv_in\.)(weight|bias)", "c"),
    (rf"((?:encoder\.|decoder\.)?)(conv_)?norm_out\.{NORM}", "c"),
    (r"((?:encoder\.|decoder\.)?)conv_out\.weight", "- c"),
    (r"(time_|add_)embedding\.linear_[12]\.bias", "T"),
    (r"(time_|add_)embedding\.linear_1\.weight", "T -"),
    (r"(time_|add_)embedding\.linear_2\.weight", "T T"),
    # attention, of U-Nets with transformer blocks and of VAEs without
    (rf"(.*attentions\.\d+\.)(norm|group_norm)\.{NORM}", "c"),
    (r"(.*attentions\.\d+\.)(proj_in|proj_out|to_q|to_k|to_v|to_out\.0|proj)\.weight", "c c"),
    (r"(.*attentions\.\d+\.)(proj_in|proj_out|to_q|to_k|to_v|to_out\.0|proj)\.bias", "c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.norm\d\.(weight|bias)", "c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.(attn1\.to_[qkv]|attn2\.to_q)\.weight", "c c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.attn2\.to_[kv]\.weight", "c X"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.attn\d\.to_out\.0\.weight", "c c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.(attn\d\.to_out\.0|ff\.net\.2)\.bias", "c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.ff\.net\.0\.proj\.weight", "g c"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.ff\.net\.0\.proj\.bias", "g"),
    (r"(.*attentions\.\d+\.)transformer_blocks\.\d+\.ff\.net\.2\.weight", "c h"),
)
TEXT_WIDTH = "X"  # the size of texts in a U-Net's cross-attention
Size = tuple[str, str]  # block, or "" for the whole network, and letter
_PATTERNS = tuple((re.compile(pattern), sizes.split()) for pattern, sizes in SIZES_BY_NAME)


def misshapen(path: Path, shapes: Shapes) -> Message | None:
    """Return which tensor of a network does not fit most others, with the fix; None if all do."""
    sized = dict(_sized(shapes))
    usual = usual_sizes(sized, shapes)
    for name, sizes in sized.items():
        pairs = [*zip(sizes, shapes[name], strict=False)]
        if len(pairs) < len(sizes) or any(value != usual[size] for size, value in pairs if size[1] != "-"):
            return Message(
                "{path} is damaged: {tensor} has the shape {shape}, which does not fit the tensors beside it; download "
                "it again",
                path=path,
                tensor=name,
                shape=list(shapes[name]),
            )
    return None


def text_width(shapes: Shapes) -> int:
    """Return the channels of the text that a U-Net attends to; 0 for none."""
    return usual_sizes(dict(_sized(shapes)), shapes).get(("", TEXT_WIDTH), 0)


def usual_sizes(sized: dict[str, list[Size]], shapes: Shapes) -> dict[Size, int]:
    """Return the most frequent value of each size, so that one wrong tensor does not make others wrong."""
    counts: dict[Size, Counter[int]] = {}
    for name, sizes in sized.items():
        for size, value in zip(sizes, shapes[name], strict=False):
            counts.setdefault(size, Counter())[value] += 1
    return {size: values.most_common(1)[0][0] for size, values in counts.items()}


def _sized(shapes: Shapes) -> Iterator[tuple[str, list[Size]]]:
    """Yield the sizes of each tensor that the table names."""
    for name in shapes:
        for pattern, letters in _PATTERNS:
            if match := pattern.fullmatch(name):
                yield name, [("" if letter.isupper() else match[1], letter) for letter in letters]
                break
