// Asks for an API key. It is stored in this tab only and sent as X-API-Key.

import { h, heading, notice } from "./dom.js";

export function signInPage(main, reason, give) {
  const field = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "key-help",
  });
  const problem = h("div", {}, reason && notice(reason));
  const form = h(
    "form",
    { class: "card sign-in" },
    h("label", { for: "key" }, "API key"),
    field,
    h(
      "p",
      { class: "muted", id: "key-help" },
      "It stays in this tab and is forgotten when the tab is closed. ",
      h("code", {}, "tinkex key create NAME"),
      " on the server makes one; ",
      h("code", {}, "tinkex console"),
      " opens this page with yours.",
    ),
    problem,
    h("button", { class: "primary" }, "Sign in"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = field.value.trim();
    if (/^[\x21-\x7e]+$/.test(given)) give(given);
    else problem.replaceChildren(notice("A key has plain letters, digits and signs only, without spaces."));
  });
  main.append(heading("Sign in"), form);
  field.focus();
}
