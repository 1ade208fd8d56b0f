// Makes curves of what a run reported: which there are, what they are called, and in which group they are drawn. Pure.

import { duration, measure, rate, short, value } from "./format.js";

export const GROUPS = ["Loss", "Your metrics", "Policy", "Optimizer", "Speed", "Machine", "Other metrics of the service"];
const OWN = "Your metrics";
const OWN_LOOK = { kind: "is-own", isOwn: true };

/** Where a metric of a step belongs, by the first pattern that its name matches. Those of the service have a reducer. */
const PLACES = [
  [/^[^:]*$/, OWN],
  [/^loss:sum$/, "Loss", "Loss (sum)"],
  [/^loss(:|$)/, "Loss"],
  [/kl|ratio|clip|entropy|logprob/, "Policy"],
  [/grad|norm|learning_rate|weight_decay/, "Optimizer"],
  [/memory|cpu|rss|bytes/, "Machine"],
  [/./, "Other metrics of the service"],
];

/**
 * All curves of a run, as { group, plot, label, kind, text, isFromZero, points }. `axis` says what x is. A curve of which
 * every value is the same number is left out, unless the user sent it.
 */
export function curvesOf({ steps, entries = [], start }, axis) {
  const made = new Map();
  const add = (group, plot, label, look, x, y) => {
    if (typeof y !== "number" || !Number.isFinite(y)) return;
    const key = `${group}\n${plot}\n${label}`;
    let curve = made.get(key);
    if (!curve) made.set(key, (curve = { key, group, plot, label, kind: "is-other", text: measure, ...look, points: [] }));
    curve.points.push([x, y]);
  };
  for (const step of steps) addStep(add, step, placeOf(step, axis, start));
  const places = placesOf(steps, axis, start);
  for (const entry of entries) {
    const x = places(entry);
    for (const [name, y] of Object.entries(entry.metrics)) add(OWN, name, "", OWN_LOOK, x, y);
  }
  const curves = [...made.values()].filter(isTelling);
  for (const curve of curves) curve.points.sort((a, b) => a[0] - b[0]);
  return curves.sort((a, b) => GROUPS.indexOf(a.group) - GROUPS.indexOf(b.group));
}

function addStep(add, step, x) {
  const lossPlot = lossName(step);
  add("Loss", lossPlot, "training", { kind: "is-loss", text: value, isMain: true }, x, step.loss);
  add("Loss", lossPlot, "evaluation", { kind: "is-evaluation", text: value, isMain: true }, x, step.evaluation_loss);
  add("Optimizer", "Learning rate", "", { kind: "is-rate", text: rate, isFromZero: true, isMain: true }, x, step.learning_rate);
  const speed = step.seconds > 0 && step.tokens > 0 ? step.tokens / step.seconds : null;
  const isFromZero = true;
  add("Speed", "Tokens per second", "", { kind: "is-throughput", text: short, isFromZero, isMain: true }, x, speed);
  add("Speed", "Seconds of a step", "engine", { kind: "is-throughput", text: duration, isFromZero, isMain: true }, x, step.seconds);
  add("Speed", "Seconds of a step", "queue", { kind: "is-rate", text: duration, isFromZero }, x, step.queue_seconds);
  for (const [name, y] of Object.entries(step.metrics ?? {})) {
    if (name === "learning_rate:max" || (name === "loss:sum" && y === step.loss)) continue; // drawn already
    const [, group, title] = PLACES.find(([pattern]) => pattern.test(name));
    add(group, title ?? metricName(name), "", group === OWN ? OWN_LOOK : {}, x, y);
  }
}

/** What the loss of a step is: a mean over the weights of its tokens, or what the loss function returned. */
export function lossName(step) {
  return step?.metrics?.["loss:sum"] === step?.loss && typeof step?.loss === "number" ? "Loss" : "Loss per token";
}

/** "loss:sum" is "loss (sum)"; a mean goes by its name alone. */
export function metricName(name) {
  const [, stem, reducer] = /^(.*?)(?::([a-z0-9_]+))?$/.exec(name);
  return reducer && reducer !== "mean" ? `${stem} (${reducer})` : stem;
}

function isTelling(curve) {
  const [first] = curve.points;
  return curve.isOwn || curve.isMain || curve.points.some(([, y]) => y !== first[1]);
}

/** When a run began, in milliseconds. */
export function startOf(run, steps) {
  return new Date(run.created_at ?? steps[0]?.time ?? run.last_request_time).getTime();
}

/** Where a step is on the x axis. */
export function placeOf(step, axis, start) {
  if (axis === "time") return (new Date(step.time).getTime() - start) / 1000;
  return axis === "tokens" ? step.all_tokens : step.number;
}

/** Returns the place of an entry: the user's own step number, its time, or the tokens of the run until then. */
function placesOf(steps, axis, start) {
  if (axis === "time") return (entry) => (new Date(entry.time).getTime() - start) / 1000;
  if (axis === "step") return (entry) => entry.step ?? lastBefore(steps, entry)?.number ?? 0;
  return (entry) => lastBefore(steps, entry)?.all_tokens ?? 0;
}

/** The last step that had ended when the entry was made, by sequence number, or by time if it has none. */
function lastBefore(steps, { seq_id: seqId, time }) {
  const isBefore = seqId == null ? (step) => step.time <= time : (step) => step.seq_id <= seqId;
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isBefore(steps[middle])) low = middle + 1;
    else high = middle;
  }
  return steps[low - 1] ?? null;
}
