// The course of the loss of each run in the list. A run is asked for only if it had requests since.

import { get, path } from "./api.js";

const POINTS = 40;
const AT_ONCE = 6;

export class LossLines {
  constructor() {
    this.known = new Map();
  }

  of(run) {
    return this.known.get(run.training_run_id);
  }

  /** Loads what is new, a few runs at a time, and calls `draw` after each. */
  async refresh(runs, signal, draw) {
    const due = runs.filter((run) => {
      const known = this.of(run);
      return !known || known.isActive || known.seen !== run.last_request_time;
    });
    while (due.length > 0) {
      await Promise.all(due.splice(0, AT_ONCE).map((run) => this.load(run, signal)));
      draw();
    }
  }

  async load(run, signal) {
    const known = this.of(run) ?? { points: [], count: 0, next: -1, lastLoss: null };
    const query = { after_seq_id: known.next, most_steps: POINTS, only: "loss" };
    const answer = await get(path("api/v1/training_runs", run.training_run_id, "steps"), { query, signal });
    for (const step of answer.steps) if (step.loss !== null) known.points.push([step.seq_id, step.loss]);
    while (known.points.length > 4 * POINTS) known.points = known.points.filter((_, n) => n % 2 === 0);
    known.lastLoss = known.points[known.points.length - 1]?.[1] ?? null;
    known.count += answer.count;
    known.next = answer.next_seq_id;
    known.isActive = answer.is_active;
    known.seen = run.last_request_time;
    this.known.set(run.training_run_id, known);
  }
}
