// Draws plots as SVG: axes, lines, and one cursor and one zoom for all plots of a page, moved by mouse, finger and keys.

import { AXES } from "./axis.js";
import { h, svg } from "./dom.js";
import { measure, NONE } from "./format.js";
import { logRange, logTicks, nearest, range, smooth, thin, ticks, tickText } from "./scale.js";

const TOP = 10;
const BOTTOM = 24;
const RIGHT = 12;
/** With fewer points than this, each is drawn as a dot too, and nothing is smoothed. */
const DOTS_BELOW = 40;
const DRAG_FROM = 6;
/** A line is read at the cursor if it has a point so near, as a part of what is in view. */
const NEAR = 0.015;

/** Plots that share a cursor and a zoom. `x` is a value of the x axis or null, `span` the part in view or null. */
export class Cursor {
  constructor(zoomed = () => {}) {
    this.x = null;
    this.span = null;
    this.extent = [0, 0]; // all of the x axis
    this.plots = new Set();
    this.zoomed = zoomed;
  }

  move(x) {
    if (x === this.x) return;
    this.x = x;
    for (const plot of this.plots) plot.point();
  }

  zoom(span) {
    this.span = span;
    this.x = null;
    for (const plot of this.plots) plot.redraw();
    this.zoomed(span);
  }
}

export class Plot {
  constructor({ title, cursor, isTall = false }) {
    Object.assign(this, { title, cursor, lines: [], options: { axis: "step", part: 0 } });
    cursor.plots.add(this);
    this.readout = h("p", { class: "readout num" });
    this.drawing = svg("svg", {
      class: "drawing",
      role: "slider",
      tabindex: "0",
      "aria-label": `${title}. Arrow keys move along the line, plus and minus zoom.`,
      "aria-valuemin": "1",
    });
    this.empty = h("p", { class: "plot-empty muted", hidden: true }, "Nothing yet.");
    this.element = h(
      "figure",
      { class: isTall ? "plot is-tall" : "plot" },
      h("figcaption", {}, h("h3", {}, title), this.readout),
      this.drawing,
      this.empty,
    );
    this.drawing.addEventListener("pointermove", (event) => this.follow(event));
    this.drawing.addEventListener("pointerdown", (event) => this.press(event));
    this.drawing.addEventListener("pointerup", (event) => this.release(event));
    this.drawing.addEventListener("dblclick", () => cursor.zoom(null));
    this.drawing.addEventListener("pointerleave", () => cursor.move(null));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    this.drawing.addEventListener("blur", () => cursor.move(null));
    this.sized = new ResizeObserver(() => {
      if (this.drawing.clientWidth !== this.box?.width) this.redraw();
    });
    this.sized.observe(this.element);
    this.seen = new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen && this.isStale) this.redraw();
    }, { rootMargin: "800px" });
    this.seen.observe(this.element);
  }

  /** `lines` are { label, kind, text, points }: a CSS class with the colour, and [x, y] in the order of x. */
  draw(lines, options) {
    Object.assign(this, { lines, options });
    this.redraw();
  }

  /** A plot out of sight is drawn when it comes into view. */
  redraw() {
    this.isStale = !this.isSeen;
    if (this.isStale) return;
    const { isLog, isFromZero } = this.options;
    this.shown = this.lines.map((line) => this.inView(line.points));
    const ys = this.shown.flatMap((points) => points.map(([, y]) => y));
    const above = isLog ? ys.filter((y) => y > 0) : [];
    this.isLog = above.length > 0;
    if (this.isLog) this.shown = this.shown.map((points) => points.filter(([, y]) => y > 0));
    const span = this.isLog ? logRange(above) : range(ys, isFromZero);
    this.empty.hidden = span !== null;
    this.drawing.toggleAttribute("hidden", span === null);
    if (span === null) return;
    this.frame(span);
    const layers = this.axes();
    this.lines.forEach((line, n) => layers.push(...this.line(line, this.shown[n])));
    this.pointer = svg("g", { class: "pointer" });
    this.drawing.replaceChildren(...layers, this.pointer);
    this.point();
  }

  inView(points) {
    const { span } = this.cursor;
    if (!span || points.length === 0) return points;
    const [from, to] = [nearest(points, span[0]), nearest(points, span[1])];
    return points.slice(from, to + 1).filter(([x]) => x >= span[0] && x <= span[1]);
  }

  frame([low, high]) {
    const width = Math.max(240, this.drawing.clientWidth || 600);
    const height = this.drawing.clientHeight || 200;
    const isLog = this.isLog;
    if (isLog) {
      this.yTicks = logTicks(low, high, height / 48).map((y) => [y, measure(y)]);
    } else {
      const { step, values } = ticks(low, high, height / 48);
      this.yTicks = values.map((y) => [y, tickText(y, step)]);
    }
    const left = 16 + 7 * Math.max(4, ...this.yTicks.map(([, text]) => text.length));
    const ends = this.shown.filter((points) => points.length > 0);
    const first = this.cursor.span?.[0] ?? Math.min(...ends.map((points) => points[0][0]));
    const last = this.cursor.span?.[1] ?? Math.max(...ends.map((points) => points[points.length - 1][0]));
    const wide = last - first || 1;
    const [bottom, top] = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
    this.x = (x) => left + ((width - left - RIGHT) * (x - first)) / wide;
    this.y = (y) => TOP + ((height - TOP - BOTTOM) * (top - (isLog ? Math.log10(y) : y))) / (top - bottom);
    this.box = { left, width, height, first, last: first + wide };
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  axes() {
    const { left, width, height, first, last } = this.box;
    const axis = AXES[this.options.axis];
    const made = [];
    for (const [y, text] of this.yTicks) {
      const at = this.y(y).toFixed(1);
      made.push(svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: at, y2: at }));
      made.push(svg("text", { class: "tick", x: left - 8, y: at, dy: "0.32em", "text-anchor": "end" }, text));
    }
    for (const [x, text] of axis.ticks(first, last, Math.max(2, (width - left) / 84))) {
      const at = this.x(x);
      const anchor = at > width - 28 ? "end" : "middle";
      made.push(svg("text", { class: "tick", x: at.toFixed(1), y: height - 6, "text-anchor": anchor }, text));
    }
    made.push(svg("text", { class: "tick", x: left - 8, y: height - 6, "text-anchor": "end" }, axis.title));
    return made;
  }

  line({ kind }, points) {
    if (points.length === 0) return [];
    const most = Math.round(this.box.width * 1.5);
    const isSmoothed = this.options.part > 0 && points.length >= DOTS_BELOW;
    const made = [
      svg("path", { class: `line ${kind}${isSmoothed ? " is-faint" : ""}`, d: this.path(thin(points, most)) }),
    ];
    if (isSmoothed) {
      made.push(svg("path", { class: `line ${kind}`, d: this.path(thin(smooth(points, this.options.part), most)) }));
    }
    if (points.length < DOTS_BELOW) {
      const r = points.length === 1 ? 3.5 : 2.2;
      made.push(...points.map(([x, y]) => svg("circle", { class: `dot ${kind}`, cx: this.x(x), cy: this.y(y), r })));
    }
    return made;
  }

  path(points) {
    return points.map(([x, y], n) => `${n ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
  }

  /** The points of the first line in view: those that the arrow keys go along. */
  get track() {
    return this.shown?.find((points) => points.length > 0) ?? [];
  }

  /** Shows the values at the cursor, or the last values. */
  point() {
    if (!this.shown || !this.box || this.isStale) return;
    const { x } = this.cursor;
    const near = (this.box.last - this.box.first) * NEAR;
    const found = this.shown.map((points) => {
      if (x === null || points.length === 0) return points[points.length - 1] ?? null;
      const point = points[nearest(points, x)];
      return Math.abs(point[0] - x) <= near ? point : null;
    });
    const axis = AXES[this.options.axis];
    const told = this.lines.map((line, n) => [line, found[n] ? line.text(found[n][1]) : NONE]);
    this.readout.replaceChildren(
      h("span", { class: "muted" }, x === null ? "latest" : axis.told(x)),
      ...told.map(([line, text]) => h("span", { class: `value ${line.kind}` }, `${line.label} `, h("b", {}, text))),
    );
    const [first, last] = [this.track[0], this.track[this.track.length - 1]];
    const at = x ?? last?.[0] ?? 0;
    this.drawing.setAttribute("aria-valuemin", String(first?.[0] ?? 0));
    this.drawing.setAttribute("aria-valuemax", String(last?.[0] ?? 0));
    this.drawing.setAttribute("aria-valuenow", String(at));
    this.drawing.setAttribute(
      "aria-valuetext",
      `${axis.told(at)}: ${told.map(([line, text]) => `${line.label} ${text === NONE ? "none" : text}`).join(", ")}`,
    );
    this.pointer.replaceChildren();
    if (x === null) return;
    const place = this.x(x).toFixed(1);
    this.pointer.append(svg("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: this.box.height - BOTTOM }));
    this.lines.forEach((line, n) => {
      if (!found[n]) return;
      this.pointer.append(
        svg("circle", { class: `spot ${line.kind}`, cx: this.x(found[n][0]), cy: this.y(found[n][1]), r: 4 }),
      );
    });
  }

  at(event) {
    const bounds = this.drawing.getBoundingClientRect();
    const { left, width, first, last } = this.box;
    const pixel = ((event.clientX - bounds.left) * width) / bounds.width;
    return Math.max(first, Math.min(last, first + ((pixel - left) / (width - left - RIGHT)) * (last - first)));
  }

  follow(event) {
    if (!this.box) return;
    const { track } = this;
    if (this.pressed !== undefined && Math.abs(event.clientX - this.pressed.pixel) > DRAG_FROM) {
      this.mark(this.pressed.x, this.at(event));
    } else if (track.length > 0) this.cursor.move(track[nearest(track, this.at(event))][0]);
  }

  /** A mouse selects what to zoom into; a finger moves the cursor and scrolls the page. */
  press(event) {
    this.follow(event);
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    this.drawing.setPointerCapture(event.pointerId);
    this.pressed = { x: this.at(event), pixel: event.clientX };
  }

  mark(from, to) {
    const [left, right] = [this.x(from), this.x(to)].sort((a, b) => a - b);
    const height = this.box.height - TOP - BOTTOM;
    this.pointer.replaceChildren(svg("rect", { class: "selection", x: left, width: right - left, y: TOP, height }));
  }

  release(event) {
    const { pressed } = this;
    this.pressed = undefined;
    if (!pressed || Math.abs(event.clientX - pressed.pixel) <= DRAG_FROM) return;
    this.cursor.zoom([pressed.x, this.at(event)].sort((a, b) => a - b));
  }

  key(event) {
    const { track, cursor } = this;
    if (track.length === 0) return;
    const last = track.length - 1;
    const at = cursor.x === null ? last : nearest(track, cursor.x);
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
    }[event.key];
    if (event.key === "Escape" && cursor.x !== null) cursor.move(null);
    else if (event.key === "Escape") cursor.zoom(null);
    else if (event.key === "+" || event.key === "-") this.scale(track[at][0], event.key === "+" ? 0.5 : 2);
    else if (to !== undefined) cursor.move(track[Math.max(0, Math.min(last, to))][0]);
    else return;
    event.preventDefault();
  }

  /** Zooms around `x`; back to everything if that is as much. */
  scale(x, factor) {
    const { first, last } = this.box;
    const half = ((last - first) * factor) / 2;
    const [least, most] = this.cursor.extent;
    const [from, to] = [Math.max(least, x - half), Math.min(most, x + half)];
    this.cursor.zoom(from <= least && to >= most ? null : [from, to]);
    this.cursor.move(x);
  }

  close() {
    this.sized.disconnect();
    this.seen.disconnect();
    this.cursor.plots.delete(this);
  }
}
