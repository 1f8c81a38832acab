"""Jobs: commands that the page runs as processes of their own, and their options as forms."""
