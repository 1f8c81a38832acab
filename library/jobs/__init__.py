"""Jobs: commands that the page runs as separate processes, and their options as forms."""
