// The page of all runs, newest first: state, steps, last loss with a sparkline. Without runs: how to start the first.

import { get, key, serviceUrl } from "./api.js";
import { cell, code, h, heading, keyed, notice, pager, row, setText, table } from "./dom.js";
import { count, exactly, runName, shortId, value, when } from "./format.js";
import { History } from "./history.js";
import { sparkline } from "./plot.js";
import { poll } from "./poll.js";
import { onState } from "./state.js";

const PAGE = 20;
const EVERY_MS = 1500;
const SPARKLINE_STEPS = 200;
const USUAL_MODEL = "smollm2-135m";
const histories = new Map();

export function runsPage(main) {
  let offset = 0;
  let isEmpty = false;
  let model = null; // unknown until the first state: lines with another model would be copied and fail
  const rows = h("tbody");
  const pages = pager((to) => {
    offset = to;
    polling.now();
  });
  const list = h(
    "div",
    { class: "card table", hidden: true },
    table(["Run", "Model", "State", ">Steps", "Loss", "Last activity"], rows),
    pages,
  );
  const empty = h("div", { hidden: true });
  const waiting = h("p", { class: "muted", role: "status" }, "Loading…");
  main.append(heading("Runs"), waiting, list, empty);

  const show = () => {
    list.hidden = isEmpty;
    empty.hidden = !isEmpty || model === null;
    waiting.hidden = !(list.hidden && empty.hidden);
    if (!empty.hidden) teach(empty, model);
  };
  const polling = poll(
    async (signal) => {
      const answer = await get("api/v1/training_runs", { query: { offset, limit: PAGE }, signal });
      const runs = answer.training_runs;
      const draw = () => keyed(rows, runs, (run) => run.training_run_id, makeRow);
      isEmpty = answer.cursor.total_count === 0;
      show();
      pages.show(answer.cursor);
      draw();
      for (const run of runs) if (await refresh(run, signal)) draw();
    },
    EVERY_MS,
    (problem) => main.append(notice(problem.message)),
  );
  const quiet = onState((state) => {
    model = state.models[0] ?? USUAL_MODEL;
    if (isEmpty) show();
  });
  return () => {
    polling.stop();
    quiet();
  };
}

/** Requests the steps of a run only if it had requests since: a list of idle runs costs one request. */
async function refresh(run, signal) {
  let known = histories.get(run.training_run_id);
  if (!known) histories.set(run.training_run_id, (known = new History(run.training_run_id, SPARKLINE_STEPS)));
  if (known.isLoaded && !known.isActive && known.seen === run.last_request_time) return false;
  await known.refresh(signal);
  known.seen = run.last_request_time;
  return true;
}

function makeRow(run) {
  const link = h("a", { class: "strong", href: `#/runs/${encodeURIComponent(run.training_run_id)}` });
  const id = h("span", { class: "muted id" }, shortId(run.training_run_id));
  const state = h("span", { class: "state" });
  const steps = h("span", { class: "num" });
  const loss = h("span", { class: "num" });
  const line = sparkline();
  const activity = h("span", { class: "num" });
  const made = row(
    cell("", "lead", link, id),
    cell("Model", "", h("span", {}, run.base_model, h("span", { class: "muted" }, ` · rank ${run.lora_rank}`))),
    cell("State", "", state),
    cell("Steps", "right", steps),
    cell("Loss", "", h("span", { class: "course" }, line, loss)),
    cell("Last activity", "", activity),
  );
  made.update = (now) => {
    const known = histories.get(now.training_run_id);
    const name = runName(now);
    setText(link, name);
    id.hidden = name === id.textContent;
    showState(state, known?.isActive ?? false);
    setText(steps, known?.isLoaded ? count(known.count) : "");
    setText(loss, known?.isLoaded ? value(known.lastLoss) : "");
    if (known) line.draw(known.steps);
    setText(activity, when(now.last_request_time));
    activity.title = exactly(now.last_request_time);
  };
  return made;
}

export function showState(element, isActive) {
  element.classList.toggle("is-active", isActive);
  setText(element, isActive ? "Training" : "Idle");
}

/** The example program of ten lines; a test runs it. */
export function tenLines(url, model) {
  return `import tinkex

with tinkex.ServiceClient(base_url="${url}") as service:
    training = service.create_lora_training_client("${model}", rank=8, user_metadata={"name": "first run"})
    tokens = training.get_tokenizer().encode("The capital of France is Paris.")
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)
    for _ in range(20):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
    training.save_weights_for_sampler("first").result()
`;
}

function teach(element, model) {
  const mark = `${model} ${key() === null}`;
  if (element.dataset.mark === mark) return;
  element.dataset.mark = mark;
  element.replaceChildren(
    h(
      "p",
      { class: "lede" },
      "No runs yet. A run appears here as soon as a program starts to train, and its loss is plotted meanwhile.",
    ),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "See a model learn"),
      h("p", {}, "In a terminal on this machine. It trains for a minute or two and shows the model before and after."),
      code("tinkex demo", "the demo's command"),
    ),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Train on this service"),
      h(
        "p",
        {},
        "Ten lines of Python",
        key() === null
          ? "."
          : ["; the key is taken from the environment variable ", h("code", {}, "TINKER_API_KEY"), "."],
      ),
      code(tenLines(serviceUrl(), model), "ten lines of Python"),
    ),
  );
}
