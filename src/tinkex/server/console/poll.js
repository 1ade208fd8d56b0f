// Polls while the page is visible, less often while the service does not respond, and tells the user about it.

const MOST_WAIT_MS = 30000;
const failing = new Map();
const polls = new Set();

/**
 * Runs `work(signal)` now and again `everyMs` after it has finished. Temporary errors are retried; any other is passed
 * to `refused(problem)` and ends the polling. Returns an object with `stop()` and `now()`.
 */
export function poll(work, everyMs, refused) {
  const controller = new AbortController();
  const self = { stop, now };
  let timer = null;
  let failures = 0;
  let isRunning = false;
  let isDue = false;

  async function now() {
    clearTimeout(timer);
    if (controller.signal.aborted || document.hidden) return;
    if (isRunning) {
      isDue = true;
      return;
    }
    isRunning = true;
    isDue = false;
    try {
      await work(controller.signal);
      failures = 0;
      tell(self, null);
    } catch (problem) {
      if (controller.signal.aborted) return;
      if (problem.isPassing === undefined) console.error(problem);
      if (problem.isPassing !== true) {
        stop();
        if (problem.status !== 401) refused?.(problem);
        return;
      }
      failures += 1;
      tell(self, problem);
    } finally {
      isRunning = false;
    }
    const wait = failures ? Math.min(MOST_WAIT_MS, everyMs * 2 ** Math.min(failures, 10)) : everyMs;
    timer = setTimeout(now, isDue ? 0 : wait);
  }

  function stop() {
    controller.abort();
    clearTimeout(timer);
    polls.delete(self);
    tell(self, null);
  }

  polls.add(self);
  now();
  return self;
}

function tell(self, problem) {
  if (problem) failing.set(self, problem.message);
  else failing.delete(self);
  const line = document.getElementById("connection");
  const message = lost();
  const text = message === null ? "" : `Connection lost, trying again. ${message}`;
  line.hidden = message === null;
  if (line.textContent === text) return;
  line.textContent = text;
  document.dispatchEvent(new CustomEvent("connection"));
}

/** What the service failed to respond to, or null while it responds. */
export function lost() {
  const [message] = failing.values();
  return message ?? null;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) polls.forEach((one) => one.now());
});
window.addEventListener("online", () => polls.forEach((one) => one.now()));
