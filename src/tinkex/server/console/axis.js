// What a plot's x axis can be: the step, the time since the run began, or the tokens so far. Pure.

import { count, duration, short } from "./format.js";
import { ticks, timeTicks, wholeTicks } from "./scale.js";

const plain = (text) => (low, high, wanted) => ticks(low, high, wanted).values.map((x) => [x, text(x)]);

/** `at` names the field of a point's place, `told` says where the cursor is. */
export const AXES = {
  step: {
    title: "step",
    choice: "Step",
    told: (x) => `step ${count(x)}`,
    ticks: (low, high, wanted) => wholeTicks(low, high, wanted).map((x) => [x, count(x)]),
  },
  time: {
    title: "time",
    choice: "Time",
    told: (x) => `after ${duration(x)}`,
    ticks: (low, high, wanted) => timeTicks(low, high, wanted).map((x) => [x, clock(x)]),
  },
  tokens: { title: "tokens", choice: "Tokens", told: (x) => `${short(x)} tokens`, ticks: plain(short) },
};

/** A duration as a tick: "0:30", "2:05:00", "3 d". */
function clock(seconds) {
  const s = Math.round(seconds);
  if (s !== seconds && seconds < 10) return `${Number(seconds.toFixed(2))} s`;
  if (s >= 172800 && s % 86400 === 0) return `${s / 86400} d`;
  if (s >= 86400 && s % 3600 === 0) return `${s / 3600} h`;
  const [hours, minutes, rest] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60].map(String);
  return hours === "0" ? `${minutes}:${rest.padStart(2, "0")}` : `${hours}:${minutes.padStart(2, "0")}:${rest.padStart(2, "0")}`;
}
