"""What makes a denoiser fit: storage, swapping, checkpointing, attention kernels, and the order they are applied in."""

from library.memory.prepare import blocks_by_class as repeated
from library.memory.prepare import compiles_size_by_size as size_by_size
from library.memory.prepare import prepare_denoiser as prepare
from library.memory.prepare import prepare_encoders

__all__ = ["prepare", "prepare_encoders", "repeated", "size_by_size"]
