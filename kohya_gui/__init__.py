"""The local page."""

import os

# Gradio reads some twenty variables that open doors: public links, folders to serve, a code editor. None counts here.
for _name in [name for name in os.environ if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
    del os.environ[_name]
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
