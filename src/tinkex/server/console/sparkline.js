// A line without axes, for a row of a table.

import { svg } from "./dom.js";
import { range, thin } from "./scale.js";

const WIDTH = 120;
const HEIGHT = 28;

/** An element with a method `draw(points)`; points are [x, y], in the order of x. */
export function sparkline() {
  const element = svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  element.draw = (points) => {
    const mark = `${points.length} ${points[points.length - 1]}`;
    if (element.dataset.mark === mark) return;
    element.dataset.mark = mark;
    element.replaceChildren();
    if (points.length === 0) return;
    const found = thin(points, WIDTH);
    const [low, high] = range(
      found.map(([, y]) => y),
      false,
    );
    const [first, last] = [found[0][0], found[found.length - 1][0]];
    const at = ([x, y]) => [
      (3 + ((WIDTH - 8) * (x - first)) / Math.max(1, last - first)).toFixed(1),
      (3 + ((HEIGHT - 6) * (high - y)) / (high - low)).toFixed(1),
    ];
    const path = `M${found.map((point) => at(point).join(" ")).join("L")}`;
    if (found.length > 1) element.append(svg("path", { class: "line is-loss", d: path }));
    const [cx, cy] = at(found[found.length - 1]);
    element.append(svg("circle", { class: "dot is-loss", cx, cy, r: 2.4 }));
  };
  return element;
}
