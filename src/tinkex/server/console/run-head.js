// The head of a run's page: its name, tags and state, and what can be done with it.

import { get, key, patch, path, remove, url } from "./api.js";
import { ask } from "./dialog.js";
import { fill, h, heading, notice, say, setText } from "./dom.js";
import { count, plural, runName, shortId } from "./format.js";
import { showStatus } from "./status.js";

const MOST_NAMED = 8;

export function runHead(id, changed) {
  const title = heading("Run", h("span", { class: "state" }));
  const [name, state] = title.children;
  const tags = h("span", { class: "tags" });
  const problem = h("div");
  const address = path("api/v1/training_runs", id);
  let run = null;

  const act = async (work, told) => {
    problem.replaceChildren();
    try {
      await work();
      if (told) say(told);
      changed();
    } catch (caught) {
      if (caught.status !== 401) problem.replaceChildren(notice(caught.message));
    }
  };
  const setTags = (wanted, told) => act(() => patch(address, { body: { tags: wanted } }), told);
  const button = (text, work, label = null) => {
    const made = h("button", { type: "button", class: "small", "aria-label": label }, text);
    made.addEventListener("click", work);
    return made;
  };
  const archive = button("Archive", () => {
    const archived = !run?.archived_at;
    act(() => patch(address, { body: { archived } }), archived ? "The run is archived: the list leaves it out." : "The run is back in the list.");
  });
  const actions = h(
    "div",
    { class: "actions run-actions" },
    button("Rename…", async () => {
      const given = await askText("Rename this run", "Name", run?.name ?? runName(run));
      if (given) await act(() => patch(address, { body: { name: given } }), "The run has a new name.");
    }),
    button("Add tag…", async () => {
      const given = await askText("Add a tag", "Tag", "");
      if (given) await setTags([...new Set([...(run.tags ?? []), given])], `Tagged ${given}.`);
    }),
    button("CSV", () => act(() => download(id, "csv")), "Download steps and metrics as CSV"),
    button("JSONL", () => act(() => download(id, "jsonl")), "Download steps and metrics as JSON lines"),
    archive,
    button("Delete…", async () => {
      if (await deleteRun(id, runName(run), act)) location.hash = "#/runs";
    }),
  );

  function show(now, isActive) {
    run = now;
    setText(name, runName(run));
    document.title = `${runName(run)} · tinkex`;
    showStatus(state, run, isActive);
    setText(archive, run.archived_at ? "Restore" : "Archive");
    fill(tags, JSON.stringify([run.tags, run.archived_at]), () => [
      run.archived_at && h("span", { class: "tag is-refused" }, "Archived"),
      ...(run.tags ?? []).map((tag) =>
        h(
          "span",
          { class: "tag" },
          h("a", { href: `#/runs?tag=${encodeURIComponent(tag)}` }, tag),
          button("×", () => setTags(run.tags.filter((other) => other !== tag), `The tag ${tag} is gone.`), `Remove the tag ${tag}`),
        ),
      ),
    ]);
  }
  title.append(tags);
  const crumb = h("p", { class: "crumb" }, h("a", { href: "#/runs" }, "Runs"));
  return { elements: [crumb, title, h("p", { class: "muted id" }, id), actions, problem], show };
}

async function askText(title, label, before) {
  const field = h("input", { id: "text", value: before, maxlength: "120", autofocus: true });
  const given = await ask({
    title,
    content: h("p", {}, h("label", { for: "text" }, label), field),
    agree: "Save",
    read: () => field.value.trim(),
  });
  return given || null;
}

/** Asks, naming what depends on the run, and deletes. Returns whether it is gone. */
export async function deleteRun(id, name, act) {
  const address = path("api/v1/training_runs", id);
  const { checkpoints: saved } = await get(`${address}/checkpoints`).catch(() => ({ checkpoints: [] }));
  const more = saved.length - MOST_NAMED;
  const named = saved.slice(0, MOST_NAMED).map((one) => h("li", { class: "id" }, one.checkpoint_id));
  const told = [
    h("p", {}, "Its curves, metrics and samples are deleted permanently."),
    saved.length > 0 && h("p", {}, `${plural(saved.length, "checkpoint")} of it will go too, and what samples from there stops working:`),
    saved.length > 0 && h("ul", { class: "named" }, named, more > 0 && h("li", {}, `and ${count(more)} more`)),
    h("p", { class: "muted id" }, id),
  ].filter(Boolean);
  const title = `Delete ${name}?`;
  const agree = saved.length > 0 ? "Delete with checkpoints" : "Delete";
  if (!(await ask({ title, content: told, agree, isDanger: true }))) return false;
  let isGone = false;
  await act(async () => {
    isGone = await removeRun(address, saved.length > 0, title);
  });
  if (isGone) say(`${name} is deleted.`);
  return isGone;
}

/** Deletes a run. If the service names something else that depends on it, the user decides again. */
async function removeRun(address, force, title) {
  try {
    await remove(address, { query: { force } });
  } catch (caught) {
    if (caught.status !== 409) throw caught;
    const agree = "Delete it all";
    if (!(await ask({ title, content: h("p", {}, caught.message), agree, isDanger: true }))) return false;
    await remove(address, { query: { force: true } });
  }
  return true;
}

/** The key travels in a header, so the page fetches the file and hands it to the browser. */
async function download(id, format) {
  const answer = await fetch(url(path("api/v1/training_runs", id, "history"), { format }), {
    headers: key() ? { "x-api-key": key() } : {},
  });
  if (!answer.ok) throw Object.assign(new Error(`The service responded with status ${answer.status}.`), { status: answer.status });
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: `${shortId(id).replace(/[^\w-]+/g, "-")}.${format}` });
  document.body.append(link);
  link.click();
  link.remove();
  URL.revokeObjectURL(link.href);
}
