"""The local page."""

import os
import sys

from kohya_gui.server.gradio_import import LightGradio

# Gradio has some twenty variables that open doors: public links, folders to serve, a code editor. None takes effect.
for _name in [name for name in os.environ if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
    del os.environ[_name]
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
sys.meta_path.insert(0, LightGradio())
