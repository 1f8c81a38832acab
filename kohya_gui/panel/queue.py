"""The Queue tab: waiting, active and ended entries. All of it is in the queue's file; queue.js shows it."""

import gradio as gr

MARKUP = """<div class="queue"><div class="lead"><p class="how" role="status">Reading the queue</p>
<div class="switches"></div></div><ul class="devices" aria-label="GPUs"></ul>
<ol class="entries"></ol><div class="answer" role="status"></div></div>"""


class QueueTab:
    """The tab's place on the page. Create it inside `gr.Blocks`."""

    def __init__(self) -> None:
        gr.HTML(MARKUP, js_on_load="window.kohya.mountQueue(element)", apply_default_css=False)
