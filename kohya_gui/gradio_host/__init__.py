"""What hosts the page in Gradio, and works around it: its import, routes, scripts and styles, and its theme."""
