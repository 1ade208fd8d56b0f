// What a run has reported so far: its steps, its own metrics, its samples. Each refresh requests only what is newer.

import { get, path } from "./api.js";

/** Above this many, every second step is dropped: plots have no more pixels, and the page stays open for days. */
const MOST_KEPT = 4000;
const PAGE_OF_LOG = 1000;

/** The steps of a run. Each has its `number`, and the tokens and seconds of the run up to its end. */
export class History {
  constructor(runId, mostSteps = MOST_KEPT / 4) {
    this.runId = runId;
    this.mostSteps = mostSteps;
    this.steps = [];
    this.count = 0;
    this.tokens = 0;
    this.seconds = 0;
    this.isActive = false;
    this.isLoaded = false;
    this.isThinned = false;
    this.home = null; // the node that works on it, in a cluster
    this.next = -1;
  }

  async refresh(signal) {
    let answer;
    do {
      const query = { after_seq_id: this.next, most_steps: this.mostSteps };
      answer = await get(path("api/v1/training_runs", this.runId, "steps"), { query, signal });
      this.add(answer);
      // A long history may come in several responses. Later, one request per refresh is enough.
    } while (!this.isLoaded && answer.steps.length > 0 && !answer.is_thinned);
    this.isActive = answer.is_active;
    this.home = answer.home ?? null;
    this.isLoaded = true;
  }

  add({ steps, count, next_seq_id }) {
    numbered(steps, this);
    this.isThinned ||= steps.length < count;
    this.steps.push(...steps);
    this.count += count;
    this.tokens = this.last?.all_tokens ?? 0;
    this.seconds = this.last?.all_seconds ?? 0;
    this.next = next_seq_id;
    while (this.steps.length > MOST_KEPT) {
      const end = this.steps.length - 1;
      this.steps = this.steps.filter((_, n) => n === 0 || (end - n) % 2 === 0);
      this.isThinned = true;
    }
  }

  /** The steps in a part of the x axis, in as much detail as a plot can show; `place(step)` is where a step is. */
  async between([from, to], place, signal) {
    const first = this.steps.findLast((step) => place(step) < from);
    const last = this.steps.find((step) => place(step) > to) ?? this.last;
    const query = { after_seq_id: first?.seq_id ?? -1, before_seq_id: last.seq_id + 1, most_steps: this.mostSteps };
    const { steps } = await get(path("api/v1/training_runs", this.runId, "steps"), { query, signal });
    numbered(steps, {
      count: first?.number ?? 0,
      tokens: first?.all_tokens ?? 0,
      seconds: first?.all_seconds ?? 0,
    });
    return steps;
  }

  get last() {
    return this.steps[this.steps.length - 1] ?? null;
  }

  get lastLoss() {
    for (let n = this.steps.length - 1; n >= 0; n -= 1) if (this.steps[n].loss !== null) return this.steps[n].loss;
    return null;
  }
}

/** Numbers the steps that follow `before`, and sums up. In a thinned list the service has counted from there. */
function numbered(steps, before) {
  let { count: number, tokens, seconds } = before;
  for (const step of steps) {
    const isCounted = step.number !== undefined;
    number = isCounted ? before.count + step.number : number + 1;
    tokens = isCounted ? before.tokens + step.tokens_so_far : tokens + step.tokens;
    seconds = isCounted ? before.seconds + step.seconds_so_far : seconds + step.seconds;
    Object.assign(step, { number, all_tokens: tokens, all_seconds: seconds });
  }
}

/** A list that grows: the user's metrics, or samples. A service without it has an empty one. */
export class Log {
  constructor(runId, name, list) {
    Object.assign(this, { runId, name, list, rows: [], next: 0, isOffered: true });
  }

  async refresh(signal) {
    if (!this.isOffered) return;
    let found;
    do {
      const query = { after: this.next, most: PAGE_OF_LOG };
      try {
        const answer = await get(path("api/v1/training_runs", this.runId, this.name), { query, signal });
        found = answer[this.list] ?? [];
        this.next = answer.next;
      } catch (problem) {
        if (problem.status !== 404 && problem.status !== 405) throw problem;
        this.isOffered = false;
        return;
      }
      this.rows.push(...found);
      this.shorten();
    } while (found.length === PAGE_OF_LOG);
  }

  /** Of metrics, every second entry is dropped when there are too many; of samples, the oldest. */
  shorten() {
    while (this.name === "metrics" && this.rows.length > MOST_KEPT) {
      const end = this.rows.length - 1;
      this.rows = this.rows.filter((_, n) => n === 0 || (end - n) % 2 === 0);
    }
    this.rows = this.rows.slice(-MOST_KEPT);
  }
}

export const metricsOf = (runId) => new Log(runId, "metrics", "entries");
export const samplesOf = (runId) => new Log(runId, "samples", "samples");
