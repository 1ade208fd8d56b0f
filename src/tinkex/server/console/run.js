// The page of one run: its name, state and parameters, plots that grow while it trains, samples, checkpoints, failures.

import { get, path } from "./api.js";
import { Board } from "./board.js";
import { checkpointTable } from "./checkpoints.js";
import { lossName, placeOf, startOf } from "./curves.js";
import { failureList } from "./failures.js";
import { fill, h, notice, setText } from "./dom.js";
import { count, duration, exactly, short, value, when } from "./format.js";
import { History, metricsOf, samplesOf } from "./history.js";
import { parameterTable } from "./parameters.js";
import { pairs } from "./pairs.js";
import { runHead } from "./run-head.js";
import { sampleTable } from "./samples.js";
import { poll } from "./poll.js";

const EVERY_MS = 1000;
const REST_EVERY = 4;

export function runPage(main, { id }) {
  const page = new RunPage(id);
  main.append(...page.elements);
  const polling = poll(
    (signal) => page.refresh(signal),
    EVERY_MS,
    (problem) => main.append(notice(refusal(problem))),
  );
  page.lookAgain = () => polling.now();
  return () => {
    polling.stop();
    page.board.close();
  };
}

function refusal({ status, message }) {
  return status === 404 ? `This run does not exist, or it belongs to another tenant. ${message}` : message;
}

class RunPage {
  constructor(id) {
    this.id = id;
    this.history = new History(id);
    this.metrics = metricsOf(id);
    this.samples = samplesOf(id);
    this.looks = 0;
    this.drawn = "";
    this.detail = null;
    this.lookAgain = () => {};
    const changed = () => {
      this.looks = 0;
      this.lookAgain();
    };
    this.head = runHead(id, changed);
    this.facts = h("dl", { class: "facts" });
    this.trouble = h("div");
    this.board = new Board((span, axis) => this.zoom(span, axis));
    this.sampleTable = sampleTable();
    this.checkpoints = checkpointTable(changed, "This run has saved nothing yet.");
    this.failures = failureList({ runId: id });
    this.about = h("div", { class: "pair" });
    const section = (title, ...content) => h("section", { "aria-label": title }, h("h2", { class: "section" }, title), content);
    this.sampled = section("Samples", this.sampleTable);
    this.failed = section("Failures", this.failures.element);
    this.failed.id = "failures";
    this.body = h(
      "div",
      { hidden: true },
      this.trouble,
      this.facts,
      this.board.element,
      this.sampled,
      section("Checkpoints", this.checkpoints),
      this.failed,
      this.about,
    );
    this.elements = [...this.head.elements, this.body];
  }

  async refresh(signal) {
    const { history, metrics, samples } = this;
    const [run] = await Promise.all([
      get(path("api/v1/training_runs", this.id), { signal }),
      history.refresh(signal),
      metrics.refresh(signal),
      samples.refresh(signal),
    ]);
    this.body.hidden = false;
    this.start = startOf(run, history.steps);
    this.head.show(run, history.isActive);
    showFacts(this.facts, run, history);
    this.draw();
    this.sampled.hidden = samples.rows.length === 0;
    this.sampleTable.show(samples.rows);
    // All checkpoints of a run come in one response, and there may be many.
    if (this.looks % REST_EVERY === 0) {
      const [saved, total] = await Promise.all([
        get(path("api/v1/training_runs", this.id, "checkpoints"), { signal }),
        this.failures.refresh(signal),
      ]);
      this.checkpoints.show(saved.checkpoints);
      this.failed.hidden = total === 0;
      showTrouble(this.trouble, history, total);
    }
    this.looks += 1;
    fill(this.about, JSON.stringify([run, history.last]), () => [
      parameterTable([{ run, steps: history.steps }]),
      pairs("Metrics of the last step", history.last?.metrics ?? {}),
    ]);
  }

  draw() {
    const mark = `${this.history.next} ${this.metrics.next}`;
    if (mark === this.drawn) return;
    this.drawn = mark;
    const [steps, entries] = [this.detail ?? this.history.steps, this.metrics.rows];
    this.board.draw([{ steps, entries, start: this.start }]);
  }

  /** Where the service sent only some of the steps, it is asked for all of those in view. */
  async zoom(span, axis) {
    this.span = span;
    const { history } = this;
    const place = (step) => placeOf(step, axis, this.start);
    const detail = span && history.isThinned ? await history.between(span, place).catch(() => null) : null;
    if (span !== this.span || detail === this.detail) return; // zoomed again meanwhile, or nothing more to show
    this.detail = detail;
    this.drawn = "";
    this.draw();
  }
}

function showTrouble(element, history, total) {
  const failed = history.steps.reduce((sum, step) => sum + (step.failed ?? 0), 0);
  const last = history.steps.findLast?.((step) => step.failed > 0);
  fill(element, `${total} ${failed} ${last?.seq_id}`, () => {
    if (total === 0 && failed === 0) return [];
    const link = h("a", { href: "#failures" }, "See its failures.");
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the address after # names a page
      document.getElementById("failures").scrollIntoView();
    });
    const told = `${count(Math.max(total, failed))} ${Math.max(total, failed) === 1 ? "operation" : "operations"} of this run failed.`;
    return h("p", { class: "notice is-error" }, told, last ? ` The last, in step ${count(last.number)}: ${last.failure} ` : " ", link);
  });
}

function showFacts(list, run, history) {
  const told = {
    Model: run.base_model,
    Steps: count(history.count),
    [lossName(history.last)]: value(history.lastLoss),
    Tokens: short(history.tokens),
    "Engine time": duration(history.seconds),
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
