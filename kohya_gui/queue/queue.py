"""The queue on the page. All of it is in the queue's file; queue.js shows it by the API."""

import gradio as gr

MARKUP = """<div class="queue"><div class="lead"><h2>Queue</h2><p class="how" role="status">Reading the queue</p>
<div class="switches"></div></div><ul class="devices" aria-label="GPUs"></ul>
<div class="answer" role="status"></div>
<p class="keys" id="queue-keys" hidden>Drag an entry by its handle, or press Alt with an arrow key in it.</p>
<ol class="entries" aria-label="Running and waiting"></ol>
<section class="history" hidden><h3>History</h3><ol class="ended"></ol></section></div>"""


class QueueTab:
    """The queue's place on the page. Create it inside `gr.Blocks`."""

    def __init__(self) -> None:
        gr.HTML(MARKUP, js_on_load="window.kohya.mountQueue(element)", apply_default_css=False)
