// The plots of a page, in groups, with the choices that hold for all of them. One run has a colour for each curve;
// where several runs are compared, each has one colour in all plots.

import { AXES } from "./axis.js";
import { curvesOf, GROUPS } from "./curves.js";
import { h } from "./dom.js";
import { Cursor, Plot } from "./plot.js";

const FOLDED = "Other metrics of the service";
/** How much of a line each point of the smoothed line is the mean of. */
const PARTS = [0, 0.01, 0.03, 0.1, 0.3];
const choices = { axis: "step", isLog: false, smoothing: 2 };

export class Board {
  /** `zoomed(span, axis)` is called with the part of the x axis that is in view, or null. */
  constructor(zoomed = () => {}) {
    this.runs = [];
    this.plots = new Map();
    this.groups = new Map();
    this.cursor = new Cursor((span) => {
      this.whole.hidden = span === null;
      zoomed(span, choices.axis);
    });
    this.whole = h("button", { type: "button", class: "small", hidden: true }, "Whole run");
    this.whole.addEventListener("click", () => this.cursor.zoom(null));
    this.empty = h("p", { class: "card muted" }, "Nothing to draw yet: the first step has not ended.");
    this.element = h("section", { "aria-label": "Plots" }, this.options(), this.empty);
  }

  options() {
    const axis = h(
      "select",
      { id: "axis" },
      Object.entries(AXES).map(([name, { choice }]) => h("option", { value: name, selected: name === choices.axis }, choice)),
    );
    axis.addEventListener("change", () => {
      choices.axis = axis.value;
      this.cursor.zoom(null);
      this.redraw();
    });
    const log = h("input", { type: "checkbox", id: "log", checked: choices.isLog });
    log.addEventListener("change", () => {
      choices.isLog = log.checked;
      this.redraw();
    });
    const smooth = h("input", { type: "range", id: "smooth", min: 0, max: PARTS.length - 1, step: 1, value: choices.smoothing });
    smooth.addEventListener("input", () => {
      choices.smoothing = Number(smooth.value);
      this.redraw();
    });
    return h(
      "div",
      { class: "plot-options", role: "group", "aria-label": "How the plots are drawn" },
      h("span", {}, h("label", { for: "axis" }, "Over"), axis),
      h("span", {}, log, h("label", { for: "log" }, "Log scale")),
      h("span", {}, h("label", { for: "smooth" }, "Smoothing"), smooth),
      this.whole,
    );
  }

  /** `runs` are { name, kind, steps, entries, start }; if they are compared, `kind` is the CSS class with a run's colour. */
  draw(runs, isCompared = false) {
    this.runs = runs;
    this.isCompared = isCompared;
    this.redraw();
  }

  redraw() {
    const isOne = !this.isCompared;
    const found = new Map();
    for (const run of this.runs) {
      for (const curve of curvesOf(run, choices.axis)) {
        const title = isOne || !curve.label ? curve.plot : `${curve.plot}: ${curve.label}`;
        const key = `${curve.group}\n${title}`;
        if (!found.has(key)) found.set(key, { title, group: curve.group, isFromZero: curve.isFromZero, lines: [] });
        found.get(key).lines.push(isOne ? curve : { ...curve, label: run.name, kind: run.kind });
      }
    }
    if (!this.cursor.span) this.cursor.extent = extentOf([...found.values()].flatMap(({ lines }) => lines));
    this.empty.hidden = found.size > 0;
    this.show(found);
  }

  show(found) {
    for (const [key, plot] of this.plots) {
      if (found.has(key)) continue;
      plot.close();
      plot.element.remove();
      this.plots.delete(key);
    }
    for (const group of GROUPS) this.grid(group);
    for (const [key, { title, group, isFromZero, lines }] of found) {
      let plot = this.plots.get(key);
      if (!plot) {
        const isTall = group === "Loss" && this.grid(group).childElementCount === 0;
        this.plots.set(key, (plot = new Plot({ title, cursor: this.cursor, isTall })));
        this.grid(group).append(plot.element);
      }
      plot.draw(lines, { axis: choices.axis, isLog: choices.isLog, part: PARTS[choices.smoothing], isFromZero });
    }
    for (const grid of this.groups.values()) grid.parentElement.hidden = grid.childElementCount === 0;
  }

  grid(group) {
    if (!this.groups.has(group)) {
      const grid = h("div", { class: "plots" });
      this.groups.set(group, grid);
      const title = h("h2", { class: "section" }, group);
      this.element.append(
        group === FOLDED ? h("details", {}, h("summary", {}, title), grid) : h("section", { "aria-label": group }, title, grid),
      );
    }
    return this.groups.get(group);
  }

  close() {
    for (const plot of this.plots.values()) plot.close();
  }
}

/** The first and the last x of all lines. */
function extentOf(lines) {
  const ends = lines.flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
  return [Math.min(...ends), Math.max(...ends)];
}
