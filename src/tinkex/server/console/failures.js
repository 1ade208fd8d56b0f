// The page of operations that failed or were rejected, with the reason from the service.

import { get } from "./api.js";
import { h, heading, keyed, notice, pager, setText } from "./dom.js";
import { exactly, when } from "./format.js";
import { learnNames, nameOf } from "./names.js";
import { poll } from "./poll.js";

const PAGE = 25;
const EVERY_MS = 2000;
const WHOSE = { user: "Your input", server: "The service" };

export function failuresPage(main) {
  const list = failureList({ again: () => polling.now() });
  main.append(heading("Failures"), list.element);
  const polling = poll(
    (signal) => list.refresh(signal),
    EVERY_MS,
    (problem) => main.append(notice(problem.message)),
  );
  return () => polling.stop();
}

/** The failures of a run, or of all: { element, refresh(signal) }; `refresh` returns how many there are. */
export function failureList({ runId = null, again = null }) {
  let offset = 0;
  const list = h("ul", { class: "failures" });
  const empty = h(
    "p",
    { class: "card muted", hidden: true },
    "No operation has failed. If one does, the reason appears here and in your program.",
  );
  const pages = pager((to) => {
    offset = to;
    (again ?? refresh)();
  });
  async function refresh(signal) {
    const query = { offset, limit: PAGE, ...(runId && { run_id: runId }) };
    const { operations, cursor } = await get("api/v1/failed_operations", { query, signal });
    empty.hidden = cursor.total_count > 0;
    if (!runId) {
      await learnNames(
        operations.map((one) => one.run_id),
        signal,
      );
    }
    keyed(list, operations, (one) => one.request_id, makeEntry);
    pages.show(cursor);
    return cursor.total_count;
  }
  return { element: h("div", {}, empty, list, pages), refresh };
}

function makeEntry(one) {
  const time = h("time", { class: "muted num", datetime: one.time, title: exactly(one.time) });
  const entry = h(
    "li",
    { class: "card" },
    h(
      "p",
      { class: "failure-head" },
      h("span", { class: "strong" }, one.kind),
      h("span", { class: `tag is-${one.state}` }, one.state === "refused" ? "Refused" : "Failed"),
      WHOSE[one.category] && h("span", { class: "muted" }, WHOSE[one.category]),
      time,
    ),
    h("p", { class: "reason" }, one.error || "No reason was given."),
    h(
      "p",
      { class: "muted small-text" },
      "operation ",
      h("span", { class: "num" }, one.seq_id),
      " of ",
      h("a", { href: `#/runs/${encodeURIComponent(one.run_id)}` }, nameOf(one.run_id)),
    ),
  );
  entry.update = (now) => setText(time, when(now.time));
  return entry;
}
