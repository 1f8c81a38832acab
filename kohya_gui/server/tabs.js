// The tabs on a narrow screen: one row that is scrolled, in which the open tab is always in view.
import { hit } from "./elements.js";

document.addEventListener("click", (event) => {
  hit(event, 'button[role="tab"]')?.scrollIntoView({ block: "nearest", inline: "center" });
});
