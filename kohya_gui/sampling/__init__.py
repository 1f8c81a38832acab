"""The tab for trying LoRA files."""
