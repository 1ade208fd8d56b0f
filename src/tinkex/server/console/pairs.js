// A list of names with their values.

import { h } from "./dom.js";
import { measure } from "./format.js";
import { metricName } from "./curves.js";

export function pairs(title, entries, text = null) {
  const names = Object.keys(entries).sort();
  return h(
    "section",
    { "aria-label": title },
    h("h2", { class: "section" }, title),
    names.length === 0
      ? h("p", { class: "muted" }, "None.")
      : h(
          "dl",
          { class: "card pairs" },
          names.map((name) =>
            h(
              "div",
              {},
              h("dt", { title: name }, text ? name : metricName(name)),
              h("dd", { class: "num" }, text ? text(entries[name]) : measure(entries[name])),
            ),
          ),
        ),
  );
}
