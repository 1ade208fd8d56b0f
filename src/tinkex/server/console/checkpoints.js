// The page of checkpoints: list, download, publish, expire, delete.

import { get, path, post, put, remove } from "./api.js";
import { ask } from "./dialog.js";
import { cell, h, heading, keyed, notice, pager, row, say, setText, table } from "./dom.js";
import { bytes, exactly, when } from "./format.js";
import { learnNames, nameOf, runIn } from "./names.js";
import { poll } from "./poll.js";

const PAGE = 25;
const EVERY_MS = 2000;
const PAGE_OF_RUN = 10;
const KINDS = { training: "Training state", sampler: "Sampler", external: "Export" };
const LIVES = [
  ["", "Never"],
  ["3600", "In one hour"],
  ["86400", "In one day"],
  ["604800", "In one week"],
  ["2592000", "In 30 days"],
  ["other", "In another number of days"],
];

export function checkpointsPage(main) {
  let offset = 0;
  const list = checkpointTable(() => polling.now(), "Nothing is saved yet.", PAGE);
  const pages = pager((to) => {
    offset = to;
    polling.now();
  });
  main.append(heading("Checkpoints"), list, pages);
  const polling = poll(
    async (signal) => {
      const answer = await get("api/v1/checkpoints", { query: { offset, limit: PAGE }, signal });
      if (offset > 0 && answer.checkpoints.length === 0) {
        offset = Math.max(0, offset - PAGE); // the last one of a page was deleted
        polling.now();
        return;
      }
      await learnNames(
        answer.checkpoints.map((one) => runIn(one.tinker_path)),
        signal,
      );
      list.show(answer.checkpoints);
      pages.show(answer.cursor);
    },
    EVERY_MS,
    (problem) => main.append(notice(problem.message)),
  );
  return () => polling.stop();
}

/**
 * A table with a method `show(checkpoints)`. `changed()` is called after a checkpoint was changed. The checkpoints of
 * all runs come in pages, and each names its run; those of one run come together and are paged here.
 */
export function checkpointTable(changed, emptyText, pageOfAll = null) {
  const limit = pageOfAll ?? PAGE_OF_RUN;
  let offset = 0;
  const rows = h("tbody");
  const titles = ["Checkpoint", "Kind", ">Size", "Saved", "Expires", "Access", ">Actions"];
  const list = h("div", { class: "card table", hidden: true }, table(titles, rows));
  const empty = h(
    "p",
    { class: "card muted", hidden: true },
    `${emptyText} `,
    h("code", {}, 'training.save_state("name")'),
    " keeps what is needed to go on, ",
    h("code", {}, 'training.save_weights_for_sampler("name")'),
    " what is needed to sample.",
  );
  const pages = pager((to) => {
    offset = to;
    element.show(element.saved);
  });
  const element = h("div", {}, list, empty, pages);
  element.show = (saved) => {
    element.saved = saved;
    list.hidden = saved.length === 0;
    empty.hidden = saved.length > 0;
    while (offset > 0 && offset >= saved.length) offset -= limit; // the last one of a page was deleted
    if (!pageOfAll) pages.show({ offset, limit, total_count: saved.length });
    keyed(
      rows,
      saved.slice(offset, offset + limit),
      (one) => one.tinker_path,
      (one) => makeRow(one, changed, pageOfAll !== null),
    );
  };
  return element;
}

function makeRow(first, changed, namesRun) {
  let saved = first;
  const runId = runIn(first.tinker_path);
  const name = first.checkpoint_id.split("/").slice(1).join("/");
  const address = path("api/v1/training_runs", runId, "checkpoints", first.checkpoint_id);
  const time = h("span", { class: "num", title: exactly(first.time) });
  const expiry = h("span", { class: "num" });
  const access = h("span");
  const problem = h("div", { class: "row-problem" });

  const act = async (work, told) => {
    problem.replaceChildren();
    try {
      await work();
      say(told);
      changed();
    } catch (caught) {
      if (caught.status === 401) return;
      problem.replaceChildren(notice(caught.message));
    }
  };
  const button = (text, label, work) => {
    const made = h("button", { type: "button", class: "small", "aria-label": `${label} ${name}` }, text);
    made.addEventListener("click", work);
    return made;
  };
  const publish = button("Publish", "Publish", () =>
    saved.public
      ? act(() => remove(`${address}/publish`), `${name} is private again.`)
      : act(() => post(`${address}/publish`), `${name} is public: every key of this service can read it.`),
  );
  const actions = h(
    "div",
    { class: "row-actions" },
    first.checkpoint_type === "sampler" &&
      h(
        "a",
        {
          class: "button small",
          href: `#/playground?model=${encodeURIComponent(first.tinker_path)}`,
          "aria-label": `Try ${name}`,
        },
        "Try",
      ),
    button("Download", "Download", () => act(() => download(address), `The download of ${name} begins.`)),
    publish,
    button("Expiry…", "Set the expiry of", async () => {
      const seconds = await askLife(name);
      if (seconds === null) return;
      const life = Number(seconds) || null;
      await act(
        () => put(`${address}/ttl`, { body: { ttl_seconds: life } }),
        life ? `${name} will be deleted when its time is over.` : `${name} does not expire.`,
      );
    }),
    button("Delete…", "Delete", async () => {
      if (await askDelete(name, first)) await act(() => remove(address), `${name} is deleted.`);
    }),
  );
  const run = namesRun && h("a", { class: "small-text", href: `#/runs/${encodeURIComponent(runId)}` }, nameOf(runId));
  const made = row(
    cell("", "lead", h("span", { class: "strong" }, name), run, problem),
    cell("Kind", "", KINDS[first.checkpoint_type] ?? first.checkpoint_type),
    cell("Size", "right num", first.size_bytes === null ? "" : bytes(first.size_bytes)),
    cell("Saved", "", time),
    cell("Expires", "", expiry),
    cell("Access", "", access),
    cell("", "wide", actions),
  );
  made.update = (now) => {
    saved = now;
    setText(time, when(now.time));
    setText(expiry, now.expires_at ? when(now.expires_at) : "never");
    expiry.title = now.expires_at ? exactly(now.expires_at) : "";
    expiry.classList.toggle("muted", !now.expires_at);
    setText(access, now.public ? "Public" : "Private");
    access.className = now.public ? "tag is-public" : "muted";
    setText(publish, now.public ? "Unpublish" : "Publish");
    publish.setAttribute("aria-label", `${now.public ? "Unpublish" : "Publish"} ${name}`);
  };
  return made;
}

/** The browser downloads the file itself, from a signed link: the data do not pass through this page. */
async function download(address) {
  const { url } = await get(`${address}/archive`, { query: { redirect: "false" } });
  const link = h("a", { href: url, rel: "noreferrer" });
  document.body.append(link);
  link.click();
  link.remove();
}

function askDelete(name, saved) {
  return ask({
    title: `Delete ${name}?`,
    content: [
      h("p", {}, `Its files (${bytes(saved.size_bytes ?? 0)}) are deleted permanently.`),
      h("p", { class: "muted id" }, saved.tinker_path),
    ],
    agree: "Delete",
    isDanger: true,
  });
}

function askLife(name) {
  const choice = h("select", { id: "life" }, ...LIVES.map(([seconds, text]) => h("option", { value: seconds }, text)));
  const days = h("input", { id: "days", type: "number", min: "1", max: "3650", value: "90", step: "1" });
  const other = h("p", { hidden: true }, h("label", { for: "days" }, "Days"), days);
  choice.addEventListener("change", () => {
    other.hidden = choice.value !== "other";
  });
  return ask({
    title: `When does ${name} expire?`,
    content: [
      h("p", {}, "Counted from now. An expired checkpoint is deleted with its files."),
      h("p", {}, h("label", { for: "life" }, "Expires"), choice),
      other,
    ],
    agree: "Set",
    read: () => (choice.value === "other" ? String(Math.round(Number(days.value) * 86400)) : choice.value),
  });
}
