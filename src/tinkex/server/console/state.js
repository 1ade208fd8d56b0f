// The state of the service, requested once for all pages.

import { get } from "./api.js";
import { poll } from "./poll.js";

const EVERY_MS = 2000;
const listeners = new Set();
let current = null;
let polling = null;

/** Calls `listener(state)` now, if there is a state, and with every new one. Returns a function that unsubscribes. */
export function onState(listener) {
  listeners.add(listener);
  if (current) listener(current);
  return () => listeners.delete(listener);
}

export function startState() {
  polling?.stop();
  polling = poll(async (signal) => {
    current = await get("api/v1/service_state", { signal });
    for (const listener of listeners) listener(current);
  }, EVERY_MS);
}

export function stopState() {
  polling?.stop();
  polling = null;
  current = null;
}
