// Creates elements from text and other elements. All data of the service enter the page here, as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a", { class: "x", href, onclick }, "text", child)`. Null and false children are left out. */
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Sets the text only if it changed: setting the same text would drop the user's selection. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Replaces the children, unless `mark` is the same as last time. */
export function fill(element, mark, make) {
  if (element.dataset.mark === mark) return;
  element.dataset.mark = mark;
  element.replaceChildren(...[make()].flat().filter(Boolean));
}

/**
 * Keeps one child per item, in order. A node stays while its item does, so that focus and hover survive a refresh.
 * `make(item)` returns a node with a method `update(item)`.
 */
export function keyed(parent, items, keyOf, make) {
  const standing = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const wanted = items.map((item) => {
    const key = keyOf(item);
    let node = standing.get(key);
    standing.delete(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    node.update(item);
    return node;
  });
  for (const node of standing.values()) node.remove();
  wanted.forEach((node, place) => {
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
  });
}

/** Shows a message at the bottom of the page for a while; screen readers read it out. */
export function say(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.add("is-shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => status.classList.remove("is-shown"), 5000);
}

export function heading(text, ...beside) {
  return h("div", { class: "heading" }, h("h1", { tabindex: "-1" }, text), ...beside);
}

export function notice(text, kind = "error") {
  return h("p", { class: `notice is-${kind}`, role: kind === "error" ? "alert" : null }, text);
}

/** A text to type or copy. */
export function code(text, label) {
  const button = h("button", { type: "button", class: "quiet small", "aria-label": `Copy: ${label}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied.");
    } catch {
      say("The browser does not let this page copy. Select the text instead.");
    }
  });
  return h("div", { class: "code" }, h("pre", { tabindex: "0", "aria-label": label }, h("code", {}, text)), button);
}

/**
 * A table that becomes cards on a narrow screen. ARIA roles are explicit: a browser drops those of a table with another
 * layout. Columns whose title begins with ">" are right-aligned.
 */
export function table(titles, rows) {
  const heads = titles.map((title) =>
    h(
      "th",
      { scope: "col", role: "columnheader", class: title.startsWith(">") ? "right" : null },
      title.replace(">", ""),
    ),
  );
  rows.setAttribute("role", "rowgroup");
  return h(
    "table",
    { class: "cards", role: "table" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
    rows,
  );
}

export function row(...cells) {
  return h("tr", { role: "row" }, cells);
}

/** `label` is shown before the value where the column titles are hidden. */
export function cell(label, kind, ...children) {
  return h("td", { role: "cell", class: kind || null, "data-label": label || null }, children);
}

/** Links to the previous and next page of a list. `go(offset)` is called with the offset of that page. */
export function pager(go) {
  const told = h("span", { class: "muted num" });
  const newer = h("button", { type: "button", class: "small" }, "Newer");
  const older = h("button", { type: "button", class: "small" }, "Older");
  const element = h("nav", { class: "pager", "aria-label": "Pages of the list", hidden: true }, newer, told, older);
  let now = { offset: 0, limit: 1, total_count: 0 };
  newer.addEventListener("click", () => go(Math.max(0, now.offset - now.limit)));
  older.addEventListener("click", () => go(now.offset + now.limit));
  element.show = (cursor) => {
    now = cursor;
    const last = Math.min(cursor.offset + cursor.limit, cursor.total_count);
    element.hidden = cursor.total_count <= cursor.limit && cursor.offset === 0;
    newer.disabled = cursor.offset === 0;
    older.disabled = last >= cursor.total_count;
    setText(told, `${Math.min(cursor.offset + 1, last)}–${last} of ${cursor.total_count}`);
  };
  return element;
}
