// Draws plots as SVG: axes, lines, and one cursor for all plots of a page, moved by mouse, finger and arrow keys.

import { h, svg } from "./dom.js";
import { NONE, count } from "./format.js";
import { range, smooth, thin, ticks, tickText, wholeTicks } from "./scale.js";

const TOP = 10;
const BOTTOM = 24;
const RIGHT = 12;
const SMOOTH_FROM = 40;
/** With fewer points than this, each is drawn as a dot too. */
const DOTS_BELOW = 40;

/** Plots that share a cursor. `at` is an index into the list of steps, or null. */
export class Cursor {
  constructor() {
    this.at = null;
    this.plots = [];
  }

  move(at) {
    if (at === this.at) return;
    this.at = at;
    for (const plot of this.plots) plot.point();
  }
}

export class Plot {
  /** `lines` are { label, kind, of(step), text(value) }; `kind` is a CSS class with the colour. */
  constructor({ title, lines, cursor, fromZero = false, isTall = false }) {
    Object.assign(this, { title, lines, cursor, fromZero, isSmooth: false, steps: [] });
    cursor.plots.push(this);
    this.readout = h("p", { class: "readout num" });
    this.drawing = svg("svg", {
      class: "drawing",
      role: "slider",
      tabindex: "0",
      "aria-label": `${title}. Arrow keys move from step to step.`,
      "aria-valuemin": "1",
    });
    this.empty = h("p", { class: "plot-empty muted" }, "Nothing yet.");
    this.element = h(
      "figure",
      { class: isTall ? "plot is-tall" : "plot" },
      h("figcaption", {}, h("h2", {}, title), this.readout),
      this.drawing,
      this.empty,
    );
    this.drawing.addEventListener("pointermove", (event) => this.follow(event));
    this.drawing.addEventListener("pointerdown", (event) => this.follow(event));
    this.drawing.addEventListener("pointerleave", () => cursor.move(null));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    this.drawing.addEventListener("blur", () => cursor.move(null));
    this.sized = new ResizeObserver(() => this.draw(this.steps));
    this.sized.observe(this.element);
  }

  draw(steps) {
    this.steps = steps;
    const values = this.lines.map((line) => points(steps, line.of));
    const span = range(
      values.flat().map(([, x]) => x),
      this.fromZero,
    );
    this.empty.hidden = span !== null;
    this.drawing.toggleAttribute("hidden", span === null);
    if (span === null) return;
    this.drawing.setAttribute("aria-valuemax", String(steps.length));
    this.frame(span);
    const layers = this.axes();
    this.lines.forEach((line, n) => layers.push(...this.line(line, values[n])));
    this.pointer = svg("g", { class: "pointer" });
    this.drawing.replaceChildren(...layers, this.pointer);
    this.point();
  }

  frame([low, high]) {
    const width = Math.max(240, this.drawing.clientWidth || 600);
    const height = this.drawing.clientHeight || 200;
    const { step, values } = ticks(low, high, height / 48);
    this.yTicks = values.map((x) => [x, tickText(x, step)]);
    const left = 16 + 7 * Math.max(4, ...this.yTicks.map(([, text]) => text.length));
    const last = Math.max(2, this.steps.length);
    this.x = (place) => left + ((width - left - RIGHT) * place) / (last - 1);
    this.y = (x) => TOP + ((height - TOP - BOTTOM) * (high - x)) / (high - low);
    this.box = { left, width, height, last };
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  axes() {
    const { left, width, height, last } = this.box;
    const made = [];
    for (const [x, text] of this.yTicks) {
      const y = this.y(x).toFixed(1);
      made.push(svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y, y2: y }));
      made.push(svg("text", { class: "tick", x: left - 8, y, dy: "0.32em", "text-anchor": "end" }, text));
    }
    for (const n of wholeTicks(1, last, Math.max(2, (width - left) / 72))) {
      const x = this.x(n - 1);
      const anchor = x > width - 24 ? "end" : "middle";
      made.push(svg("text", { class: "tick", x: x.toFixed(1), y: height - 6, "text-anchor": anchor }, count(n)));
    }
    made.push(svg("text", { class: "tick", x: left - 8, y: height - 6, "text-anchor": "end" }, "step"));
    return made;
  }

  line({ kind }, found) {
    if (found.length === 0) return [];
    const most = Math.round(this.box.width * 1.5);
    const isSmoothed = this.isSmooth && found.length >= SMOOTH_FROM;
    const made = [
      svg("path", { class: `line ${kind}${isSmoothed ? " is-faint" : ""}`, d: this.path(thin(found, most)) }),
    ];
    if (isSmoothed) made.push(svg("path", { class: `line ${kind}`, d: this.path(thin(smooth(found), most)) }));
    if (found.length < DOTS_BELOW) {
      const radius = found.length === 1 ? 3.5 : 2.2;
      made.push(
        ...found.map(([place, x]) =>
          svg("circle", { class: `dot ${kind}`, cx: this.x(place), cy: this.y(x), r: radius }),
        ),
      );
    }
    return made;
  }

  path(found) {
    return found.map(([place, x], n) => `${n ? "L" : "M"}${this.x(place).toFixed(1)} ${this.y(x).toFixed(1)}`).join("");
  }

  /** Shows the values at the cursor, or the last values. */
  point() {
    const { at } = this.cursor;
    const isPointing = at !== null && at < this.steps.length;
    const told = this.lines.map((line) => [line, isPointing ? line.of(this.steps[at]) : latest(this.steps, line.of)]);
    this.readout.replaceChildren(
      h("span", { class: "muted" }, isPointing ? `step ${count(at + 1)}` : "latest"),
      ...told.map(([line, x]) =>
        h("span", { class: `value ${line.kind}` }, `${line.label} `, h("b", {}, isNumber(x) ? line.text(x) : NONE)),
      ),
    );
    const step = isPointing ? at : this.steps.length - 1;
    this.drawing.setAttribute("aria-valuenow", String(step + 1));
    this.drawing.setAttribute(
      "aria-valuetext",
      `step ${step + 1}: ${told.map(([line, x]) => `${line.label} ${isNumber(x) ? line.text(x) : "none"}`).join(", ")}`,
    );
    if (!this.pointer) return;
    this.pointer.replaceChildren();
    if (!isPointing) return;
    const x = this.x(at).toFixed(1);
    this.pointer.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.box.height - BOTTOM }));
    for (const [line, y] of told) {
      if (isNumber(y)) this.pointer.append(svg("circle", { class: `spot ${line.kind}`, cx: x, cy: this.y(y), r: 4 }));
    }
  }

  follow(event) {
    const bounds = this.drawing.getBoundingClientRect();
    const { left, width, last } = this.box;
    const x = ((event.clientX - bounds.left) * width) / bounds.width;
    const place = Math.round(((x - left) / (width - left - RIGHT)) * (last - 1));
    this.cursor.move(Math.max(0, Math.min(this.steps.length - 1, place)));
  }

  key(event) {
    const last = this.steps.length - 1;
    const at = this.cursor.at ?? last;
    const far = Math.max(1, Math.round(last / 10));
    const to = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageDown: at - far,
      PageUp: at + far,
      Home: 0,
      End: last,
      Escape: null,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.cursor.move(to === null ? null : Math.max(0, Math.min(last, to)));
  }

  close() {
    this.sized.disconnect();
  }
}

/** A line without axes, for a row of a table. Steps may be missing: each is drawn at its number. */
export function sparkline() {
  const width = 120;
  const height = 28;
  const element = svg("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  element.draw = (steps) => {
    const mark = `${steps.length} ${steps[steps.length - 1]?.seq_id}`;
    if (element.dataset.mark === mark) return;
    element.dataset.mark = mark;
    element.replaceChildren();
    const known = points(steps, (step) => step.loss).map(([place, x]) => [steps[place].seq_id, x]);
    if (known.length === 0) return;
    const found = thin(known, width);
    const values = found.map(([, x]) => x);
    const [low, high] = range(values, false);
    const [first, last] = [found[0][0], found[found.length - 1][0]];
    const at = ([n, x]) => [
      (3 + ((width - 8) * (n - first)) / Math.max(1, last - first)).toFixed(1),
      (3 + ((height - 6) * (high - x)) / (high - low)).toFixed(1),
    ];
    const path = `M${found.map((point) => at(point).join(" ")).join("L")}`;
    if (found.length > 1) element.append(svg("path", { class: "line is-loss", d: path }));
    const [cx, cy] = at(found[found.length - 1]);
    element.append(svg("circle", { class: "dot is-loss", cx, cy, r: 2.4 }));
  };
  return element;
}

function points(steps, of) {
  const found = [];
  steps.forEach((step, place) => {
    const x = of(step);
    if (isNumber(x)) found.push([place, x]);
  });
  return found;
}

function latest(steps, of) {
  for (let place = steps.length - 1; place >= 0; place -= 1) {
    const x = of(steps[place]);
    if (isNumber(x)) return x;
  }
  return null;
}

function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}
