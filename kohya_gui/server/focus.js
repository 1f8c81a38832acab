// Keyboard focus: browsers take it from a button that is disabled, such as while its request is pending.

/** @type {HTMLButtonElement | null} */
let left = null; // the disabled button that had the focus

/** @param {HTMLButtonElement} button whose `disabled` has changed */
function follow(button) {
  if (button.disabled) {
    if (button === document.activeElement) left = button;
    return;
  }
  if (button !== left) return;
  left = null;
  if (document.activeElement === document.body) button.focus({ preventScroll: true }); // nobody has moved it since
}

new MutationObserver((changes) => {
  for (const { target } of changes) if (target instanceof HTMLButtonElement) follow(target);
}).observe(document, { attributeFilter: ["disabled"], subtree: true });
