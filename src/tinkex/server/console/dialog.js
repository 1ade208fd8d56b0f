// Dialogs: confirm what cannot be undone, or ask for a value.

import { h } from "./dom.js";

/** Shows a dialog. Returns the result of `read()` if the user confirms, else null. */
export function ask({ title, content, agree, isDanger = false, read = () => true }) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const cancel = h("button", { type: "button" }, "Cancel");
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      ...[content].flat(),
      h("div", { class: "actions" }, cancel, h("button", { class: isDanger ? "danger" : "primary" }, agree)),
    );
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    let answer = null;
    cancel.addEventListener("click", () => dialog.close());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      answer = read();
      dialog.close();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
    if (isDanger) cancel.focus();
  });
}
