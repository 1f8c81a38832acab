"""The LoRA tools tab: the commands of `kohya tools` as forms, each run in a separate process."""

import gradio as gr

from kohya_gui.i18n.sentences import data
from kohya_gui.tools import commands
from library import families
from library.config.problems import Message
from library.tools.forms import FORMS


class ToolsTab:
    """The tab. Create it inside `gr.Blocks`; commands.py and commands.js do all the work."""

    def __init__(self) -> None:
        gr.HTML(markup(), js_on_load="window.kohya.mountCommands(element)", apply_default_css=False)


def markup() -> str:
    """The tab as HTML."""
    template = "For finished LoRA files of {families}. Results are new files: nothing is ever overwritten."
    about = Message(template, families=families.titles())
    return (
        f'<div class="tools settings"><p class="lead"{data(about)}>{about}</p><div class="card">'
        f'{commands.markup(FORMS)}<div class="bar-of"><button '
        'type="button" class="go" data-go>Run</button></div></div><div class="said-of" aria-live="polite"></div>'
        '<div class="jobs"></div></div>'
    )
