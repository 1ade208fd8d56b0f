// The state of a run, as the service says it; one that does not is asked only whether the run has work.

import { setText } from "./dom.js";

export const STATUSES = { running: "Running", idle: "Idle", finished: "Finished", failed: "Failed" };

export function showStatus(element, run, isActive = false) {
  const status = STATUSES[run.status] ? run.status : isActive ? "running" : "idle";
  element.classList.toggle("is-active", status === "running");
  element.classList.toggle("is-failed", status === "failed");
  element.classList.toggle("is-finished", status === "finished");
  setText(element, STATUSES[status]);
}
