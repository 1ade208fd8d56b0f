// The page of the servers that share a store: what each node does, how long others rely on it, and whose runs are where.

import { cell, h, heading, keyed, row, setText, table } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { onState } from "./state.js";

const STATES = ["busy", "idle", "starting", "draining", "gone"];

export function clusterPage(main) {
  const told = h("p", { class: "lede", role: "status" }, "Loading…");
  const rows = h("tbody");
  const list = h(
    "div",
    { class: "card table", hidden: true },
    table(["Node", "State", ">Runs", ">Operations", ">Samples", ">Lease left", "Models"], rows),
  );
  const about = h(
    "p",
    { class: "muted" },
    "A run is at home on one node, and its page says on which. A node that does not renew its lease is given up, ",
    "and others take over its runs.",
  );
  main.append(heading("Cluster"), told, list, about);
  return onState(({ nodes = [] }) => {
    setText(told, summary(nodes));
    list.hidden = about.hidden = nodes.length === 0;
    keyed(rows, nodes, (node) => node.id, makeRow);
  });
}

function summary(nodes) {
  if (nodes.length === 0) return "This server is alone: it shares its store with no other.";
  const alive = nodes.filter((node) => node.state !== "gone");
  const states = STATES.map((state) => [state, nodes.filter((node) => node.state === state).length]);
  const runs = alive.reduce((sum, node) => sum + node.runs, 0);
  const named = states.filter(([, found]) => found > 0).map(([state, found]) => `${count(found)} ${state}`);
  return `${plural(alive.length, "node")} with ${plural(runs, "run")}: ${named.join(", ")}.`;
}

function makeRow(first) {
  const state = h("span", { class: "state" });
  const [runs, operations, samples] = Array.from({ length: 3 }, () => h("span", { class: "num" }));
  const left = h("span");
  const models = h("span", { class: "names" });
  const made = row(
    cell(
      "",
      "lead",
      h("span", { class: "strong" }, first.url),
      h("span", { class: "muted id" }, [first.id, first.version, first.is_this && "this server"].filter(Boolean).join(" · ")),
    ),
    cell("State", "", state),
    cell("Runs", "right", runs),
    cell("Operations", "right", operations),
    cell("Samples", "right", samples),
    cell("Lease left", "right", left),
    cell("Models", "wide", models),
  );
  made.update = (now) => {
    state.classList.toggle("is-active", now.state === "busy");
    setText(state, now.state);
    setText(runs, now.busy_runs > 0 ? `${count(now.busy_runs)} of ${count(now.runs)} busy` : count(now.runs));
    setText(operations, count(now.queued_operations));
    setText(samples, count(now.samples));
    setText(left, now.lease_left_s > 0 ? duration(now.lease_left_s) : `ended ${duration(-now.lease_left_s)} ago`);
    setText(models, now.models.join(", "));
  };
  return made;
}
