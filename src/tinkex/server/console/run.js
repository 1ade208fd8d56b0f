// The page of one run: plots that grow while it trains, its checkpoints, its metadata.

import { get, path } from "./api.js";
import { checkpointTable } from "./checkpoints.js";
import { fill, h, heading, notice, setText } from "./dom.js";
import { count, duration, exactly, measure, rate, runName, short, value, when } from "./format.js";
import { History } from "./history.js";
import { Cursor, Plot } from "./plot.js";
import { poll } from "./poll.js";
import { showState } from "./runs.js";

const EVERY_MS = 1000;
const CHECKPOINTS_EVERY = 4;
let isSmooth = true;

export function runPage(main, { id }) {
  const history = new History(id);
  const title = heading("Run", h("span", { class: "state" }));
  const [name, state] = title.children;
  const facts = h("dl", { class: "facts" });
  const plots = makePlots();
  const checkpoints = checkpointTable(() => {
    isChanged = true;
    polling.now();
  }, "This run has saved nothing yet.");
  const about = h("div", { class: "pair" });
  const body = h(
    "div",
    { hidden: true },
    facts,
    plots.element,
    h("h2", { class: "section" }, "Checkpoints"),
    checkpoints,
    about,
  );
  main.append(
    h("p", { class: "crumb" }, h("a", { href: "#/runs" }, "Runs")),
    title,
    h("p", { class: "muted id" }, id),
    body,
  );
  let drawn = -1;
  let looks = 0;
  let isChanged = false;

  const polling = poll(
    async (signal) => {
      const [run] = await Promise.all([get(path("api/v1/training_runs", id), { signal }), history.refresh(signal)]);
      body.hidden = false;
      setText(name, runName(run));
      document.title = `${runName(run)} · tinkex`;
      showState(state, history.isActive);
      showFacts(facts, run, history);
      if (drawn !== history.steps.length) plots.draw(history.steps);
      drawn = history.steps.length;
      // All checkpoints of a run come in one response, and there may be many.
      if (isChanged || looks % CHECKPOINTS_EVERY === 0) {
        isChanged = false;
        const saved = await get(path("api/v1/training_runs", id, "checkpoints"), { signal });
        checkpoints.show(saved.checkpoints);
      }
      looks += 1;
      fill(about, JSON.stringify([run.user_metadata, history.last?.metrics]), () => [
        pairs("Metadata", run.user_metadata ?? {}, String),
        pairs("Metrics of the last step", history.last?.metrics ?? {}, measure),
      ]);
    },
    EVERY_MS,
    (problem) =>
      main.append(
        notice(
          problem.status === 404
            ? `This run does not exist, or it belongs to another tenant. ${problem.message}`
            : problem.message,
        ),
      ),
  );
  return () => {
    polling.stop();
    plots.close();
  };
}

function makePlots() {
  const cursor = new Cursor();
  const loss = new Plot({
    title: "Loss",
    cursor,
    isTall: true,
    lines: [
      { label: "training", kind: "is-loss", of: (step) => step.loss, text: value },
      { label: "evaluation", kind: "is-evaluation", of: (step) => step.evaluation_loss, text: value },
    ],
  });
  const learning = new Plot({
    title: "Learning rate",
    cursor,
    fromZero: true,
    lines: [{ label: "", kind: "is-rate", of: (step) => step.learning_rate, text: rate }],
  });
  const throughput = new Plot({
    title: "Throughput",
    cursor,
    fromZero: true,
    lines: [
      {
        label: "tokens/s",
        kind: "is-throughput",
        of: (step) => (step.seconds > 0 ? step.tokens / step.seconds : null),
        text: short,
      },
    ],
  });
  const all = [loss, learning, throughput];
  const evaluation = loss.lines[1];
  const box = h("input", { type: "checkbox", id: "smooth" });
  box.checked = isSmooth;
  let steps = [];

  function draw(found) {
    steps = found;
    loss.lines = steps.some((step) => step.evaluation_loss !== null) ? [loss.lines[0], evaluation] : [loss.lines[0]];
    loss.isSmooth = throughput.isSmooth = isSmooth;
    for (const plot of all) plot.draw(steps);
  }
  box.addEventListener("change", () => {
    isSmooth = box.checked;
    draw(steps);
  });
  const element = h(
    "section",
    { class: "plots", "aria-label": "Plots" },
    h("p", { class: "plot-options" }, box, h("label", { for: "smooth" }, "Smooth")),
    ...all.map((plot) => plot.element),
  );
  return { element, draw, close: () => all.forEach((plot) => plot.close()) };
}

function showFacts(list, run, history) {
  const seconds = history.seconds;
  const told = {
    Model: run.base_model,
    Rank: String(run.lora_rank),
    Steps: count(history.count),
    Loss: value(history.lastLoss),
    Tokens: short(history.tokens),
    "Engine time": duration(seconds),
    "Last activity": when(run.last_request_time),
    ...(history.home && { Home: history.home }),
  };
  fill(list, JSON.stringify(told), () =>
    Object.entries(told).map(([term, text]) =>
      h(
        "div",
        {},
        h("dt", {}, term),
        h("dd", { class: "num", title: term === "Last activity" ? exactly(run.last_request_time) : null }, text),
      ),
    ),
  );
}

function pairs(title, entries, text) {
  const names = Object.keys(entries).sort();
  return h(
    "section",
    {},
    h("h2", { class: "section" }, title),
    names.length === 0
      ? h("p", { class: "muted" }, "None.")
      : h(
          "dl",
          { class: "card pairs" },
          names.map((name) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, text(entries[name])))),
        ),
  );
}
