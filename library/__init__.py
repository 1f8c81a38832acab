"""Training of image models: configs, families, data, methods, the training loop, and its runs."""

import os

# Why: docs/decisions/2026-11-20-onnx-runtime-telemetry.md
# torch.compile also loads an installed ONNX Runtime, which sends telemetry unless disabled before it is loaded. This
# project sends none.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
