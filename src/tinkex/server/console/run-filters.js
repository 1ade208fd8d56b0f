// Search, filters, order and page of the list of runs. They are kept in the address, so that a list can be shared.

import { fill, h } from "./dom.js";
import { STATUSES } from "./status.js";

const WAIT_MS = 250;
const ARCHIVED = { "": "Not archived", only: "Archived", all: "With archived" };
const ORDERS = { "": "Newest first", last_request: "Last activity", name: "Name", steps: "Most steps", loss: "Lowest loss" };
const NAMES = ["q", "status", "tag", "base_model", "archived", "order"];

export function runFilters(query, changed) {
  const chosen = Object.fromEntries(NAMES.map((name) => [name, query.get(name) ?? ""]));
  let offset = Number(query.get("offset")) || 0;
  const tags = new Set(chosen.tag ? [chosen.tag] : []);
  const models = new Set(chosen.base_model ? [chosen.base_model] : []);
  const search = h("input", { id: "search", type: "search", placeholder: "Name, tag or id", value: chosen.q });
  const choices = {
    status: select("status", "Status", { "": "Any status", ...STATUSES }),
    tag: select("tag", "Tag", { "": "Any tag" }),
    base_model: select("base_model", "Model", { "": "Any model" }),
    archived: select("archived", "Archive", ARCHIVED),
    order: select("order", "Order", ORDERS),
  };
  const element = h(
    "div",
    { class: "filters", role: "search", "aria-label": "Runs" },
    h("span", { class: "search" }, h("label", { for: "search" }, "Search"), search),
    Object.values(choices).map(({ box }) => box),
  );
  let timer = null;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => set("q", search.value.trim()), WAIT_MS);
  });

  function select(name, label, options) {
    const list = h("select", { id: `by-${name}` });
    const show = (wanted) =>
      fill(list, JSON.stringify(wanted), () =>
        Object.entries(wanted).map(([key, text]) => h("option", { value: key, selected: key === chosen[name] }, text)),
      );
    show(options);
    list.addEventListener("change", () => set(name, list.value));
    return { list, show, box: h("span", {}, h("label", { for: `by-${name}` }, label), list) };
  }

  function set(name, wanted) {
    chosen[name] = wanted;
    offset = 0;
    keep();
    changed();
  }

  /** Writes the choices into the address, without a new entry in the history. */
  function keep() {
    const kept = new URLSearchParams(Object.entries(chosen).filter(([, wanted]) => wanted));
    if (offset) kept.set("offset", String(offset));
    history.replaceState(null, "", `#/runs${kept.size ? `?${kept}` : ""}`);
  }

  function showAll(name, label, found) {
    choices[name].show({ "": label, ...Object.fromEntries([...found].sort().map((word) => [word, word])) });
  }

  return {
    element,
    get isNarrow() {
      return offset > 0 || NAMES.some((name) => name !== "order" && chosen[name] !== "");
    },
    query: (limit) => ({ ...chosen, limit, offset, brief: true }),
    setOffset(to) {
      offset = to;
      keep();
    },
    reset() {
      for (const name of NAMES) chosen[name] = "";
      search.value = "";
      for (const { list } of Object.values(choices)) list.value = "";
      set("q", "");
    },
    /** Offers the tags and models of the runs that were seen. */
    learn(runs) {
      const before = tags.size + models.size;
      for (const run of runs) {
        for (const tag of run.tags ?? []) tags.add(tag);
        models.add(run.base_model);
      }
      if (tags.size + models.size === before) return;
      showAll("tag", "Any tag", tags);
      showAll("base_model", "Any model", models);
    },
    learnModels(found) {
      const before = models.size;
      for (const name of found) models.add(name);
      if (models.size > before) showAll("base_model", "Any model", models);
    },
  };
}
