"""The local page."""

import os
import sys

from kohya_gui.gradio_host.gradio_import import LightGradio

# Gradio reads some twenty variables that open public links, serve folders or start a code editor: remove them all.
for _name in [name for name in os.environ if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
    del os.environ[_name]
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
sys.meta_path.insert(0, LightGradio())
