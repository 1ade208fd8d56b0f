// What a run was trained with, as a table. Where several runs are compared, rows in which they differ are marked.

import { cell, h, row, table } from "./dom.js";
import { exactly, NONE, rate, runName, short } from "./format.js";

/** `runs` are { run, steps }. Returns a section with a table of a column for each run. */
export function parameterTable(runs) {
  const columns = runs.map(({ run, steps }) => parametersOf(run, steps));
  const names = [...new Set(columns.flatMap((column) => Object.keys(column)))].filter((name) =>
    columns.some((column) => (column[name] ?? NONE) !== NONE),
  );
  const rows = h("tbody");
  for (const name of names) {
    const texts = columns.map((column) => column[name] ?? NONE);
    const differs = texts.some((text) => text !== texts[0]);
    const line = row(
      cell("", "lead", h("span", { class: "muted" }, name)),
      ...texts.map((text, n) => cell(runs.length > 1 ? runName(runs[n].run) : "", "num", text)),
    );
    line.classList.toggle("differs", differs);
    if (differs) line.setAttribute("aria-label", `${name}: differs`);
    rows.append(line);
  }
  const titles = ["Parameter", ...runs.map(({ run }) => (runs.length > 1 ? runName(run) : "Value"))];
  return h(
    "section",
    { "aria-label": "Parameters" },
    h("h2", { class: "section" }, "Parameters"),
    h("div", { class: "card table parameters" }, table(titles, rows)),
  );
}

function parametersOf(run, steps) {
  const given = run.lora_config ?? {};
  const functions = [...new Set(steps.map((step) => step.loss_fn).filter(Boolean))];
  const rates = steps.map((step) => step.learning_rate).filter((x) => x !== null && x !== undefined);
  const tokens = steps.map((step) => step.tokens).filter((n) => n > 0).sort((a, b) => a - b);
  return {
    "Base model": run.base_model,
    Rank: String(run.lora_rank),
    Layers: layersOf(given),
    Seed: given.seed === undefined ? NONE : String(given.seed),
    "Loss function": functions.join(", ") || NONE,
    "Learning rate": rates.length === 0 ? NONE : spanOf(rates, rate),
    "Tokens per step": tokens.length === 0 ? NONE : spanOf([tokens[tokens.length >> 1]], short),
    ...optimizerOf(steps[steps.length - 1]?.optimizer ?? {}),
    Created: run.created_at ? exactly(run.created_at) : NONE,
    Tags: (run.tags ?? []).join(", ") || NONE,
    ...Object.fromEntries(
      Object.entries(run.user_metadata ?? {})
        .filter(([name]) => !["name", "run_name", "tags"].includes(name))
        .map(([name, text]) => [`“${name}”`, String(text).slice(0, 200)]),
    ),
  };
}

function layersOf({ train_attn: attention, train_mlp: mlp, train_unembed: unembed }) {
  if (attention === undefined) return NONE;
  const trained = [attention && "attention", mlp && "MLP", unembed && "unembedding"].filter(Boolean);
  return trained.join(", ") || "none";
}

/** Settings of the optimizer that are not the usual ones. */
function optimizerOf(params) {
  return Object.fromEntries(Object.entries(params).map(([name, x]) => [`Optimizer: ${name}`, rate(x)]));
}

/** "3e-4", or the first, greatest and last of values that change. */
function spanOf(values, text) {
  const [first, last] = [values[0], values[values.length - 1]];
  const most = values.reduce((a, b) => Math.max(a, b));
  const told = [text(first)];
  if (text(most) !== text(first) && text(most) !== text(last)) told.push(text(most));
  if (text(last) !== told[told.length - 1]) told.push(text(last));
  return told.join(" → ");
}
