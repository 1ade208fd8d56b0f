// The course of the loss of each run in the list. A run is asked for only if it had requests since.

import { get, path } from "./api.js";

const POINTS = 40;
const AT_ONCE = 6;

export class LossLines {
  constructor() {
    this.known = new Map();
    this.isBusy = false;
  }

  of(run) {
    return this.known.get(run.training_run_id);
  }

  /** Loads what is new of these runs, a few at a time, and calls `draw` after each few. The list does not wait for it. */
  async refresh(runs, signal, draw) {
    this.runs = runs;
    this.fresh = new Set();
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      for (let due = this.due(); due.length > 0; due = this.due()) {
        await Promise.all(due.map((run) => this.load(run, signal)));
        draw();
      }
    } catch (problem) {
      if (problem.isPassing === undefined && !signal.aborted) throw problem; // the list itself tells of a lost connection
    } finally {
      this.isBusy = false;
    }
  }

  due() {
    const isDue = (run, known) => !known || known.isActive || known.seen !== run.last_request_time;
    const due = this.runs.filter((run) => !this.fresh.has(run.training_run_id) && isDue(run, this.of(run)));
    return due.slice(0, AT_ONCE);
  }

  async load(run, signal) {
    this.fresh.add(run.training_run_id);
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
