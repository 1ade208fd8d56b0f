// The page of all runs: search, filters, order, pages of 50; what is chosen can be compared, archived or deleted.

import { get, patch, path } from "./api.js";
import { cell, fill, h, heading, keyed, notice, pager, row, say, setText, table } from "./dom.js";
import { count, exactly, plural, runName, shortId, value, when } from "./format.js";
import { teach } from "./first-run.js";
import { LossLines } from "./loss-lines.js";
import { poll } from "./poll.js";
import { deleteRun } from "./run-head.js";
import { runFilters } from "./run-filters.js";
import { sparkline } from "./sparkline.js";
import { onState } from "./state.js";
import { showStatus } from "./status.js";

const PAGE = 50;
const EVERY_MS = 2000;
const MOST_COMPARED = 8;
const USUAL_MODEL = "smollm2-135m";

export function runsPage(main, { query }) {
  let isEmpty = false;
  let model = null; // unknown until the first state: lines with another model would be copied and fail
  const chosen = new Map();
  const lines = new LossLines();
  const filters = runFilters(query, () => look());
  const rows = h("tbody");
  const pages = pager((to) => {
    filters.setOffset(to);
    look();
  });
  const selection = selectionBar(chosen, () => look());
  const none = h("p", { class: "card muted", hidden: true }, "No run matches. ", resetButton(filters));
  const list = h(
    "div",
    { class: "card table runs", hidden: true },
    table(["Run", "Status", ">Steps", "Loss", "Model", "Last activity"], rows),
  );
  const found = h("div", { hidden: true }, filters.element, selection.element, list, none, pages);
  const empty = h("div", { hidden: true });
  const waiting = h("p", { class: "muted", role: "status" }, "Loading…");
  const problem = h("div");
  main.append(heading("Runs"), waiting, problem, found, empty);

  const show = () => {
    found.hidden = isEmpty;
    empty.hidden = !isEmpty || model === null;
    waiting.hidden = !(found.hidden && empty.hidden);
    if (!empty.hidden) teach(empty, model);
  };
  const look = () => {
    selection.show();
    polling.now();
  };
  const polling = poll(
    async (signal) => {
      const asked = filters.query(PAGE);
      const { training_runs: runs, cursor } = await get("api/v1/training_runs", { query: asked, signal });
      isEmpty = cursor.total_count === 0 && !filters.isNarrow;
      list.hidden = runs.length === 0;
      none.hidden = runs.length > 0;
      show();
      pages.show(cursor);
      filters.learn(runs);
      const draw = () => keyed(rows, runs, (run) => run.training_run_id, (run) => makeRow(run, lines, chosen, selection.show));
      draw();
      lines.refresh(runs, signal, draw);
    },
    EVERY_MS,
    (refused) => {
      waiting.hidden = true;
      problem.replaceChildren(notice(refused.message));
    },
  );
  const quiet = onState((state) => {
    model = state.models[0] ?? USUAL_MODEL;
    filters.learnModels(state.models);
    if (isEmpty) show();
  });
  return () => {
    polling.stop();
    quiet();
  };
}

function resetButton(filters) {
  const button = h("button", { type: "button", class: "small" }, "Show all runs");
  button.addEventListener("click", () => filters.reset());
  return button;
}

function makeRow(run, lines, chosen, changed) {
  const id = run.training_run_id;
  const link = h("a", { class: "strong", href: `#/runs/${encodeURIComponent(id)}` });
  const short = h("span", { class: "muted id" }, shortId(id));
  const tags = h("span", { class: "tags" });
  const box = h("input", { type: "checkbox", checked: chosen.has(id) });
  const state = h("span", { class: "state" });
  const steps = h("span", { class: "num" });
  const loss = h("span", { class: "num" });
  const line = sparkline();
  const activity = h("span", { class: "num" });
  box.addEventListener("change", () => {
    if (box.checked) chosen.set(id, made.run);
    else chosen.delete(id);
    changed();
  });
  const made = row(
    cell("", "lead", h("label", { class: "choose" }, box), h("span", { class: "run-name" }, link, h("span", {}, short, tags))),
    cell("Status", "", state),
    cell("Steps", "right", steps),
    cell("Loss", "", h("span", { class: "course" }, line, loss)),
    cell("Model", "model", h("span", {}, run.base_model, h("span", { class: "muted" }, ` · rank ${run.lora_rank}`))),
    cell("Last activity", "", activity),
  );
  made.update = (now) => {
    made.run = now;
    const known = lines.of(now);
    const name = runName(now);
    setText(link, name);
    short.hidden = name === short.textContent;
    box.checked = chosen.has(id);
    box.setAttribute("aria-label", `Choose ${name}`);
    fill(tags, JSON.stringify([now.tags, now.archived_at]), () => [
      now.archived_at && h("span", { class: "tag is-refused" }, "Archived"),
      ...(now.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)),
    ]);
    showStatus(state, now, known?.isActive);
    const counted = now.steps ?? known?.count;
    setText(steps, counted === undefined ? "" : count(counted));
    setText(loss, known || now.loss !== undefined ? value(now.loss ?? known?.lastLoss ?? null) : "");
    if (known) line.draw(known.points);
    setText(activity, when(now.last_request_time));
    activity.title = exactly(now.last_request_time);
  };
  return made;
}

/** What can be done with the chosen runs; empty while none is. */
function selectionBar(chosen, changed) {
  const told = h("span", { class: "strong" });
  const compare = h("a", { class: "button small primary" }, "Compare");
  const problem = h("span", { class: "row-problem" });
  const button = (text, work) => {
    const made = h("button", { type: "button", class: "small" }, text);
    made.addEventListener("click", work);
    return made;
  };
  const act = async (work) => {
    problem.replaceChildren();
    try {
      await work();
    } catch (caught) {
      if (caught.status !== 401) problem.replaceChildren(notice(caught.message));
    }
  };
  const archive = button("Archive", () =>
    act(async () => {
      for (const id of [...chosen.keys()]) {
        await patch(path("api/v1/training_runs", id), { body: { archived: true } });
        chosen.delete(id);
      }
      say("Archived: the filter “Archived” shows them.");
      changed();
    }),
  );
  const remove = button("Delete…", async () => {
    for (const [id, run] of [...chosen]) {
      if (!(await deleteRun(id, runName(run), act))) break;
      chosen.delete(id);
    }
    changed();
  });
  const clear = button("Clear", () => {
    chosen.clear();
    for (const box of document.querySelectorAll(".runs input:checked")) box.checked = false;
    show();
  });
  const element = h("div", { class: "selection", role: "group", "aria-label": "Chosen runs", hidden: true }, told, compare, archive, remove, clear, problem);
  function show() {
    element.hidden = chosen.size === 0;
    setText(told, `${plural(chosen.size, "run")} chosen`);
    const ids = [...chosen.keys()].slice(0, MOST_COMPARED);
    compare.href = `#/compare?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
    compare.hidden = chosen.size < 2;
    setText(compare, chosen.size > MOST_COMPARED ? `Compare the first ${MOST_COMPARED}` : "Compare");
  }
  return { element, show };
}
