// The steps of a run that were loaded so far. Each refresh requests only the newer ones.

import { get, path } from "./api.js";

export class History {
  /** With `mostSteps` the service thins each response to so many steps: enough for a sparkline. */
  constructor(runId, mostSteps = null) {
    this.runId = runId;
    this.mostSteps = mostSteps;
    this.steps = [];
    this.count = 0;
    this.tokens = 0;
    this.seconds = 0;
    this.isActive = false;
    this.isLoaded = false;
    this.home = null; // the node that works on it, in a cluster
    this.next = -1;
  }

  async refresh(signal) {
    let answer;
    do {
      const query = { after_seq_id: this.next };
      if (this.mostSteps) query.most_steps = this.mostSteps;
      answer = await get(path("api/v1/training_runs", this.runId, "steps"), { query, signal });
      for (const step of answer.steps) {
        this.tokens += step.tokens;
        this.seconds += step.seconds;
        this.steps.push(step);
      }
      this.count += answer.count;
      this.next = answer.next_seq_id;
      // A long history comes in several responses. Later, one request per refresh is enough; the next gets the rest.
    } while (!this.isLoaded && answer.steps.length > 0);
    this.isActive = answer.is_active;
    this.home = answer.home ?? null;
    this.isLoaded = true;
  }

  get last() {
    return this.steps[this.steps.length - 1] ?? null;
  }

  get lastLoss() {
    for (let n = this.steps.length - 1; n >= 0; n -= 1) if (this.steps[n].loss !== null) return this.steps[n].loss;
    return null;
  }
}
