// The page of the service's state and queue: your operations with the reason they wait, and the number of others'.

import { cell, fill, h, heading, keyed, row, setText, table } from "./dom.js";
import { bytes, count, duration, plural } from "./format.js";
import { learnNames, nameOf } from "./names.js";
import { onState } from "./state.js";

export function queuePage(main) {
  const told = h("p", { class: "lede", role: "status" }, "Loading…");
  const facts = h("dl", { class: "facts is-five" });
  const rows = h("tbody");
  const list = h(
    "div",
    { class: "card table", hidden: true },
    table(["Operation", "Run", ">Tokens", ">Waiting", "What it waits for"], rows),
  );
  const empty = h("p", { class: "card muted", hidden: true }, "None of your operations is waiting.");
  const more = h("p", { class: "muted" });
  const models = h("ul", { class: "models" });
  main.append(
    heading("Queue"),
    told,
    facts,
    h("h2", { class: "section" }, "Your operations"),
    list,
    empty,
    more,
    h("h2", { class: "section" }, "Models"),
    models,
  );
  return onState(async (state) => {
    await learnNames(state.queue.map((one) => one.run_id)).catch(() => {}); // then they go by their ids
    setText(told, state.is_ready ? "The service is ready." : state.reason);
    told.classList.toggle("is-warning", !state.is_ready);
    showFacts(facts, state);
    list.hidden = state.queue.length === 0;
    empty.hidden = !list.hidden;
    keyed(rows, state.queue, (one) => `${one.run_id} ${one.seq_id}`, makeRow);
    const left = state.queued_operations - state.queue.length;
    setText(more, left > 0 ? `and ${plural(left, "operation")} more.` : "");
    fill(models, state.models.join("\n"), () =>
      state.models.map((name) =>
        h(
          "li",
          { class: "card" },
          h("span", { class: "strong names" }, name),
          h(
            "a",
            {
              class: "button small",
              href: `#/playground?model=${encodeURIComponent(name)}`,
              "aria-label": `Try ${name}`,
            },
            "Try",
          ),
        ),
      ),
    );
  });
}

function showFacts(list, state) {
  const told = [
    ["Your operations", count(state.queued_operations)],
    ["Of other tenants", count(state.queued_operations_of_others)],
    ["Samples running", count(state.running_samples)],
    ["Samples waiting", count(state.queued_samples)],
    ["Adapters in memory", count(state.adapters)],
    ["Engine's memory", bytes(state.engine_bytes)],
    ["Engine restarts", count(state.engine_restarts)],
    ["Your checkpoints", `${count(state.checkpoints)} · ${bytes(state.checkpoint_bytes)}`],
    ["You are", state.uses_keys ? state.tenant : `${state.tenant} (no keys)`],
    ["Version", state.version],
  ];
  fill(list, JSON.stringify(told), () =>
    told.map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", { class: "num" }, text))),
  );
}

function makeRow(first) {
  const waiting = h("span", { class: "num" });
  const reason = h("span");
  const made = row(
    cell(
      "",
      "lead",
      h("span", { class: "strong" }, first.kind),
      h("span", { class: "muted id" }, `operation ${first.seq_id}`),
    ),
    cell("Run", "", h("a", { href: `#/runs/${encodeURIComponent(first.run_id)}` }, nameOf(first.run_id))),
    cell("Tokens", "right num", count(first.tokens)),
    cell("Waiting", "right", waiting),
    cell("What it waits for", "wide", reason),
  );
  made.update = (now) => {
    setText(waiting, duration(now.waiting_s));
    setText(reason, now.reason || now.state || "Its turn.");
  };
  return made;
}
