"""Training of image models: configs, families, data, learners, the step, and the runs it leaves behind."""

import os

# Why: docs/decisions/2026-11-20-onnx-runtime-telemetry.md
# Where ONNX Runtime is installed, torch.compile loads it as well, and it reports its use to its makers unless told not
# to before it is loaded. Nothing of ours reports to anyone.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
