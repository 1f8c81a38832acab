// The page's script: every tab, and the functions that Gradio's handlers call.
import { mount as mountImages } from "./dataset/images.js";
import { mount as mountSampling } from "./sampling/sampling.js";
import { buildAhead, mountTraining } from "./form/tab.js";
import "./form/adapter.js";
import "./form/datasets.js";
import "./form/datasets_sending.js";
import "./form/dropped.js";
import "./form/gpus.js";
import "./form/labels.js";
import "./form/live.js";
import "./form/print_command.js";
import "./form/prompts.js";
import "./form/recipes.js";
import "./form/search.js";
import "./form/section_summary.js";
import "./form/shown.js";
import "./form/start_preset.js";
import { mountHeader } from "./look/look.js";
import { mount as mountLab } from "./lab/lab.js";
import "./models/models.js";
import "./panel/first_steps.js";
import { mount as mountPanel } from "./panel/monitor.js";
import "./panel/run_buttons.js";
import "./panel/samples.js";
import { mount as mountQueue } from "./queue/queue.js";
import { mount as mountRuns } from "./runs/room.js";
import "./server/allowed_folders.js";
import "./server/connection.js";
import "./server/focus.js";
import "./server/images.js";
import "./server/path_ends.js";
import { begin } from "./server/addresses.js";
import "./server/tabs.js";
import { mount as mountCommands } from "./tools/commands.js";

// Gradio takes its handlers as text, which runs outside of all modules: this global is how it finds them.
Object.assign(window, {
  kohya: { buildAhead, mountCommands, mountSampling, mountImages, mountLab, mountQueue, mountPanel, mountRuns,
    mountTraining, mountHeader },
});
begin();
