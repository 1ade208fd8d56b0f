// Prepares the data of a plot: ticks at round numbers, fewer points than pixels, a smoothed line. Pure.

import { count } from "./format.js";

const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];

/** Round numbers that cover `low` to `high` in about `wanted` steps. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step || 0);
  return { step, values: found };
}

/** Ticks at whole numbers only, for axes that count steps. */
export function wholeTicks(low, high, wanted) {
  const { step, values } = ticks(low, high, wanted);
  return step >= 1
    ? values.filter(Number.isInteger)
    : [...new Set(values.map(Math.round))].filter((n) => n >= low && n <= high);
}

/** Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there is room. */
export function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  const heads = decades < wanted / 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / wanted));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    if (power % every !== 0) continue;
    for (const head of heads) {
      const x = head * 10 ** power;
      if (x >= low * 0.999 && x <= high * 1.001) found.push(x);
    }
  }
  return found.length > 1 ? found : ticks(low, high, wanted).values.filter((x) => x > 0);
}

/** Ticks of an axis of seconds, at round durations. */
export function timeTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (rough < 1) return ticks(low, high, wanted).values;
  const step = DURATIONS.find((seconds) => seconds >= rough * 0.999) ?? ticks(low / 86400, high / 86400, wanted).step * 86400;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step || 0);
  return found;
}

/** A tick's text, with as many decimals as its neighbours need. */
export function tickText(x, step) {
  if (x === 0) return "0";
  if ((step < 1e-3 && Math.abs(x) < 0.1) || Math.abs(x) >= 1e6) {
    const power = Math.floor(Math.log10(Math.abs(x)) + 1e-9);
    const head = Number((x / 10 ** power).toPrecision(3));
    return `${head}e${power}`.replaceAll("-", "−");
  }
  if (Number.isInteger(x) && Number.isInteger(step)) return count(x);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const isBetween = decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6;
  return x.toFixed(isBetween ? decimals + 1 : decimals).replace("-", "−");
}

/** The minimum and maximum of the finite values, with a margin; null if there are none. */
export function range(values, fromZero) {
  let low = Infinity;
  let high = -Infinity;
  for (const x of values) {
    if (x < low) low = x;
    if (x > high) high = x;
  }
  if (low > high) return null;
  if (fromZero && low >= 0) return [0, high > 0 ? high * 1.12 : 1];
  if (low === high) return [low - Math.max(Math.abs(low) * 0.1, 1e-9), high + Math.max(Math.abs(high) * 0.1, 1e-9)];
  const air = (high - low) * 0.07;
  return [low >= 0 && low < air ? 0 : low - air, high + air];
}

/** The same on a logarithmic axis, for values above zero. */
export function logRange(values) {
  const found = range(values.map(Math.log10), false);
  return found && [10 ** found[0], 10 ** found[1]];
}

/** The index of the point whose x is nearest; the points are in the order of x. */
export function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] <= points[low][0] - x ? low - 1 : low;
}

/** Reduces [x, value] points to about `most`: the minimum and maximum of each stretch, so that no spike is lost. */
export function thin(points, most) {
  if (points.length <= most) return points;
  const perStretch = Math.ceil((points.length * 2) / most);
  const kept = [];
  for (let start = 0; start < points.length; start += perStretch) {
    const stretch = points.slice(start, start + perStretch);
    let low = stretch[0];
    let high = stretch[0];
    for (const point of stretch) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  const last = points[points.length - 1];
  if (kept[kept.length - 1] !== last) kept.push(last);
  return kept;
}

/** A centred moving average: unlike a trailing one, it does not lag behind. `part` is how much of the line it covers. */
export function smooth(points, part = 1 / 30) {
  const around = Math.max(1, Math.round((points.length * part) / 2));
  const sums = [0];
  for (const [, x] of points) sums.push(sums[sums.length - 1] + x);
  return points.map(([place], n) => {
    const reach = Math.min(around, n, points.length - 1 - n); // even on both sides, also at the ends
    return [place, (sums[n + reach + 1] - sums[n - reach]) / (2 * reach + 1)];
  });
}
