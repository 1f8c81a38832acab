"""The page inside Gradio, and workarounds for it: import, routes, scripts, styles and theme."""
