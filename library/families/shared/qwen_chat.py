"""The chat in which several models show a caption to a text encoder of Qwen's. Needs no torch."""

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
BEHIND = "<|im_end|>\n<|im_start|>assistant\n"
