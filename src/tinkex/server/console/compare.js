// Several runs over each other: their curves in the same plots, their parameters beside each other.

import { get, path } from "./api.js";
import { Board } from "./board.js";
import { startOf } from "./curves.js";
import { cell, fill, h, heading, keyed, notice, row, setText, table } from "./dom.js";
import { count, duration, runName, short, shortId, value } from "./format.js";
import { History, metricsOf } from "./history.js";
import { parameterTable } from "./parameters.js";
import { poll } from "./poll.js";
import { showStatus } from "./status.js";

const EVERY_MS = 2000;
const MOST = 8;

export function comparePage(main, { query }) {
  const ids = [...new Set(query.getAll("run"))].slice(0, MOST);
  const runs = ids.map((id, n) => ({ id, kind: `is-run-${n + 1}`, history: new History(id), metrics: metricsOf(id), run: null }));
  const hidden = new Set();
  const rows = h("tbody");
  const board = new Board();
  const parameters = h("div");
  const problem = h("div");
  const body = h(
    "div",
    { class: "compared", hidden: true },
    h("div", { class: "card table" }, table(["Run", "Status", ">Steps", ">Loss", ">Tokens", ">Engine time"], rows)),
    board.element,
    parameters,
  );
  main.append(h("p", { class: "crumb" }, h("a", { href: "#/runs" }, "Runs")), heading("Compare runs"), problem, body);
  if (ids.length < 2) {
    problem.append(notice("Choose two runs or more in the list of runs, then Compare.", "plain"));
    return () => board.close();
  }
  let drawn = "";
  const draw = (isForced = false) => {
    const mark = runs.map((one) => `${one.history.next} ${one.metrics.next}`).join();
    if (mark === drawn && !isForced) return;
    drawn = mark;
    const shown = runs.filter((one) => one.run && !hidden.has(one.id));
    const drawable = shown.map(({ run, kind, history: { steps }, metrics }) => {
      return { name: runName(run), kind, steps, entries: metrics.rows, start: startOf(run, steps) };
    });
    board.draw(drawable, true);
  };
  const polling = poll(
    async (signal) => {
      await Promise.all(runs.filter((one) => !one.isGone).map((one) => load(one, signal, problem)));
      body.hidden = false;
      const known = runs.filter((one) => one.run);
      keyed(rows, known, (one) => one.id, (one) => makeRow(one, hidden, () => draw(true)));
      draw();
      fill(parameters, JSON.stringify(known.map((one) => [one.run, one.history.next])), () =>
        known.length > 0 ? parameterTable(known.map((one) => ({ run: one.run, steps: one.history.steps }))) : [],
      );
    },
    EVERY_MS,
    (refused) => problem.append(notice(refused.message)),
  );
  return () => {
    polling.stop();
    board.close();
  };
}

async function load(one, signal, problem) {
  try {
    [one.run] = await Promise.all([
      get(path("api/v1/training_runs", one.id), { signal }),
      one.history.refresh(signal),
      one.metrics.refresh(signal),
    ]);
  } catch (caught) {
    if (caught.status !== 404) throw caught;
    one.isGone = true;
    problem.append(notice(`${shortId(one.id)} does not exist, or it belongs to another tenant.`));
  }
}

function makeRow(first, hidden, changed) {
  const box = h("input", { type: "checkbox", checked: true });
  const link = h("a", { class: "strong", href: `#/runs/${encodeURIComponent(first.id)}` });
  const state = h("span", { class: "state" });
  const [steps, loss, tokens, time] = Array.from({ length: 4 }, () => h("span", { class: "num" }));
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(first.id);
    else hidden.add(first.id);
    changed();
  });
  const made = row(
    cell(
      "",
      "lead",
      h("label", { class: "choose" }, box, h("span", { class: `swatch ${first.kind}`, "aria-hidden": "true" })),
      h("span", { class: "run-name" }, link, h("span", { class: "muted id" }, shortId(first.id))),
    ),
    cell("Status", "", state),
    cell("Steps", "right", steps),
    cell("Loss", "right", loss),
    cell("Tokens", "right", tokens),
    cell("Engine time", "right", time),
  );
  made.update = ({ run, history }) => {
    setText(link, runName(run));
    box.setAttribute("aria-label", `Draw ${runName(run)}`);
    showStatus(state, run, history.isActive);
    setText(steps, count(history.count));
    setText(loss, value(history.lastLoss));
    setText(tokens, short(history.tokens));
    setText(time, duration(history.seconds));
  };
  return made;
}
