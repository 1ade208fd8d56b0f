// The playground: one prompt, one to three models side by side, tokens as they come.

import { get } from "./api.js";
import { makeColumn } from "./column.js";
import { h, heading, notice } from "./dom.js";
import { learnNames, runIn } from "./names.js";
import { poll } from "./poll.js";

// The inputs are kept while the console is open, also while another page is shown.
const kept = {
  mode: "text",
  columns: null,
  models: [{}, {}, {}],
  text: "The capital of France is",
  message: "What is the capital of France?",
  system: "",
  temperature: "0.7",
  top_p: "1",
  max_tokens: "64",
  seed: "",
};

export function playgroundPage(main, { query }) {
  let running = null;
  if (query.get("model")) kept.models[0] = { model: query.get("model") };
  kept.columns ??= 1;
  const columns = kept.models.map((model, n) => makeColumn(n + 1, model));
  const prompt = h("textarea", { id: "prompt", rows: "4", required: true });
  const promptLabel = h("label", { for: "prompt" });
  const system = h("textarea", { id: "system", rows: "2" });
  const systemField = h(
    "div",
    { class: "field" },
    h("label", { for: "system" }, "System message (may be empty)"),
    system,
  );
  const start = h("button", { class: "primary" });
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const fresh = h("button", { type: "button" }, "New chat");
  const mode = choices(
    "Mode",
    "mode",
    [
      ["text", "Text"],
      ["chat", "Chat"],
    ],
    kept.mode,
    (value) => {
      kept.mode = value;
      columns.forEach((column) => column.forget());
      show();
    },
  );
  const side = choices(
    "Models side by side",
    "columns",
    [
      ["1", "1"],
      ["2", "2"],
      ["3", "3"],
    ],
    String(kept.columns),
    (value) => {
      kept.columns = Number(value);
      show();
    },
  );
  const row = h("div", { class: "columns" }, ...columns);
  const form = h(
    "form",
    { class: "card playground" },
    h("div", { class: "switches" }, mode, side),
    systemField,
    h("div", { class: "field" }, promptLabel, prompt),
    h(
      "div",
      { class: "settings" },
      number("temperature", "Temperature", { min: "0", max: "100", step: "any" }),
      number("top_p", "Top-p", { min: "0", max: "1", step: "any" }),
      number("max_tokens", "Max tokens", { min: "1", max: "100000", step: "1" }),
      number("seed", "Seed (random if empty)", { min: "0", step: "1" }, false),
    ),
    h(
      "div",
      { class: "actions" },
      start,
      stop,
      fresh,
      h("span", { class: "muted hint" }, "Ctrl+Enter starts, Esc stops"),
    ),
  );

  function show() {
    const isChat = kept.mode === "chat";
    systemField.hidden = fresh.hidden = !isChat;
    promptLabel.textContent = isChat ? "Message" : "Prompt";
    start.textContent = isChat ? "Send" : "Sample";
    prompt.value = isChat ? kept.message : kept.text;
    system.value = kept.system;
    columns.forEach((column, n) => (column.hidden = n >= kept.columns));
    row.dataset.columns = kept.columns;
  }

  async function sample() {
    if (running) return;
    const asked = {
      isChat: kept.mode === "chat",
      text: prompt.value,
      system: kept.system.trim(),
      temperature: Number(kept.temperature),
      top_p: Number(kept.top_p),
      max_tokens: Number(kept.max_tokens),
      seed: kept.seed === "" ? null : Number(kept.seed),
    };
    if (asked.isChat) prompt.value = kept.message = "";
    running = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    const { signal } = running;
    await Promise.all(columns.slice(0, kept.columns).map((column) => column.sample(asked, signal)));
    running = null;
    start.disabled = false;
    stop.disabled = true;
    if (document.activeElement === stop || document.activeElement === document.body) start.focus();
  }

  prompt.addEventListener("input", () => {
    kept[kept.mode === "chat" ? "message" : "text"] = prompt.value;
  });
  system.addEventListener("input", () => {
    kept.system = system.value;
  });
  stop.addEventListener("click", () => running?.abort());
  fresh.addEventListener("click", () => columns.forEach((column) => column.forget()));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sample();
  });
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") running?.abort();
  };
  document.addEventListener("keydown", keys);
  show();
  main.append(heading("Playground"), form, row);

  const loading = poll(
    async (signal) => {
      const { data } = await get("v1/models", { signal });
      await learnNames(
        data.filter(({ id }) => id.startsWith("tinker://")).map(({ id }) => runIn(id)),
        signal,
      );
      columns.forEach((column) => column.offer(distinct(data)));
      loading.stop();
    },
    2000,
    (problem) => main.append(notice(problem.message)),
  );
  return () => {
    loading.stop();
    running?.abort();
    document.removeEventListener("keydown", keys);
  };
}

function number(name, label, bounds, isRequired = true) {
  const field = h("input", { id: name, type: "number", inputmode: "decimal", required: isRequired, ...bounds });
  field.value = kept[name];
  field.addEventListener("input", () => {
    kept[name] = field.value;
  });
  return h("div", { class: "field" }, h("label", { for: name }, label), field);
}

/** Radio buttons that look like one switch. */
function choices(label, name, options, chosen, changed) {
  return h(
    "fieldset",
    { class: "switch" },
    h("legend", {}, label),
    ...options.map(([value, text]) => {
      const id = `${name}-${value}`;
      const box = h("input", { type: "radio", name, id, value });
      box.checked = value === chosen;
      box.addEventListener("change", () => changed(value));
      return h("span", {}, box, h("label", { for: id }, text));
    }),
  );
}

/** A base model may have several names; the shortest is shown. */
function distinct(listed) {
  const found = new Map();
  for (const { id, root } of listed) {
    const key = id.startsWith("tinker://") ? id : root;
    const names = [...(found.get(key)?.names ?? []), id];
    found.set(key, { id: names.reduce((short, name) => (name.length < short.length ? name : short)), names });
  }
  return [...found.values()];
}
